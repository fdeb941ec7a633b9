"""Measures between ranks: the latency and bandwidth of messages, and the offset of clocks.

A message's time has two parts: seconds for an empty message, and bytes per second.

    wire = measure_wire(transport, rank, num_ranks)     # collective over the pipeline, between steps

Messages go to and fro between neighbours, pair after pair, through the transport that the steps use; half of a round trip is one
message. Latency is the smallest message's time, bandwidth follows from the difference to the largest; both are medians, also over
the pairs. With the result, a `Wire` of a device description, message times are predicted for this machine:

    dataclasses.replace(find_device("cpu"), inside_host=wire)

`clock_offset` measures how far the clocks of ranks on other hosts are from rank 0's.

    offset = clock_offset(group, device)        # collective; `time.monotonic_ns() + offset` is rank 0's clock, about

Each rank in turn asks rank 0 for its time, a few times, and takes the answer that was quickest: that answer was given at the middle
of the question, within half of its round trip.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.executor.transport import Transport, WireFormat
from smpc.partitioner.costs.device import Wire
from smpc.tracer.ir import TensorSpec

_SMALL, _LARGE = 64, 1 << 20  # float32 elements
_ROUNDS = 20


def measure_wire(transport: Transport, rank: int, num_ranks: int, device: torch.device | str = "cpu") -> Wire:
    """The wire between neighbours; the same on all ranks that take part. With one rank there is none to measure: free."""
    device = torch.device(device)
    results = torch.zeros(max(num_ranks - 1, 1), 2, dtype=torch.float64, device=device)
    for first in range(num_ranks - 1):
        if rank in (first, first + 1):
            times = [_one_way(transport, rank, first, size, device) for size in (_SMALL, _LARGE)]
            results[first] = torch.tensor(times, dtype=torch.float64)
    _share_results(transport, rank, num_ranks, results)
    transport.flush()
    transport.forget()
    if num_ranks == 1:
        return Wire(float("inf"), 0.0)
    small, large = (statistics.median(results[:, column].tolist()) for column in (0, 1))
    bandwidth = 4 * (_LARGE - _SMALL) / max(large - small, 1e-9)
    return Wire(bandwidth, max(small - 4 * _SMALL / bandwidth, 0.0))


def _one_way(transport: Transport, rank: int, first: int, size: int, device: torch.device) -> float:
    """Seconds of one message of that many elements, on the first of two neighbours; 0 on the second."""
    form = _message_format("a measured message", (size,), "float32")
    payload = torch.zeros(size, device=device)
    peer = first + 1 if rank == first else first
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        if rank == first:
            transport.send(peer, payload, form)
            _arrived_message(transport, peer, form)
            times.append((time.perf_counter() - start) / 2)
        else:
            _arrived_message(transport, peer, form)
            transport.send(peer, payload, form)
    return statistics.median(times) if times else 0.0


def _share_results(transport: Transport, rank: int, num_ranks: int, results: Tensor) -> None:
    """Everyone's results to everyone: to the last rank along the pipeline, and back."""
    form = _message_format("measured messages", tuple(results.shape), "float64")
    if rank > 0:
        results[:rank] = _arrived_message(transport, rank - 1, form)[:rank]
    if rank < num_ranks - 1:
        transport.send(rank + 1, results.clone(), form)
        results.copy_(_arrived_message(transport, rank + 1, form))
    if rank > 0:
        transport.send(rank - 1, results.clone(), form)


def _arrived_message(transport: Transport, peer: int, form: WireFormat) -> Tensor:
    """The next message of a peer, once it is here."""
    tensor = transport.receive(peer, form).wait()
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return tensor


def _message_format(name: str, shape: tuple[int, ...], dtype: str) -> WireFormat:
    """The wire format of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return WireFormat.of(name, TensorSpec(shape, dtype, tuple(strides)))


_CLOCK_ROUNDS = 12


def clock_offset(
    group: dist.ProcessGroup,
    device: torch.device,
    clock: Callable[[], int] = time.monotonic_ns,
    rounds: int = _CLOCK_ROUNDS,
) -> int:
    """Nanoseconds to add to this rank's clock. Messages are on `device`. Collective over the group."""
    message = torch.zeros(1, dtype=torch.int64, device=device)
    if group.rank() == 0:
        for peer in range(1, group.size()):
            for _ in range(rounds):
                dist.recv(message, group=group, group_src=peer)
                message.fill_(clock())
                dist.send(message, group=group, group_dst=peer)
        return 0
    answers: list[tuple[int, int]] = []
    for _ in range(rounds):
        start = clock()
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        theirs, end = int(message), clock()
        answers.append((end - start, theirs - (start + end) // 2))
    return min(answers)[1]
