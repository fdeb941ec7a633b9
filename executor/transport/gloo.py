"""Between processes on CPUs, over a gloo process group, and through memory where its ranks are on one host.

The group's ranks are the pipeline ranks. Tensors from one rank to another go first in, first out, under one
tag of their own, so other traffic on the group does not get between. gloo moves the bytes in the background
once both ends have posted, and copies bytes whatever their dtype. It cannot tell whether an operation has
completed without waiting for it, and a wait that times out closes the connection: so a wait has the whole
step's time, and what was sent is held until it is known to arrive (`smpc.executor.program.message_order`) or the step ends.

On one host, small tensors go through shared memory (`Rings`): gloo wakes a thread on each side, which takes
as long as the kernels of a small layer, and a core from them. Both ends know a tensor's size, and so its way.

`Rings` are messages between the processes of one host, through memory that they share: a ring for every rank that sends to another.

Terms
    ring       room for the elements of messages from one rank to another, used again when they have been taken
    word       the record of a message: its number among messages from that rank to the other, its position and its size in bytes,
               and whether it comes by mail
    mail       another way, for messages for which the ring had no room: a sender does not wait for the receiver (but once there are _WORDS
               messages that have not been taken)
    taken      the receiver's word: the number of the last message that it has copied out

    memory     | gone: a cell of every rank | of every pair: | taken | words | ring | ..

The sender copies the elements into the ring and then writes the word, at number mod _WORDS; the receiver waits for the word with the next
number, copies the elements into the buffer that was posted first, and then writes `taken`. So no rank reads a half-written message, and
the sender reuses the space of messages that were taken (`smpc.executor.host_memory.shared_peers` says on which processors that follows).

A message is in the ring before `send` returns, and stays there when the sender ends. Copying costs the sender about 0.1 ms a MiB:
larger messages than LIMIT are for transports that send in the background.

Example, of ranks 0 and 1: `outbound.send(tensor)` on 0, `inbound.post(buffer, ..)` and `inbound.complete(post)` on 1.
"""

from __future__ import annotations

import ctypes
import datetime
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.codegen.buffers import LEAST_POOLED, TRIES
from smpc.errors import TransportError
from smpc.executor.host_memory.shared_memory import Shared, connect
from smpc.executor.host_memory.shared_peers import CACHE_LINE, PAGE, Peers
from smpc.executor.transport.messages import WireFormat

LIMIT: Final = 4 << 20  # bytes of a message
_RING: Final = 16 << 20
_WORDS: Final = 1 << 14
_UNIT: Final = 64  # bytes: where messages begin
_PAIR: Final = PAGE + 8 * _WORDS + _RING

# The fields of a word, from the lowest bit: whether sent over gloo, bytes, position in units, number.
_SIZE_SHIFT: Final = 1
_PLACE_SHIFT: Final = _SIZE_SHIFT + 23
_NUMBER_SHIFT: Final = _PLACE_SHIFT + 18
_SIZE_MASK: Final = (1 << 23) - 1
_PLACE_MASK: Final = (1 << 18) - 1
_NUMBER_MASK: Final = (1 << (63 - _NUMBER_SHIFT)) - 1


class Mailed(Protocol):
    """Messages being sent over gloo."""

    def wait(self) -> Tensor:
        """Block until it has arrived."""


Mail = Callable[[Tensor], Mailed]  # posts a receive into a tensor


def ring_bytes(size: int) -> int:
    """How much memory the rings of `size` ranks may take; they take what has been used of them."""
    return _gone_bytes(size) + size * size * _PAIR


class Rings:
    """One rank's ends of all rings of a group."""

    def __init__(self, shared: Shared, rank: int, timeout: float) -> None:
        size = len(shared.peers)
        words = memoryview(shared.memory).cast("q")
        with torch.inference_mode(False):
            memory = torch.frombuffer(shared.memory, dtype=torch.uint8)
        self._peers = Peers(words, [other * CACHE_LINE for other in range(size)], rank, shared.peers, timeout)

        def place(source: int, destination: int) -> int:
            return _gone_bytes(size) + (source * size + destination) * _PAIR

        self.outbound = [Outbound(words, memory, place(rank, other), self._peers, other) for other in range(size)]
        self.inbound = [Inbound(words, memory, place(other, rank), self._peers, other) for other in range(size)]

    def close(self) -> None:
        """Tell the others that this rank is gone, and wake this one if it waits. For any thread, any number of times."""
        self._peers.close()


class Outbound:
    """The end that sends."""

    def __init__(self, words: memoryview[int], memory: Tensor, place: int, peers: Peers, rank: int) -> None:
        self._words, self._taken, self._first = words, place // 8, (place + PAGE) // 8
        self._memory = memory  # held
        self._ring = memory.data_ptr() + place + PAGE + 8 * _WORDS
        self._peers, self._rank = peers, rank
        self._number = 0  # of the last message
        self._lying: deque[tuple[int, int]] = deque()  # number and position of messages that were not taken
        self._head = 0  # where free room begins

    def send(self, tensor: Tensor) -> bool:
        """Whether the ring had room for a contiguous tensor of at most LIMIT bytes; if not, the receiver expects it by mail."""
        num_bytes = tensor.nbytes
        assert num_bytes <= LIMIT, f"{num_bytes} bytes"
        assert tensor.is_contiguous(), f"strides {tensor.stride()}"
        taken = self._words[self._taken]
        while self._lying and self._lying[0][0] <= taken:
            self._lying.popleft()
        number = self._number + 1
        if number - taken >= _WORDS:
            what = f"to take one of {_WORDS} messages"
            self._peers.wait(self._rank, self._taken, lambda found: number - found < _WORDS, what)
        place = self._room(-(-num_bytes // _UNIT) * _UNIT)
        if place >= 0:
            ctypes.memmove(self._ring + place, tensor.data_ptr(), num_bytes)
            self._lying.append((number, place))
        word = (number & _NUMBER_MASK) << _NUMBER_SHIFT | num_bytes << _SIZE_SHIFT
        self._number = number
        self._words[self._first + number % _WORDS] = word | (place // _UNIT) << _PLACE_SHIFT if place >= 0 else word | 1
        return place >= 0

    def _room(self, num_bytes: int) -> int:
        """Where so many bytes fit, -1 if nowhere. Low places come first: memory that has never been used costs page faults."""
        if not self._lying:
            place = 0
        else:
            tail = self._lying[0][1]
            if self._head > tail and self._head + num_bytes <= _RING:
                place = self._head
            else:
                place = 0 if self._head > tail else self._head
                if place + num_bytes >= tail:
                    return -1
        self._head = place + num_bytes
        return place


@dataclass(slots=True)
class Post:
    """A buffer for a message, and its state."""

    buffer: Tensor
    value: str
    mail: Mail
    is_done: bool = False
    mailed: Mailed | None = None


class Inbound:
    """The end that receives."""

    def __init__(self, words: memoryview[int], memory: Tensor, place: int, peers: Peers, rank: int) -> None:
        self._words, self._taken, self._first = words, place // 8, (place + PAGE) // 8
        self._memory = memory  # held
        self._ring = memory.data_ptr() + place + PAGE + 8 * _WORDS
        self._peers, self._rank = peers, rank
        self._number = 0  # of the last message that was taken
        self._posts: deque[Post] = deque()

    def post(self, buffer: Tensor, value: str, mail: Mail) -> Post:
        """A contiguous buffer for the next message that none has been posted for."""
        post = Post(buffer, value, mail)
        self._posts.append(post)
        return post

    def complete(self, post: Post) -> None:
        """Return when the message is in the buffer, or its mail is posted; those before it are then, too."""
        while not post.is_done:
            number = self._number + 1
            word = self._word(number)
            self._take(self._posts.popleft(), word)
            self._number = number
            self._words[self._taken] = number

    def _word(self, number: int) -> int:
        """The word of the message with that number, once it has been sent."""
        expected, index = number & _NUMBER_MASK, self._first + number % _WORDS
        word = self._words[index]
        if word >> _NUMBER_SHIFT == expected:
            return word
        what = f"to send value {self._posts[0].value!r}"
        return self._peers.wait(self._rank, index, lambda found: found >> _NUMBER_SHIFT == expected, what)

    def _take(self, post: Post, word: int) -> None:
        num_bytes = word >> _SIZE_SHIFT & _SIZE_MASK
        if num_bytes != post.buffer.nbytes:
            raise TransportError(f"expected value {post.value!r} of {post.buffer.nbytes} bytes, found {num_bytes}")
        if word & 1:
            post.mailed = post.mail(post.buffer)
        else:
            place = (word >> _PLACE_SHIFT & _PLACE_MASK) * _UNIT
            ctypes.memmove(post.buffer.data_ptr(), self._ring + place, num_bytes)
        post.is_done = True


def _gone_bytes(size: int) -> int:
    return -(-size * CACHE_LINE * 8 // PAGE) * PAGE


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
        group, wire = self._open(), form.wire(form.conform(tensor))
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
        self._open()
        wire = form.wire(buffer)
        if self._rings is None or wire.nbytes > LIMIT:
            return self._posted(peer, wire, buffer, form.value, _TAG)
        post = self._rings.inbound[peer].post(
            wire, form.value, lambda into: self._posted(peer, into, into, form.value, _MAIL_TAG)
        )
        return RingReceipt(self._rings, post, buffer, peer)

    def _posted(self, peer: int, wire: Tensor, buffer: Tensor, value: str, tag: int) -> GlooReceipt:
        try:
            work = self._open().recv([wire], peer, tag)
        except RuntimeError as error:
            raise TransportError(f"value {value!r} not expected from pipeline rank {peer}: {error}") from None
        return GlooReceipt(work, buffer, peer, value, self._timeout)

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
