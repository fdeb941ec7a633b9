"""Times of the nodes of a trace, measured where they are: in runs of the whole trace on real tensors, forward and backward.

The nodes are evaluated in order, as in `smpc.tracer.replay`, on a copy of the model, so nothing of the model changes. A value is let go
when its last reader has run, so memory is as in a run of the model. Then autograd does the backward of all at once, from the losses,
or from all outputs, of the model; a hook at each operation of it notes the time:

    forward      of a node: its call, and to let go of what it is the last to read
    backward     of a node: of the operations that its call put into autograd's graph, each until the next one starts. Adding to the
                 gradients of parameters is part of it

This is done several times after a pass that does not count, and a time is the median, stretched so that all together last as long as
a pass.

`parameter_times` measures nothing: it gives every node the bytes of the parameters that it is the first to use, for plans that look at
parameter sizes and the order of modules alone.

Example: `measure_times(record(model, (x,)), model, (x,), {}).forward` has the seconds of each node of the trace.

`measure_workspace` measures what the nodes make and drop while they work: memory that shapes alone do not tell.

A recorded trace knows every tensor that outlives the call that made it. Its workspace is the library's own: the columns into which a
convolution unfolds its input, the parts of a composed operation. It runs the trace once on real tensors, under the profiler, which
sees every block that the allocator gives out:

    workspace    of a node, forward or backward: the most bytes at once of blocks that were taken and given back during its call or, in
                 the backward, during the consecutive operations that its call put into autograd's graph

Example: of `conv2d` on a CPU, 3 channels of 64 x 64 and a kernel of 3 x 3: 27 * 4096 * 4 bytes, forward and backward.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.autograd.graph import Node as Operation
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from smpc.errors import ConfigError
from smpc.partitioner.costs.node_costs import NodeTimes, Workspace
from smpc.partitioner.stage_costs import FloatArray
from smpc.tracer import targets
from smpc.tracer.ir import Node, NodeKind, Trace
from smpc.tracer.replay import context, input_values, read_attribute, resolved

_RUNS = 5


def measure_times(
    trace: Trace,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    runs: int = _RUNS,
    device: torch.device | None = None,
) -> NodeTimes:
    """Seconds of every node, on `device`, by default the model's; another one must hold a copy of the model.

    Raises ConfigError for a model or inputs without memory (meta tensors).
    """
    stopwatch = Stopwatch(trace, model, args, kwargs, device)
    stopwatch.run()
    return median_node_times([stopwatch.run() for _ in range(runs)])


def median_node_times(passes: Sequence[NodeTimes]) -> NodeTimes:
    """The medians of the nodes, as long in all as the median pass.

    Where processes share cores, a node is rarely interrupted and a stage always: medians of nodes leave the interruptions out.
    """
    return NodeTimes(
        _median_times([times.forward for times in passes]), _median_times([times.backward for times in passes])
    )


def _median_times(passes: Sequence[FloatArray]) -> FloatArray:
    """The median time of each node, to the scale of the median pass."""
    stacked = np.array(passes)
    medians: FloatArray = np.median(stacked, axis=0)
    total = medians.sum()
    return medians * max(1.0, float(np.median(stacked.sum(axis=1)) / total)) if total else medians


def _device_of(
    model: nn.Module, inputs: Mapping[str, Tensor], device: torch.device | None, option: str
) -> torch.device:
    held = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in (*held, *inputs.values())):
        raise ConfigError(
            f"{option}: expected a model and inputs with memory, found tensors on the meta device; make them on a real device, or leave "
            "it out"
        )
    if device is not None:
        return device
    return held[0].device if held else torch.device("cpu")


def parameter_times(trace: Trace) -> NodeTimes:
    """Seconds that represent bytes of parameters: a femtosecond each, at the node that uses them first."""
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


class Stopwatch:
    """Passes of one trace over a copy of the model; the first is slower than the others. For the arguments see `measure_times`.

    `values` are the results so far in a pass that are still needed, `owner` the node of each autograd operation.
    """

    option = "trace_execution_times"  # of `smpc.partition`, for messages

    def __init__(
        self,
        trace: Trace,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        device: torch.device | None = None,
    ) -> None:
        self.trace, self.inputs = trace, input_values(trace, args, kwargs)
        self.device = _device_of(model, self.inputs, device, self.option)
        self.model = copy.deepcopy(model).to(self.device)
        self.values: dict[str, Any] = {}
        self.owner: dict[Operation, int] = {}
        self.stamps: list[tuple[int, float]] = []
        self.last_read: list[list[str]] = [[] for _ in trace.nodes]
        last = {name: i for i, node in enumerate(trace.nodes) for name in (node.name, *node.inputs)}
        for name, i in last.items():
            if name not in trace.output_names:
                self.last_read[i].append(name)

    def run(self) -> NodeTimes:
        """The times of one pass: all forwards, then all backwards. Random states stay as they are."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), torch.enable_grad():
            return self.one_pass()

    def one_pass(self) -> NodeTimes:
        """The times of one pass."""
        forward, backward = np.zeros((2, len(self.trace.nodes)))
        self.values = {name: tensor.to(self.device).clone() for name, tensor in self.inputs.items()}
        self.owner, self.stamps = {}, []
        for node in self.trace.nodes:
            if node.kind is NodeKind.GET_ATTR:
                self.values[node.name] = read_attribute(self.model, node.target)
        for i, node in enumerate(self.trace.nodes):
            if node.kind in (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE):
                forward[i] = self.node(i, node)
            elif node.kind is NodeKind.SET_ATTR:
                owner, _, name = node.target.rpartition(".")
                self.model.get_submodule(owner).register_buffer(name, self.values[node.inputs[0]])
        roots = self.roots()
        if roots:
            gradients = [torch.ones_like(root) for root in roots]
            torch.autograd.backward(roots, gradients)
            ends = [stamp for _, stamp in self.stamps[1:]] + [self.clock()]
            self.end()
            for (i, start), stop in zip(self.stamps, ends, strict=True):
                backward[i] += stop - start
        self.values, self.owner = {}, {}
        return NodeTimes(forward, backward)

    def node(self, i: int, node: Node) -> float:
        """Seconds of the node's forward; notes its value and its part of the autograd graph."""
        seconds = self.call(i, node)
        made = [self.values[name] for name in (node.name, *node.mutates)]
        self.watch(i, [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)])
        del made
        return seconds + self.once(lambda: [self.values.pop(name) for name in self.last_read[i]].clear())

    def call(self, i: int, node: Node) -> float:
        """Seconds of the node's call; notes its value."""
        args = [resolved(arg, self.values, self.device) for arg in node.args]
        kwargs = {key: resolved(value, self.values, self.device) for key, value in node.kwargs}
        is_module = node.kind is NodeKind.CALL_MODULE
        function = self.model.get_submodule(node.target) if is_module else targets.function(node.target)
        found: list[Any] = []
        with context(node.grad_enabled, node.autocast):
            self.begin(i, backward=False)
            seconds = self.once(lambda: found.append(function(*args, **kwargs)))
            self.end()
        (self.values[node.name],) = found
        return seconds

    def begin(self, i: int, *, backward: bool) -> None:
        """The node's forward, or an operation of its backward, begins."""
        if backward:
            self.stamps.append((i, self.clock()))

    def end(self) -> None:
        """The node's forward, or the whole backward, has ended."""

    def watch(self, i: int, tensors: Sequence[Tensor]) -> None:
        """Has the operations that are new in the graph behind these tensors note when they start."""

        def note(_: Any) -> None:
            self.begin(i, backward=True)

        pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        while pending:
            operation = pending.pop()
            if operation in self.owner or operation.name().endswith("AccumulateGrad"):  # part of what comes before it
                continue
            self.owner[operation] = i
            operation.register_prehook(note)
            pending += [before for before, _ in operation.next_functions if before is not None]

    def roots(self) -> list[Tensor]:
        """Where the backward starts: outputs of one element, such as a loss; else all that need a gradient."""
        outputs = (self.values[name] for name in self.trace.output_names)
        wanted = [out for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None]
        return [out for out in wanted if out.numel() == 1] or wanted

    def once(self, body: Callable[[], Any]) -> float:
        """Seconds of one run."""
        start = self.clock()
        body()
        return self.clock() - start

    def clock(self) -> float:
        """The time, once the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


_MARK = "smpc workspace"


def measure_workspace(
    trace: Trace, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None = None
) -> Workspace:
    """Bytes of every node, on `device`; for arguments and errors see `measure_times`."""
    stopwatch = _Marked(trace, model, args, kwargs, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        stopwatch.run()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = sorted(_flat_timing_events(results.experimental_event_tree()), key=lambda event: event.start_time_ns)
    found = Workspace(*np.zeros((2, len(trace.nodes)), dtype=np.int64))
    for mark, blocks in _timing_spans(events, stopwatch.device.type):
        _, _, phase, position = mark.rsplit(" ", 3)
        bytes_of = found.backward if phase == "backward" else found.forward
        bytes_of[int(position)] = max(int(bytes_of[int(position)]), _most_bytes_when_timed(blocks))
    return found


class _Marked(Stopwatch):
    """Marks in the profile where the work of each node begins and ends."""

    option = "trace_memory_usage"

    def begin(self, i: int, *, backward: bool) -> None:
        """The node's forward, or an operation of its backward, begins."""
        with record_function(f"{_MARK} {'backward' if backward else 'forward'} {i}"):
            super().begin(i, backward=backward)

    def end(self) -> None:
        """The node's forward, or the whole backward, has ended."""
        with record_function(_MARK):
            super().end()


def _flat_timing_events(events: Sequence[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat_timing_events(event.children)


def _timing_spans(events: Sequence[Any], device: str) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """(mark, blocks allocated and freed as (address, bytes)) for each period of work of one node."""
    mark, blocks = _MARK, list[tuple[int, int]]()
    for event in events:
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == device:
                blocks.append((fields.ptr, fields.alloc_size))
        elif event.name.startswith(_MARK) and event.name != mark:
            if mark != _MARK:
                yield mark, blocks
            mark, blocks = event.name, []


def _most_bytes_when_timed(blocks: Sequence[tuple[int, int]]) -> int:
    """The most bytes at once of the blocks that are freed again."""
    taken: dict[int, int] = {}  # address -> index of where it was taken
    passing: list[tuple[int, int]] = []  # (index, bytes)
    for index, (address, num_bytes) in enumerate(blocks):
        if num_bytes > 0:
            taken[address] = index
        elif address in taken:
            passing += [(taken.pop(address), -num_bytes), (index, num_bytes)]
    live = most = 0
    for _, num_bytes in sorted(passing):
        live += num_bytes
        most = max(most, live)
    return most
