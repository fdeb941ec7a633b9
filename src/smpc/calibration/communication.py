"""What ranks send each other: messages between neighbours, and collectives of the ranks of a host.

    wires = measure_wires(ranks)     None for one rank
    measure_host(ranks)              between a device and its host's memory, whatever the ranks are

A message is timed through the transport that steps use (`smpc.executor.measure.link_measurement`). A collective of replicas is timed as
torch has it, with the copies into and out of the buffers that it goes through, in several sizes; collectives between operations, as
`smpc.executor.collectives` has them, forward and backward. All of them are timed where they are: by how much longer a row of products takes
with a collective after each. There each rank waits until the other is done with its product as well, and none of what the other has written
is in a cache. A row is as long as a step's: the fastest of shorter ones has fewer late wake-ups of threads than any step.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.calibration.measuring_processes import CalibrationRanks
from smpc.calibration.operations import repeated, steady
from smpc.executor.collectives import TensorGroup, all_reduce, gather_in, replicate_in
from smpc.executor.measure.link_measurement import measure_wire
from smpc.executor.transport import GlooTransport, NcclTransport, Transport
from smpc.partitioner.costs.collective_times import IN_OPERATIONS, MOVES_IN_OPERATIONS, CollectiveKind
from smpc.partitioner.costs.device import Curve, Wire

_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)  # float32 elements
_COPIED = 1 << 22  # float32 elements of a copy to the host
_ROUNDS = 7
_SIDE = 192  # of products
_ROW = 16  # collectives
_ROWS = 2  # of a tensor whose slices are columns, as channels and the dimensions of tokens are
_LEAST = 1e-3  # of the time of such a row is for the calls between
_TIMEOUT = datetime.timedelta(seconds=120)


@dataclass(frozen=True)
class Wires:
    """What was measured: inside a host and between hosts (None: there is one host, or one rank a host), and collectives by kind."""

    inside: Wire | None
    between: Wire | None
    collectives: Mapping[str, Curve]


def measure_wires(ranks: CalibrationRanks) -> Wires:
    """The wires between all ranks; the same result on each."""
    inside = between = None
    collectives: dict[str, Curve] = {}
    if ranks.per_host > 1:
        inside = _measured_wire(ranks, list(range(2)))
        collectives = _collectives_on_wires(ranks)
    if ranks.size > ranks.per_host:
        between = _measured_wire(ranks, [0, ranks.per_host])
    found: list[object] = [Wires(inside, between, collectives)]
    dist.broadcast_object_list(found, src=0)
    (result,) = found
    assert isinstance(result, Wires)
    return result


def _measured_wire(ranks: CalibrationRanks, pair: list[int]) -> Wire | None:
    """The wire between two ranks, on these; None on others. Collective over all."""
    group = dist.new_group(pair, timeout=_TIMEOUT)
    found = None
    if ranks.rank in pair:
        rank = pair.index(ranks.rank)
        transport: Transport
        if ranks.device.type == "cuda":
            assert isinstance(group, dist.ProcessGroup)
            transport = NcclTransport(rank, {(0, 1): group, (1, 0): group}, ranks.device)
            transport.connect([(0, 1), (1, 0)])
        else:
            transport = GlooTransport(group)
        found = measure_wire(transport, rank, 2, ranks.device)
    ranks.together()
    return found


def _collectives_on_wires(ranks: CalibrationRanks) -> dict[str, Curve]:
    """Among the ranks of the first host; the ranks of other hosts do the same at once."""
    groups = [
        dist.new_group(list(range(first, first + ranks.per_host)), timeout=_TIMEOUT)
        for first in range(0, ranks.size, ranks.per_host)
    ]
    group = groups[ranks.rank // ranks.per_host]
    found, multiple = {}, _ROWS * ranks.per_host
    for kind, call, factor, times in _collective_calls(group):
        curve = []
        for elements in _SIZES:
            tensor = torch.zeros(elements // multiple * multiple, device=ranks.device)
            sent = factor * 4 * tensor.numel() * (ranks.per_host - 1) / ranks.per_host
            curve.append((sent, sent * times / _between_products(functools.partial(call, tensor), ranks)))
        curve.insert(0, (1.0, curve[0][1] / curve[0][0]))  # what is smaller takes as long as the smallest
        found[kind] = tuple(curve)
    return found


def _collective_calls(group: dist.ProcessGroup) -> Iterator[tuple[str, Callable[[Tensor], object], int, int]]:
    """By kind, a call on what a rank has before or afterwards, how often a collective sends that, and how many the call has."""
    size = group.size()

    def reduce(whole: Tensor) -> object:
        bucket = whole / size
        dist.all_reduce(bucket, group=group)
        return whole.copy_(bucket)

    def gather(whole: Tensor) -> object:
        buffer, part = torch.empty_like(whole), whole[: whole.numel() // size].clone()
        group._allgather_base(buffer, part).wait()
        return whole.copy_(buffer)

    def scatter(whole: Tensor) -> object:
        buffer, part = whole / size, whole.new_empty(whole.numel() // size)
        group._reduce_scatter_base(part, buffer, dist.ReduceScatterOptions()).wait()
        return part.clone()

    def exchange(whole: Tensor) -> object:
        return dist.all_to_all_single(torch.empty_like(whole), whole, group=group)

    ours = TensorGroup.of(group)

    def between_operations(whole: Tensor) -> object:
        x = whole.detach().requires_grad_()
        return replicate_in(all_reduce(x, ours), ours).backward(whole)  # type: ignore[no-untyped-call]

    def moves_between_operations(whole: Tensor) -> object:
        part = whole[: whole.numel() // size].view(_ROWS, -1).requires_grad_()
        return gather_in(part, 1, ours).backward(whole.view(_ROWS, -1))  # type: ignore[no-untyped-call]

    yield CollectiveKind.ALL_REDUCE, reduce, 2, 1
    yield CollectiveKind.ALL_GATHER, gather, 1, 1
    yield CollectiveKind.REDUCE_SCATTER, scatter, 1, 1
    yield CollectiveKind.ALL_TO_ALL, exchange, 1, 1
    yield IN_OPERATIONS, between_operations, 2, 2
    yield MOVES_IN_OPERATIONS, moves_between_operations, 1, 2


def _seconds_on_wire(call: Callable[[], object], ranks: CalibrationRanks) -> float:
    """Seconds of one call, until all ranks are done: near the least of several."""
    times = []
    for _ in range(_ROUNDS):
        ranks.together()
        ranks.wait()
        start = time.perf_counter()
        call()
        ranks.wait()
        times.append(time.perf_counter() - start)
    return ranks.most(steady(times))


def _between_products(call: Callable[[], object], ranks: CalibrationRanks) -> float:
    """Seconds by which a row of products grows for each call between them."""
    square = torch.ones(_SIDE, _SIDE, device=ranks.device)

    def row(between: Callable[[], object]) -> None:
        for _ in range(_ROW):
            square @ square
            between()

    apart, without = (_seconds_on_wire(functools.partial(row, body), ranks) for body in (call, lambda: None))
    return max(apart - without, _LEAST * apart) / _ROW


def assumed(bandwidth: float) -> Wire:
    """A wire that nobody has measured: memory's rate, there and back."""
    return Wire(bandwidth / 2, 50e-6)


def measure_host(ranks: CalibrationRanks) -> Wire:
    """What offloaded values are copied over, the slower of both directions: from pinned memory to a GPU and back; on a CPU, in memory."""
    small, large = (_copy_seconds(ranks, elements) for elements in (1, _COPIED))
    return Wire(4 * _COPIED / ranks.mean([large])[0], ranks.mean([small])[0])


def _copy_seconds(ranks: CalibrationRanks, elements: int) -> float:
    """Seconds of one copy, until the device is done."""
    here = torch.zeros(elements, device=ranks.device)
    ranks.together()
    if ranks.device.type == "cpu":
        return repeated(here.clone, ranks)
    host = torch.zeros(elements, pin_memory=True)
    ways = (lambda: host.copy_(here, non_blocking=True), lambda: here.copy_(host, non_blocking=True))
    return max(repeated(way, ranks) for way in ways)
