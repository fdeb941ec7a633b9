"""Between processes on GPUs, over NCCL: one communicator for every directed pair of ranks.

NCCL runs the operations of a communicator one after another on a stream; with one communicator for each
direction, a send to a peer never waits behind a receive from it. Waiting for a receive makes the current CUDA
stream wait, not the process. Groups have two members and are made by the caller, on every rank, in one order.
This file has not been run: it needs two GPUs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import TransportError
from smpc.executor.transport.layout import WireFormat


class NcclReceipt:
    """A posted receive into a buffer."""

    __slots__ = ("_buffer", "_work")

    def __init__(self, work: dist.Work | None, buffer: Tensor) -> None:
        self._work = work
        self._buffer = buffer

    def ready(self) -> bool:
        """Whether the data are there."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """Make the current stream wait for the data."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return self._buffer


class NcclTransport:
    """Sends and receives over NCCL. `groups[a, b]` carries the tensors from pipeline rank `a` to `b`."""

    def __init__(self, rank: int, groups: Mapping[tuple[int, int], dist.ProcessGroup], device: torch.device) -> None:
        self._rank = rank
        self._groups = dict(groups)
        self._device = device
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def _group(self, source: int, destination: int) -> dist.ProcessGroup:
        if (source, destination) not in self._groups:
            raise TransportError(f"no open NCCL group from pipeline rank {source} to {destination}")
        return self._groups[source, destination]

    def send(self, peer: int, tensor: Tensor, form: WireFormat) -> None:
        """Start to send, and release what has been sent."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()
        if not form.is_empty:
            wire = form.wire(form.conform(tensor))
            group = self._group(self._rank, peer)
            self._sent.append((group.send([wire], 1 - group.rank(), 0), wire))

    def receive(self, peer: int, form: WireFormat) -> NcclReceipt:
        """Post a receive."""
        buffer = form.empty(self._device)
        if form.is_empty:
            return NcclReceipt(None, buffer)
        group = self._group(peer, self._rank)
        return NcclReceipt(group.recv([form.wire(buffer)], 1 - group.rank(), 0), buffer)

    def mark(self, peer: int) -> int:
        """Sends are released as NCCL completes them."""
        return 0

    def reap(self, peer: int, mark: int) -> None:
        """Sends are released as NCCL completes them."""

    def flush(self) -> None:
        """Make the current stream wait for everything that was sent."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def close(self) -> None:
        """Abort the communicators."""
        self._sent.clear()
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.abort()
