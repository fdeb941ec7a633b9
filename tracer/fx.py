"""A trace as a torch.fx graph, for tools that read one and for torch's own passes.

Nodes keep their names; every fx node carries the recorded `Node` in `meta["smpc"]`. Attribute reads become `get_attr` nodes, effects on
buffers call `builtins.setattr` on the module. Run the graph with `torch.fx.Interpreter(model, graph=graph)`: fx's own code printer
cannot print every constant that models use, the interpreter needs none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from smpc.tracer import targets
from smpc.tracer.constants import TraceDevice, map_references
from smpc.tracer.ir import NodeKind, Trace


def to_fx(trace: Trace, device: torch.device | str = "cpu") -> fx.Graph:
    """The graph of a trace. Its output is the tuple of the output's leaves; `device` replaces the traced device.

    Raises ValueError for traces with rebound buffers, which fx has no node for.
    """
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def convert(tree: Any) -> Any:
        tree = map_references(tree, lambda name: nodes[name])
        return torch.device(device) if isinstance(tree, TraceDevice) else tree

    for node in trace.nodes:
        args = tuple(convert(arg) for arg in node.args)
        kwargs = {key: convert(value) for key, value in node.kwargs}
        if node.kind is NodeKind.PLACEHOLDER:
            made = graph.placeholder(node.name)
        elif node.kind is NodeKind.GET_ATTR:
            made = graph.create_node("get_attr", node.target, name=node.name)
        elif node.kind is NodeKind.CALL_MODULE:
            made = graph.create_node("call_module", node.target, args, kwargs, name=node.name)
        elif node.kind is NodeKind.CALL_FUNCTION:
            made = graph.create_node("call_function", targets.function(node.target), args, kwargs, name=node.name)
        else:
            raise ValueError(f"{node.name} rebinds buffer {node.target}: torch.fx has no such node")
        made.meta["smpc"] = node
        nodes[node.name] = made
    graph.output(tuple(convert(leaf) for leaf in trace.output_leaves))
    return graph
