"""Between processes on CPUs, over a gloo process group.

The group's ranks are the pipeline ranks. Tensors from one rank to another go first in, first out, under one
tag of their own, so other traffic on the group does not get between. gloo moves the bytes in the background
once both ends have posted, and copies bytes whatever their dtype. It cannot tell whether an operation has
completed without waiting for it, and a wait that times out closes the connection: so a wait has the whole
step's time, and what was sent is held until it is known to arrive (`smpc.executor.arrivals`) or the step ends.
"""

from __future__ import annotations

import datetime
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import TransportError
from smpc.executor.transport.layout import WireFormat
from smpc.executor.transport.pool import BufferPool

_TAG = 0x5350  # any number that users' own send and recv are unlikely to take
DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)


class GlooReceipt:
    """A posted receive into a buffer."""

    __slots__ = ("_buffer", "_peer", "_timeout", "_value", "_work")

    def __init__(
        self, work: dist.Work | None, buffer: Tensor, peer: int, value: str, timeout: datetime.timedelta
    ) -> None:
        self._work = work
        self._buffer = buffer
        self._peer = peer
        self._value = value
        self._timeout = timeout

    def ready(self) -> bool:
        """Gloo cannot tell before the wait."""
        return self._work is None

    def wait(self) -> Tensor:
        """Block until the tensor is there."""
        work, self._work = self._work, None
        if work is not None:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                text = f"value {self._value!r} did not arrive from pipeline rank {self._peer}: {error}"
                raise TransportError(text) from None  # the chained frames would keep the connection open
            finally:
                del work
        return self._buffer


class GlooTransport:
    """Sends and receives over a gloo group.

    `close` destroys the group unless it is the default one: give each pipeline a group of its own, so that a
    failing rank can wake its peers by closing its connections.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> None:
        self._group: dist.ProcessGroup | None = group
        self._timeout = timeout
        self._pool = BufferPool(torch.device("cpu"))
        self._sent: list[deque[dist.Work]] = [deque() for _ in range(group.size())]  # a Work keeps its tensor
        self._released = [0] * group.size()

    def send(self, peer: int, tensor: Tensor, form: WireFormat) -> None:
        """Start to send."""
        if not form.is_empty:
            try:
                work = self._open().send([form.wire(form.conform(tensor))], peer, _TAG)
            except RuntimeError as error:
                raise TransportError(f"value {form.value!r} not sent to pipeline rank {peer}: {error}") from None
            self._sent[peer].append(work)

    def receive(self, peer: int, form: WireFormat) -> GlooReceipt:
        """Post a receive."""
        buffer = self._pool.take(form)
        work = None
        if not form.is_empty:
            try:
                work = self._open().recv([form.wire(buffer)], peer, _TAG)
            except RuntimeError as error:
                raise TransportError(f"value {form.value!r} not expected from pipeline rank {peer}: {error}") from None
        return GlooReceipt(work, buffer, peer, form.value, self._timeout)

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise TransportError("this pipeline was closed after a failure; start the processes again")
        return self._group

    def mark(self, peer: int) -> int:
        """How many tensors have been sent to `peer` in this step."""
        return self._released[peer] + len(self._sent[peer])

    def reap(self, peer: int, mark: int) -> None:
        """Release the first `mark` tensors sent to `peer`, once they have arrived."""
        sent = self._sent[peer]
        for _ in range(mark - self._released[peer]):
            self._finish(sent.popleft(), peer)
            self._released[peer] += 1

    def flush(self) -> None:
        """Wait for everything that was sent."""
        for peer, sent in enumerate(self._sent):
            while sent:
                self._finish(sent.popleft(), peer)
            self._released[peer] = 0
        self._pool.end_step()

    def _finish(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(f"pipeline rank {peer} did not take what was sent to it: {error}") from None

    def close(self) -> None:
        """Drop what is under way and close the connections."""
        for sent in self._sent:
            sent.clear()
        group, self._group = self._group, None
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
