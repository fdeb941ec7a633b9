"""Between processes on CPUs, over a gloo process group, and through memory where its ranks are on one host.

The group's ranks are the pipeline ranks. Tensors from one rank to another go first in, first out, under one
tag of their own, so other traffic on the group does not get between. gloo moves the bytes in the background
once both ends have posted, and copies bytes whatever their dtype. It cannot tell whether an operation has
completed without waiting for it, and a wait that times out closes the connection: so a wait has the whole
step's time, and what was sent is held until it is known to arrive (`smpc.executor.program.send_completion`) or the step ends.

On one host, small tensors go through shared memory (`smpc.executor.transport.rings`): gloo wakes a thread on each side, which takes
as long as the kernels of a small layer, and a core from them. Both ends know a tensor's size, and so its way.
"""

from __future__ import annotations

import datetime
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.codegen.message_buffers import TRIES
from smpc.errors import TransportError
from smpc.executor.host_memory.shared_memory import connect
from smpc.executor.transport.messages import WireFormat
from smpc.executor.transport.rings import LIMIT, Post, Rings, ring_bytes
from smpc.partitioner.memory.peak import LEAST_POOLED

_TAG, _MAIL_TAG = 0x5350, 0x5351  # any numbers that users' own send and recv are unlikely to take
DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
_CPU = torch.device("cpu")
_MAX_BUFFERS = 64  # of one format
_IDLE_STEPS = 64


class BufferPool:
    """Receive buffers by format, which are used again.

    Fresh memory costs the operating system a page fault for every 4 KiB: filling a new 4 MiB buffer takes twice as long as filling an old
    one. A buffer is used again when nothing else refers to its storage: not autograd (which may keep a received activation, or a view of a
    received gradient), not the user (who may keep a model output that is a received value). Inputs of ever new shapes bring ever new
    formats: the buffers of one that has not been asked for in so many steps are given back.
    """

    def __init__(self) -> None:
        self._storages: dict[tuple[object, ...], deque[torch.UntypedStorage]] = {}
        self._last_step: dict[tuple[object, ...], int] = {}
        self._step = 0

    def take(self, form: WireFormat) -> Tensor:
        """A tensor in the planned layout that shares memory with no other living tensor."""
        if form.gaps:  # what has gaps on arrival leaves its buffer at once
            return form.empty(_CPU)
        key = (form.shape, form.stride, form.dtype)
        storages = self._storages.get(key)
        if storages is None:
            storages = self._storages[key] = deque()
        self._last_step[key] = self._step
        for _ in range(min(TRIES, len(storages))):
            storage = storages[0]
            storages.rotate(-1)
            if _num_references(storage) == 1:
                return torch.empty(0, dtype=form.dtype).set_(storage, 0, form.shape, form.stride)
        buffer = form.empty(_CPU)
        if buffer.nbytes >= LEAST_POOLED and len(storages) < _MAX_BUFFERS:
            storages.append(buffer.untyped_storage())
        return buffer

    def held(self) -> Iterator[Tensor]:
        """All buffers, as bytes."""
        for storage in itertools.chain.from_iterable(self._storages.values()):
            yield torch.empty(0, dtype=torch.uint8).set_(storage)

    def end_step(self) -> None:
        """Give the buffers of formats back that have been idle for long."""
        self._step += 1
        for key, step in tuple(self._last_step.items()):
            if self._step - step > _IDLE_STEPS:
                del self._storages[key], self._last_step[key]


def _num_references(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


@dataclass(slots=True)
class GlooReceipt:
    """A posted receive into a buffer."""

    _work: dist.Work | None
    _buffer: Tensor
    _peer: int
    _value: str
    _timeout: datetime.timedelta

    def ready(self) -> bool:
        """Gloo cannot tell before the wait."""
        return self._work is None

    def wait(self) -> Tensor:
        """Block until the tensor has arrived."""
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


@dataclass(slots=True)
class RingReceipt:
    """A posted receive through memory, into (the wire view of) a buffer."""

    _rings: Rings
    _post: Post
    _buffer: Tensor
    _peer: int

    def ready(self) -> bool:
        """Whether it is in the buffer, as one that was sent later has been waited for."""
        return self._post.is_done and self._post.mailed is None

    def wait(self) -> Tensor:
        """Block until the tensor has arrived."""
        post = self._post
        try:
            self._rings.inbound[self._peer].complete(post)
        except TransportError as error:
            text = f"value {post.value!r} did not arrive from pipeline rank {self._peer}: {error}"
            raise TransportError(text) from None
        if post.mailed is not None:
            post.mailed.wait()
        return self._buffer


def _closed() -> TransportError:
    return TransportError("this pipeline was closed after a failure; start the processes again")


class GlooTransport:
    """Sends and receives over a gloo group. Constructing it is collective.

    `close` destroys the group unless it is the default one: give each pipeline a group of its own, so that a
    failing rank can wake its peers by closing its connections.
    """

    receives_on_device = False

    def __init__(self, group: dist.ProcessGroup, *, timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> None:
        self._group: dist.ProcessGroup | None = group
        self._timeout = timeout
        self._pool = BufferPool()
        # Keeps sent tensors alive: gloo's Work, or the tensor itself if it went through shared memory. The latter could be freed at once;
        # it is held as long as the former, so that a rank needs the predicted memory on one host and on several.
        self._sent: list[deque[dist.Work | Tensor]] = [deque() for _ in range(group.size())]
        self._released = [0] * group.size()
        self._mailed: list[tuple[dist.Work, int]] = []
        shared = connect(group, ring_bytes(group.size())) if group.size() > 1 else None
        self._rings = None if shared is None else Rings(shared, group.rank(), timeout.total_seconds())
        if self._rings is not None:
            weakref.finalize(self, self._rings.close)  # it holds descriptors of the other processes

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """A gloo group is connected from the start."""

    def send(self, peer: int, tensor: Tensor, form: WireFormat) -> None:
        """Start to send."""
        if form.is_empty:
            return
        group, wire = self._group, form.wire(form.conform(tensor))
        if group is None:
            raise _closed()
        try:
            if self._rings is None or wire.nbytes > LIMIT:
                self._sent[peer].append(group.send([wire], peer, _TAG))
                return
            if not self._rings.outbound[peer].send(wire):
                self._mailed.append((group.send([wire], peer, _MAIL_TAG), peer))
        except (RuntimeError, TransportError) as error:
            raise TransportError(f"value {form.value!r} not sent to pipeline rank {peer}: {error}") from None
        self._sent[peer].append(wire)

    def receive(self, peer: int, form: WireFormat) -> GlooReceipt | RingReceipt:
        """Post a receive."""
        buffer = self._pool.take(form)
        if form.is_empty:
            return GlooReceipt(None, buffer, peer, form.value, self._timeout)
        if self._group is None:
            raise _closed()
        wire = form.wire(buffer)
        if self._rings is None or wire.nbytes > LIMIT:
            return self._posted(peer, wire, buffer, form.value, _TAG)
        post = self._rings.inbound[peer].post(
            wire, form.value, lambda into: self._posted(peer, into, into, form.value, _MAIL_TAG)
        )
        return RingReceipt(self._rings, post, buffer, peer)

    def _posted(self, peer: int, wire: Tensor, buffer: Tensor, value: str, tag: int) -> GlooReceipt:
        if self._group is None:
            raise _closed()
        try:
            work = self._group.recv([wire], peer, tag)
        except RuntimeError as error:
            raise TransportError(f"value {value!r} not expected from pipeline rank {peer}: {error}") from None
        return GlooReceipt(work, buffer, peer, value, self._timeout)

    def mark(self, peer: int) -> int:
        """How many tensors have been sent to `peer` in this step."""
        return self._released[peer] + len(self._sent[peer])

    def reap(self, peer: int, mark: int) -> None:
        """Release the first `mark` tensors sent to `peer`, once they have arrived."""
        sent = self._sent[peer]
        for _ in range(mark - self._released[peer]):
            work = sent.popleft()
            if not isinstance(work, Tensor):
                self._finish(work, peer)
            self._released[peer] += 1

    def flush(self) -> None:
        """Wait for everything that was sent."""
        for peer, sent in enumerate(self._sent):
            while sent:
                work = sent.popleft()
                if not isinstance(work, Tensor):
                    self._finish(work, peer)
            self._released[peer] = 0
        while self._mailed:
            self._finish(*self._mailed.pop(0))
        self._pool.end_step()

    def _finish(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(f"pipeline rank {peer} did not take what was sent to it: {error}") from None

    def held(self) -> Iterator[Tensor]:
        """Buffers of received tensors, which are used again."""
        return self._pool.held()

    def forget(self) -> None:
        """Let go of these buffers."""
        self._pool = BufferPool()

    def close(self) -> None:
        """Drop what is under way and close the connections."""
        for sent in self._sent:
            sent.clear()
        self._mailed.clear()
        if self._rings is not None:
            self._rings.close()
        group, self._group = self._group, None
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
