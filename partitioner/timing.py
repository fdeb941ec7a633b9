"""Times of the nodes of a trace, measured: each node is run by itself on real tensors, forward and backward.

The nodes are evaluated in order, as in `smpc.tracer.replay`, then their backwards in reverse, on a copy of the model, so nothing of the
model changes. Every value is cut off from what made it, so that a node's backward is its own. This is done several times after a
pass that does not count, and a time is the median, stretched so that all together last as long as a pass. The backward of a node that
writes into a value that needs a gradient is taken to last as long as its forward. A backward includes adding to the gradients of
parameters, as all microbatches but a step's first do; what starting autograd costs, which a stage pays once and not for every node, is
measured and taken off.

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
from smpc.tracer import targets
from smpc.tracer.ir import Node, NodeKind, Trace
from smpc.tracer.replay import context, input_values, read_attribute, resolved

_RUNS = 5
_STARTS = 50


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
    forward, backward = (_typical(np.array([times[k] for times in passes])) for k in (0, 1))
    return NodeTimes(forward, backward)


def _typical(passes: FloatArray) -> FloatArray:
    """The medians of the nodes, as long in all as the median pass.

    Where processes share cores, a node is rarely interrupted and a stage always: medians of nodes leave the interruptions out.
    """
    medians: FloatArray = np.median(passes, axis=0)
    total = medians.sum()
    return medians * max(1.0, float(np.median(passes.sum(axis=1)) / total)) if total else medians


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
        self.sums: dict[int, Tensor] = {}  # gradients of parameters, by id
        self.start = self.start_of_backward()

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
            seconds, _ = self.once(functools.partial(self.backward, roots, wanted, [torch.ones_like(r) for r in roots]))
            backward[i] = max(seconds - self.start, seconds / 10)
        return forward, backward

    def node(self, node: Node) -> tuple[float, list[Tensor], list[Tensor]]:
        """Seconds of the node's forward, and between what its backward leads; notes its value."""
        written = [self.values[name] for name in node.mutates]
        with torch.set_grad_enabled(not any(isinstance(v, Tensor) and v.requires_grad for v in written)):
            seconds, value = self.once(self.bound(node))
        roots = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        wanted = [leaf for leaf in self.reads(node) if leaf.requires_grad]

        def cut(tensor: Tensor) -> Tensor:
            needs = tensor.requires_grad or bool(node.spec and node.spec.requires_grad)
            return tensor.detach().requires_grad_(needs and tensor.is_floating_point())

        self.values[node.name] = tree_map_only(Tensor, cut, value)
        return seconds, roots, wanted

    def bound(self, node: Node) -> Callable[[], Any]:
        """The node's call with its arguments looked up, so that only the call itself is timed."""
        args = [resolved(arg, self.values, self.device) for arg in node.args]
        kwargs = {key: resolved(value, self.values, self.device) for key, value in node.kwargs}
        is_module = node.kind is NodeKind.CALL_MODULE
        function = self.model.get_submodule(node.target) if is_module else targets.function(node.target)

        def call() -> Any:
            with context(node.grad_enabled, node.autocast):
                return function(*args, **kwargs)

        return call

    def backward(self, roots: list[Tensor], wanted: list[Tensor], gradients: list[Tensor]) -> None:
        """One node's backward; gradients of parameters are added up."""
        for leaf, found in zip(wanted, torch.autograd.grad(roots, wanted, gradients, allow_unused=True), strict=True):
            total = self.sums.get(id(leaf))
            if total is not None and found is not None:
                total.add_(found)

    def start_of_backward(self) -> float:
        """Seconds of a backward that has nothing to do; makes room for the gradients."""
        self.sums = {id(p): torch.zeros_like(p) for p in self.model.parameters() if p.requires_grad}
        leaf = torch.ones(1, device=self.device, requires_grad=True)
        with torch.enable_grad():
            root = leaf.view(1)
        body = functools.partial(torch.autograd.grad, [root], [leaf], [torch.ones_like(leaf)], retain_graph=True)
        return float(np.median([self.once(body)[0] for _ in range(_STARTS)]))

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
