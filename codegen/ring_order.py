"""The order of ring attention: which keys a rank has at each step, what it computes with them, and whom it sends them to.

Every rank has a slice of the sequence. Its queries stay, keys and values go around: at step i of n, rank r has the keys and values of
rank r - i, and passes them on to r + 1. With slices in zigzag (`smpc.executor.collectives`) causal attention is one call without a mask at
each step, and as much work on every rank:

    source = own      causal: the positions of both own pieces ascend
    source < rank     all queries with the first piece of the keys: the second piece is later than both own
    source > rank     the second piece of the queries with all keys: the first is earlier than both

Backward the same order runs again. The gradients of keys and values follow them: rank r adds its part and passes them on, after the
last step once more, so that they end where the keys are from.

>>> [str(step) for step in ring_steps(1, 3, causal=True, mirrored=True)]
['own causal', 'r0: all x first', 'r2: second x all']
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from smpc.errors import ScheduleError


class SlicePart(StrEnum):
    """A part of a rank's slice: all of it, or one of its two pieces."""

    ALL = "all"
    FIRST = "first"
    SECOND = "second"


@dataclass(frozen=True, slots=True)
class RingStep:
    """One step of one rank. `queries` None: nothing to compute, all keys are later."""

    rank: int
    source: int
    queries: SlicePart | None
    keys: SlicePart
    causal: bool
    sends_to: int | None  # passes on keys and values meanwhile
    receives_from: int | None

    def __str__(self) -> str:
        if self.source == self.rank:
            return "own causal" if self.causal else "own"
        return f"r{self.source}: {self.queries} x {self.keys}" if self.queries is not None else f"r{self.source}: later"


def ring_steps(rank: int, num_ranks: int, *, causal: bool, mirrored: bool) -> tuple[RingStep, ...]:
    """The work of a rank, step by step."""
    steps = []
    for i in range(num_ranks):
        source = (rank - i) % num_ranks
        queries: SlicePart | None = SlicePart.ALL
        keys = SlicePart.ALL
        if causal and source < rank and mirrored:
            keys = SlicePart.FIRST
        elif causal and source > rank:
            queries = SlicePart.SECOND if mirrored else None
        last = i == num_ranks - 1
        ahead, behind = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        steps.append(
            RingStep(
                rank,
                source,
                queries,
                keys,
                causal and source == rank,
                None if last else ahead,
                None if last else behind,
            )
        )
    return tuple(steps)


def pairs_of_work(rank: int, num_ranks: int, *, causal: bool, mirrored: bool) -> float:
    """Work of a rank, in pairs of a piece of queries and one of keys, of 2n pieces; a causal pair of equal pieces is half a pair."""
    work = 0.0
    for step in ring_steps(rank, num_ranks, causal=causal, mirrored=mirrored):
        if step.queries is not None:
            sizes = [2.0 if part is SlicePart.ALL else 1.0 for part in (step.queries, step.keys)]
            work += sizes[0] * sizes[1] * (0.5 if step.causal else 1.0)
    return work


def prove_ring(num_ranks: int, *, causal: bool, mirrored: bool) -> None:
    """Simulates the ring, forward and backward. ScheduleError if a query misses a key or meets one twice, a message is not the one that
    its receiver waits for, ranks wait in a circle, or a gradient does not come home with every rank's part.
    """
    programs = [ring_steps(rank, num_ranks, causal=causal, mirrored=mirrored) for rank in range(num_ranks)]
    _prove_pairs(programs, causal=causal, mirrored=mirrored)
    _prove_messages(programs)


def _prove_pairs(programs: list[tuple[RingStep, ...]], *, causal: bool, mirrored: bool) -> None:
    num_ranks = len(programs)
    met: Counter[tuple[int, int]] = Counter()
    for rank, steps in enumerate(programs):
        for step in steps:
            for query in () if step.queries is None else _ring_pieces(rank, num_ranks, step.queries, mirrored):
                for key in _ring_pieces(step.source, num_ranks, step.keys, mirrored):
                    if not step.causal or key <= query:
                        met[query, key] += 1
    for query in range(2 * num_ranks):
        for key in range(2 * num_ranks):
            wanted = int(not causal or key <= query)
            if met[query, key] != wanted:
                raise ScheduleError(
                    f"ring attention of {num_ranks} ranks: expected piece {query} of the queries to meet piece {key} of the keys "
                    f"{wanted} times, found {met[query, key]}"
                )


def _ring_pieces(rank: int, num_ranks: int, part: SlicePart, mirrored: bool) -> tuple[int, ...]:
    own = (rank, 2 * num_ranks - 1 - rank) if mirrored else (2 * rank, 2 * rank + 1)
    return own if part is SlicePart.ALL else own[:1] if part is SlicePart.FIRST else own[1:]


def _prove_messages(programs: list[tuple[RingStep, ...]]) -> None:
    """Each rank posts send and receive before it computes and waits for both after: runs all ranks by turns, in that order."""
    num_ranks = len(programs)
    holds = list(range(num_ranks))  # whose keys and values a rank has
    added: list[list[int]] = [[] for _ in range(num_ranks)]  # by source, whose parts its gradients have, in order
    for i in range(num_ranks):
        for rank, steps in enumerate(programs):
            step = steps[i]
            if holds[rank] != step.source:
                raise ScheduleError(
                    f"ring attention: rank {rank} computes with keys of {step.source}, has those of {holds[rank]}"
                )
            added[step.source].append(rank)
        steps_now = [steps[i] for steps in programs]
        for step in steps_now:
            awaited = step.rank if step.sends_to is None else steps_now[step.sends_to].receives_from
            if awaited != step.rank:
                raise ScheduleError(
                    f"ring attention: rank {step.rank} sends to {step.sends_to} at step {i}, which waits for {awaited}"
                )
        holds = [
            holds[rank] if (peer := steps_now[rank].receives_from) is None else holds[peer] for rank in range(num_ranks)
        ]
    for source, ranks in enumerate(added):
        home = (ranks[-1] + 1) % num_ranks
        if sorted(ranks) != list(range(num_ranks)) or home != source:
            raise ScheduleError(
                f"ring attention: gradients of rank {source}'s keys have parts of {ranks} and end at {home}"
            )
