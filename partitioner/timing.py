"""Times of the nodes of a trace, measured: each node is run by itself on real tensors, forward and backward.

The nodes are evaluated in order, as in `smpc.tracer.replay`, then their backwards in reverse, on a copy of the model, so nothing of the
model changes. Every value is cut off from what made it, so that a node's backward is its own. This is done several times after a
pass that does not count, and a time is the median. The backward of a node that writes into a value that needs a gradient is taken to
last as long as its forward.

`parameter_times` measures nothing: it gives every node the bytes of the parameters that it is the first to use, for plans that look at
parameter sizes and the order of modules alone.

Example: `measure_times(record(model, (x,)), model, (x,), {}).forward` has the seconds of each node of the trace.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from smpc.errors import ConfigError
from smpc.partitioner.cost import NodeTimes
from smpc.partitioner.problem import FloatArray
from smpc.tracer.ir import Node, NodeKind, Trace
from smpc.tracer.literals import map_references
from smpc.tracer.replay import context, evaluate, input_values, read_attribute

_RUNS = 5


def measure_times(
    trace: Trace,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    runs: int = _RUNS,
    device: torch.device | None = None,
) -> NodeTimes:
    """Seconds of every node, on `device`, by default that of the model's parameters; another one must hold a copy of the model.

    Raises ConfigError for a model or inputs without memory (meta tensors).
    """
    inputs = input_values(trace, args, kwargs)
    held = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in (*held, *inputs.values())):
        raise ConfigError(
            "trace_execution_times: expected a model and inputs with memory, found tensors on the meta device; "
            "make them on a real device, or plan with predicted times"
        )
    if device is None:
        device = held[0].device if held else torch.device("cpu")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        stopwatch = _Stopwatch(trace, copy.deepcopy(model).to(device), inputs, device)
        passes = [stopwatch.run() for _ in range(runs + 1)][1:]
    forward, backward = (np.median([times[k] for times in passes], axis=0) for k in (0, 1))
    return NodeTimes(forward, backward)


def parameter_times(trace: Trace) -> NodeTimes:
    """Seconds that stand for bytes of parameters: a femtosecond each, at the node that uses them first."""
    forward, backward = np.zeros((2, len(trace.nodes)))
    names = {name: i for i, state in enumerate(trace.state) if state.is_parameter for name in state.names}
    reads = {
        node.name: names[node.target] for node in trace.nodes if node.kind is NodeKind.GET_ATTR and node.target in names
    }
    seen: set[int] = set()
    for position, node in enumerate(trace.nodes):
        used = [reads[name] for name in node.inputs if name in reads]
        if node.kind is NodeKind.CALL_MODULE:
            used += [i for name, i in names.items() if name.startswith(f"{node.target}.")]
        for i in dict.fromkeys(used):
            if i not in seen:
                seen.add(i)
                forward[position] += trace.state[i].spec.num_bytes * 1e-15
    return NodeTimes(forward, backward)


class _Stopwatch:
    """One measurement; `values` are the results so far in a pass, each a leaf of autograd."""

    def __init__(self, trace: Trace, model: nn.Module, inputs: Mapping[str, Tensor], device: torch.device) -> None:
        self.trace, self.model, self.inputs, self.device = trace, model, inputs, device
        self.values: dict[str, Any] = {}

    def run(self) -> tuple[FloatArray, FloatArray]:
        """The times of one pass: all forwards, then all backwards."""
        forward, backward = np.zeros((2, len(self.trace.nodes)))
        self.values = {name: tensor.to(self.device).clone() for name, tensor in self.inputs.items()}
        for node in self.trace.nodes:
            if node.kind is NodeKind.GET_ATTR:
                self.values[node.name] = read_attribute(self.model, node.target)
        pending: list[tuple[int, list[Tensor], list[Tensor]]] = []
        for i, node in enumerate(self.trace.nodes):
            if node.kind in (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE):
                forward[i], roots, wanted = self.node(node)
                if roots and wanted:
                    pending.append((i, roots, wanted))
                elif node.mutates and node.spec is not None and node.spec.requires_grad:
                    backward[i] = forward[i]
            elif node.kind is NodeKind.SET_ATTR:
                owner, _, name = node.target.rpartition(".")
                self.model.get_submodule(owner).register_buffer(name, self.values[node.inputs[0]])
        while pending:
            i, roots, wanted = pending.pop()
            grads = [torch.ones_like(root) for root in roots]
            backward[i], _ = self.once(functools.partial(torch.autograd.grad, roots, wanted, grads, allow_unused=True))
        return forward, backward

    def node(self, node: Node) -> tuple[float, list[Tensor], list[Tensor]]:
        """Seconds of the node's forward, and between what its backward leads; notes its value."""
        written = [self.values[name] for name in node.mutates]
        with torch.set_grad_enabled(not any(isinstance(v, Tensor) and v.requires_grad for v in written)):
            seconds, value = self.once(lambda: self.evaluate(node))
        roots = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        wanted = [leaf for leaf in self.reads(node) if leaf.requires_grad]

        def cut(tensor: Tensor) -> Tensor:
            needs = tensor.requires_grad or bool(node.spec and node.spec.requires_grad)
            return tensor.detach().requires_grad_(needs and tensor.is_floating_point())

        self.values[node.name] = tree_map_only(Tensor, cut, value)
        return seconds, roots, wanted

    def evaluate(self, node: Node) -> Any:
        """What the node returns."""
        if node.kind is NodeKind.CALL_FUNCTION:
            return evaluate(node, self.values, self.device)
        args, kwargs = map_references((node.args, dict(node.kwargs)), self.values.__getitem__)
        with context(node.grad_enabled, node.autocast):
            return self.model.get_submodule(node.target)(*args, **kwargs)

    def reads(self, node: Node) -> Iterator[Tensor]:
        """The tensors that the node's gradient may flow to, each once."""
        own = self.model.get_submodule(node.target).parameters() if node.kind is NodeKind.CALL_MODULE else ()
        leaves = (leaf for name in node.inputs for leaf in tree_leaves(self.values[name]))
        found = {id(leaf): leaf for leaf in (*leaves, *own) if isinstance(leaf, Tensor)}
        yield from found.values()

    def once(self, body: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of one run, and what it returns."""
        self.synchronize()
        start = time.perf_counter()
        result = body()
        self.synchronize()
        return time.perf_counter() - start, result

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
