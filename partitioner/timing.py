"""Times of the nodes of a trace, measured: each node is run by itself on real tensors, forward and backward.

The nodes are evaluated in order, as in `smpc.tracer.replay`, on a copy of the model, so nothing of the model changes. Every value is
cut off from what made it, so that a node's backward is its own. A time is the median of several runs after one that does not
count. A node that writes into a value that needs a gradient is run once, and its backward is taken to last as long as its forward.

Example: `measure_times(record(model, (x,)), model, (x,), {}).forward` has the seconds of each node of the trace.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from smpc.errors import ConfigError
from smpc.partitioner.cost import NodeTimes
from smpc.tracer.ir import Node, NodeKind, Trace
from smpc.tracer.literals import map_references
from smpc.tracer.replay import context, evaluate, input_values, read_attribute

_RUNS = 5


def measure_times(
    trace: Trace, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], runs: int = _RUNS
) -> NodeTimes:
    """Seconds of every node, on the device of the model's parameters.

    Raises ConfigError for a model or inputs without memory (meta tensors).
    """
    inputs = input_values(trace, args, kwargs)
    held = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in (*held, *inputs.values())):
        raise ConfigError(
            "trace_execution_times: expected a model and inputs with memory, found tensors on the meta device; "
            "make them on a real device, or plan with predicted times"
        )
    device = held[0].device if held else torch.device("cpu")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return _Stopwatch(trace, copy.deepcopy(model), inputs, device, runs).run()


class _Stopwatch:
    """One measurement; `values` are the results so far, each a leaf of autograd."""

    def __init__(
        self, trace: Trace, model: nn.Module, inputs: Mapping[str, Tensor], device: torch.device, runs: int
    ) -> None:
        self.trace, self.model, self.device, self.runs = trace, model, device, runs
        self.values: dict[str, Any] = {name: tensor.to(device).clone() for name, tensor in inputs.items()}
        for node in trace.nodes:
            if node.kind is NodeKind.GET_ATTR:
                self.values[node.name] = read_attribute(model, node.target)

    def run(self) -> NodeTimes:
        """The times."""
        forward, backward = np.zeros((2, len(self.trace.nodes)))
        for i, node in enumerate(self.trace.nodes):
            if node.kind in (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE):
                forward[i], backward[i] = self.node(node)
            elif node.kind is NodeKind.SET_ATTR:
                evaluate_set = self.values[next(iter(node.inputs))]
                owner, _, name = node.target.rpartition(".")
                setattr(self.model.get_submodule(owner), name, evaluate_set)
        return NodeTimes(forward, backward)

    def node(self, node: Node) -> tuple[float, float]:
        """Seconds of the node's forward and backward; notes its value."""
        written = [self.values[name] for name in node.mutates]
        if any(isinstance(value, Tensor) and value.requires_grad for value in written):
            with torch.no_grad():
                seconds, value = self.once(lambda: self.evaluate(node))
            self.note(node, value)
            return seconds, seconds
        value = self.evaluate(node)
        seconds = self.median(lambda: self.evaluate(node))
        outputs = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
        wanted = [leaf for leaf in self.reads(node) if leaf.requires_grad]
        backward = 0.0
        if outputs and wanted and any(leaf.grad_fn is not None for leaf in outputs):
            roots = [leaf for leaf in outputs if leaf.grad_fn is not None]
            grads = [torch.ones_like(leaf) for leaf in roots]

            def back() -> object:
                return torch.autograd.grad(roots, wanted, grads, retain_graph=True, allow_unused=True)

            back()
            backward = self.median(back)
        self.note(node, value)
        return seconds, backward

    def evaluate(self, node: Node) -> Any:
        """What the node returns."""
        if node.kind is NodeKind.CALL_FUNCTION:
            return evaluate(node, self.values, self.device)
        arguments = map_references((node.args, dict(node.kwargs)), lambda ref: self.values[ref.name])
        with context(node.grad_enabled, node.autocast):
            return self.model.get_submodule(node.target)(*arguments[0], **arguments[1])

    def reads(self, node: Node) -> Iterator[Tensor]:
        """The tensors that the node's gradient may flow to, each once."""
        own = self.model.get_submodule(node.target).parameters() if node.kind is NodeKind.CALL_MODULE else ()
        leaves = (leaf for name in node.inputs for leaf in tree_leaves(self.values[name]))
        found = {id(leaf): leaf for leaf in (*leaves, *own) if isinstance(leaf, Tensor)}
        yield from found.values()

    def note(self, node: Node, value: Any) -> None:
        """Keeps the value, cut off from what made it."""

        def cut(tensor: Tensor) -> Tensor:
            needs = tensor.requires_grad or bool(node.spec and node.spec.requires_grad)
            return tensor.detach().requires_grad_(needs and tensor.is_floating_point())

        self.values[node.name] = tree_map_only(Tensor, cut, value)

    def median(self, body: Callable[[], object]) -> float:
        """Seconds of one run, the median of several."""
        return float(np.median([self.once(body)[0] for _ in range(self.runs)]))

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
