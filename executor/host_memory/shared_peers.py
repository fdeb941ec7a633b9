"""The other ranks of a group that share memory on one host: whether they still exist, and waiting for their writes.

Terms
    word    an int64 in shared memory that one rank writes and another waits for
    gone    a cell of every rank, in which it says that it has left the group, or that it failed

A waiting rank polls the word: first at once, then after yielding to other processes, then, after some milliseconds, between sleeps. In
the last phase it also checks whether the awaited rank has left, whether its process still exists, and the clock. Words written before a
rank left count: the rank's state is read before the word is read once more.

Memory is in the order of the program on x86-64 alone, where a rank that sees a word also sees what was written before it, and where what
is read before a write of a word has been read when others see that word. `smpc.executor.host_memory.shared_memory` leaves other
processors out.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from smpc.errors import TransportError, UsageError

CACHE_LINE: Final = 8  # in words
PAGE: Final = 4096  # bytes

# Polls of a word, 0.05 us each. The first number is for ranks with a core each, the second for more ranks than cores.
_SPINS, _FEW_SPINS = 1000, 50
# Then with sched_yield between them, for so many seconds: 0.3 us if no other process needs the core. Waking from a sleep takes 0.1 ms.
_YIELDING, _SHORT_YIELDING = 10e-3, 1e-3
_SHORTEST_SLEEP, _LONGEST_SLEEP, _SLEEP_PART = 50e-6, 2e-3, 0.02  # then sleeps: a fiftieth of the time waited so far


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank's process. `rank`: in the whole job, as users know it. `alive`: a descriptor that is readable once it has ended."""

    rank: int
    pid: int
    alive: int


class Peers:
    """The others of a group, by rank in it; None at this rank's own place. `gone[rank]` is the index of a rank's cell in `words`."""

    def __init__(
        self, words: memoryview[int], gone: Sequence[int], rank: int, peers: Sequence[Peer | None], timeout: float
    ) -> None:
        self._words, self._gone, self._rank, self._peers = words, gone, rank, peers
        self._timeout = timeout
        self._pid = os.getpid()
        has_core = len(peers) <= len(os.sched_getaffinity(0))
        self._spins, self._yielding = (_SPINS, _YIELDING) if has_core else (_FEW_SPINS, _SHORT_YIELDING)
        self._ends = select.poll()
        for peer in peers:
            if peer is not None:
                self._ends.register(peer.alive, select.POLLIN)
        self.is_closed = False

    def close(self) -> None:
        """Tell the others that this rank is gone. For any thread, any number of times; in a forked child it does nothing."""
        if self.is_closed or os.getpid() != self._pid:
            return
        self.is_closed = True
        self._words[self._gone[self._rank]] = 1
        for peer in self._peers:
            if peer is not None:
                os.close(peer.alive)

    def check_open(self) -> None:
        """UsageError in a forked child, TransportError once the memory was closed."""
        if os.getpid() != self._pid:
            raise UsageError(
                "a forked child of a rank called a collective; process groups belong to the process that made them: start processes that "
                "communicate with the spawn method, and make groups there"
            )
        if self.is_closed:
            raise TransportError(
                "the group's collectives through shared memory were closed after a failure; start the processes again"
            )

    def wait(self, rank: int, index: int, is_there: Callable[[int], bool], what: str) -> int:
        """The word at `index`, once it is what `rank` is to write there. TransportError if that cannot come any more, or comes too late."""
        words = self._words
        for _ in range(self._spins):
            if is_there(words[index]):
                return words[index]
        started = time.monotonic()
        while time.monotonic() < started + self._yielding:
            os.sched_yield()
            if is_there(words[index]):
                return words[index]
        while True:
            waited = time.monotonic() - started
            time.sleep(min(max(_SLEEP_PART * waited, _SHORTEST_SLEEP), _LONGEST_SLEEP))
            failure = self._failure(rank, waited)
            found = words[index]  # after the question who is gone
            if is_there(found):
                return found
            if failure:
                peer = self._peers[rank]
                assert peer is not None, "a rank does not wait for itself"
                raise TransportError(f"{failure}: this rank waited for rank {peer.rank} (process {peer.pid}) {what}")

    def rank_in_job(self, rank: int) -> int:
        """As users know a rank of the group."""
        peer = self._peers[rank]
        assert peer is not None, "of the others"
        return peer.rank

    def _failure(self, rank: int, waited: float) -> str:
        """Why there is no sense in waiting for a rank any longer; "" if there is."""
        peer = self._peers[rank]
        assert peer is not None, "a rank does not wait for itself"
        if self.is_closed:
            return "The process group was destroyed"
        for descriptor, _ in self._ends.poll(0):
            if descriptor == peer.alive:
                return "Connection closed by peer, which has ended"
        if self._words[self._gone[rank]]:
            return "Connection closed by peer, which has left the group or failed"
        return f"Timed out waiting {1000 * self._timeout:.0f}ms" if waited > self._timeout else ""
