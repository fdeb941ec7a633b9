"""Messages between the processes of one host, through memory that they share: a ring for every rank that sends to another.

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
larger messages than LIMIT are for transports that send in the background, or go in pieces.

Example, of ranks 0 and 1: `outbound.send(tensor)` on 0, `inbound.post(buffer, ..)` and `inbound.complete(post)` on 1. A pipeline's
transport makes its own rings; `Rings.of(process_group)` are the rings for a group's other messages.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import TransportError
from smpc.executor.host_memory.shared_memory import Shared, connect
from smpc.executor.host_memory.shared_peers import CACHE_LINE, PAGE, Peers

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

    def wait(self) -> object:
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

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Rings | None:
        """The rings of a group, which end with it; None where its ranks share no memory. Collective at the first call.

        All who use them must do so in the same order on all ranks.
        """
        if group not in _RINGS:
            shared = connect(group, ring_bytes(group.size()))
            found = None if shared is None else cls(shared, group.rank(), shared.timeout)
            if found is not None:
                weakref.finalize(group, found.close)
            _RINGS[group] = found
        return _RINGS[group]

    def close(self) -> None:
        """Tell the others that this rank is gone, and wake this one if it waits. For any thread, any number of times."""
        self._peers.close()


# A property of torch's groups for which they have no attribute; entries go with them.
_RINGS: weakref.WeakKeyDictionary[dist.ProcessGroup, Rings | None] = weakref.WeakKeyDictionary()


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
        self._peers.check_open()
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
            expected, index = number & _NUMBER_MASK, self._first + number % _WORDS
            word = self._words[index]
            if word >> _NUMBER_SHIFT != expected:  # not sent yet
                what = f"to send value {self._posts[0].value!r}"
                is_sent = partial(_has_number, expected)
                word = self._peers.wait(self._rank, index, is_sent, what)
            self._take(self._posts.popleft(), word)
            self._number = number
            self._words[self._taken] = number

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


def _has_number(number: int, word: int) -> bool:
    return word >> _NUMBER_SHIFT == number


def _gone_bytes(size: int) -> int:
    return -(-size * CACHE_LINE * 8 // PAGE) * PAGE
