"""What the nodes of a trace make and drop while they work, measured: memory that shapes alone do not tell.

A recorded trace knows every tensor that outlives the call that made it. What a call needs in between is the library's own affair: the
columns into which a convolution unfolds its input, the parts of an operation that is made of several. `measure_workspace` runs the trace
once on real tensors, as `smpc.partitioner.timing` does, under the profiler, which sees every block that the allocator gives out:

    workspace    of a node, forward or backward: the most bytes at once of blocks that were taken and given back during its call or, in
                 the backward, during the consecutive operations that its call put into autograd's graph

Example: of `conv2d` on a CPU, 3 channels of 64 x 64 and a kernel of 3 x 3: 27 * 4096 * 4 bytes, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from smpc.partitioner.cost import Workspace
from smpc.partitioner.timing import Stopwatch
from smpc.tracer.ir import Trace

_MARK = "smpc workspace"


def measure_workspace(
    trace: Trace, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None = None
) -> Workspace:
    """Bytes of every node, on `device`; arguments and errors are those of `smpc.partitioner.timing.measure_times`."""
    stopwatch = _Marked(trace, model, args, kwargs, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        stopwatch.run()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = sorted(_flat(results.experimental_event_tree()), key=lambda event: event.start_time_ns)
    found = Workspace(*np.zeros((2, len(trace.nodes)), dtype=np.int64))
    for mark, blocks in _spans(events, stopwatch.device.type):
        _, _, phase, position = mark.rsplit(" ", 3)
        bytes_of = found.backward if phase == "backward" else found.forward
        bytes_of[int(position)] = max(int(bytes_of[int(position)]), _most(blocks))
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


def _flat(events: Sequence[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)


def _spans(events: Sequence[Any], device: str) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """(mark, blocks taken and given back as (address, bytes)) of each stretch of work of one node."""
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


def _most(blocks: Sequence[tuple[int, int]]) -> int:
    """The most bytes at once of the blocks that are given back."""
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
