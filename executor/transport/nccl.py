"""Between processes on GPUs, over NCCL: one communicator for every directed pair of ranks that exchange messages.

NCCL runs the operations of a communicator one after another on a stream; with one communicator for each direction, a send to a peer
never waits behind a receive from it. Groups have two members and are made by the caller, on every rank, in one order. Tensors travel as
bytes, as NCCL does not know all dtypes.

A group's communicator is made by its first operation, which blocks the process until the peer's. Two ranks that send to each other first
would wait for ever; so `connect` makes a program's communicators, on all ranks in one order, before it runs.

Sends and receives run in the background, and waiting for one makes the current CUDA stream wait, not the process, which runs ahead of the
device. On the device each is a kernel that ends when the peer's has come. An operation that waits for the whole device (loading a kernel at
its first use, returning memory to the driver) waits for these too; `smpc.executor.program.message_order` says when a receive may be posted
without a danger of ranks that wait in a circle. (CUDA's guide, "Lazy Loading", and NCCL's, "Concurrency between NCCL and CUDA calls".)

This file has run over stand-ins of the groups alone: it needs two GPUs. See docs/design/gpu_checklist.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import TransportError
from smpc.executor.transport.messages import WireFormat


class NcclReceipt:
    """A posted receive. `work` is None where the tensor has no elements, and no message is sent."""

    __slots__ = ("_buffer", "_form", "_peer", "_work")

    def __init__(self, work: dist.Work | None, buffer: Tensor, peer: int, form: WireFormat) -> None:
        self._work, self._buffer, self._peer, self._form = work, buffer, peer, form

    def ready(self) -> bool:
        """Waiting is left to the stream."""
        return True

    def wait(self) -> Tensor:
        """Make the current stream wait for the data."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _did_not_arrive(self._peer, self._form, error) from None
        return self._buffer


class NcclTransport:
    """Sends and receives over NCCL. `groups[a, b]` carries the tensors from pipeline rank `a` to `b`."""

    receives_on_device = True

    def __init__(self, rank: int, groups: Mapping[tuple[int, int], dist.ProcessGroup], device: torch.device) -> None:
        self._rank = rank
        self._groups = dict(groups)
        self._device = device
        self._connected: set[tuple[int, int]] = set()
        self._sent: deque[tuple[dist.Work, Tensor, int]] = deque()

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make the communicators of these pairs, one after another, by a message of one byte."""
        for pair in sorted(set(pairs) - self._connected):
            if self._rank in pair:
                source, destination = pair
                token = torch.zeros(1, dtype=torch.uint8, device=self._device)
                group = self._group(source, destination)
                operation = group.send if self._rank == source else group.recv
                try:
                    operation([token], 1 - group.rank(), 0).wait()
                except RuntimeError as error:
                    raise TransportError(
                        f"pipeline ranks {source} and {destination} cannot connect over NCCL: {error}; NCCL_DEBUG=INFO says more"
                    ) from None
            self._connected.add(pair)

    def _group(self, source: int, destination: int) -> dist.ProcessGroup:
        if not self._groups:
            raise TransportError("this pipeline was closed after a failure; start the processes again")
        return self._groups[source, destination]

    def send(self, peer: int, tensor: Tensor, form: WireFormat) -> None:
        """Start to send, and release what has been sent."""
        while self._sent and self._sent[0][0].is_completed():
            self._finish(*self._sent.popleft())
        if form.is_empty:
            return
        group, wire = self._group(self._rank, peer), _bytes_over_nccl(form.wire(form.conform(tensor)))
        try:
            self._sent.append((group.send([wire], 1 - group.rank(), 0), wire, peer))
        except RuntimeError as error:
            raise TransportError(f"value {form.value!r} not sent to pipeline rank {peer}: {error}") from None

    def receive(self, peer: int, form: WireFormat) -> NcclReceipt:
        """Post the receive of the next tensor from `peer`, into a new buffer."""
        buffer = form.empty(self._device)
        if form.is_empty:
            return NcclReceipt(None, buffer, peer, form)
        group = self._group(peer, self._rank)
        try:
            work = group.recv([_bytes_over_nccl(form.wire(buffer))], 1 - group.rank(), 0)
        except RuntimeError as error:
            raise _did_not_arrive(peer, form, error) from None
        return NcclReceipt(work, buffer, peer, form)

    def mark(self, peer: int) -> int:
        """Sends are released as NCCL completes them."""
        return 0

    def reap(self, peer: int, mark: int) -> None:
        """Sends are released as NCCL completes them."""

    def flush(self) -> None:
        """Make the current stream wait for everything that was sent."""
        while self._sent:
            self._finish(*self._sent.popleft())

    def _finish(self, work: dist.Work, wire: Tensor, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise TransportError(f"pipeline rank {peer} did not take what was sent to it: {error}") from None

    def held(self) -> Iterator[Tensor]:
        """Nothing: buffers are the allocator's."""
        return iter(())

    def forget(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Abort the communicators."""
        self._sent.clear()
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.abort()


def _did_not_arrive(peer: int, form: WireFormat, error: RuntimeError) -> TransportError:
    return TransportError(f"value {form.value!r} did not arrive from pipeline rank {peer}: {error}")


def _bytes_over_nccl(wire: Tensor) -> Tensor:
    return wire.reshape(-1).view(torch.uint8)
