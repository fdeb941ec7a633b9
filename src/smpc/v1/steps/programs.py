"""The compiled programs of one replica, by number: no more than `program_cache_size` of them.

A model that meets ever new shapes would compile ever new programs. Beyond the bound a new one takes the number of the one that has not run
for the longest time; that is compiled again if its inputs come back. The first one, number 0, stays: its stages are those that replicas
average the gradients of.

All ranks of a replica run the same programs in the same order, so they replace the same ones without a word.

    bound 3, steps with signatures a b c b d     numbers 0 1 2 1 2: d replaces c
"""

from __future__ import annotations

from collections.abc import Iterator

from smpc.tracer.ir import Trace
from smpc.v1.steps.signature import Signature


class ProgramTable:
    """Signatures and traces by program number. `bound`: how many, 2 at least."""

    def __init__(self, bound: int) -> None:
        assert bound >= 2, "the first program and the one that runs"
        self._bound = bound
        self._numbers: dict[Signature, int] = {}
        self._entries: list[tuple[Signature, Trace]] = []
        self._last_use: list[int] = []
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[Signature, Trace]]:
        return iter(self._entries)

    def find(self, signature: Signature) -> int | None:
        """The number of a signature's program, if there is one."""
        return self._numbers.get(signature)

    def signature(self, number: int) -> Signature:
        """What a program was compiled for."""
        return self._entries[number][0]

    def use(self, number: int) -> None:
        """Note that a program runs now."""
        self._num_uses += 1
        self._last_use[number] = self._num_uses

    def next_number(self) -> int:
        """The number that the next new program gets: a free one, or that of the program which gives way."""
        if len(self._entries) < self._bound:
            return len(self._entries)
        return min(range(1, self._bound), key=self._last_use.__getitem__)

    def put(self, number: int, signature: Signature, trace: Trace) -> None:
        """Enter a program under its `next_number`."""
        if number == len(self._entries):
            self._entries.append((signature, trace))
            self._last_use.append(0)
        else:
            del self._numbers[self._entries[number][0]]
            self._entries[number] = signature, trace
        self._numbers[signature] = number
        self.use(number)
