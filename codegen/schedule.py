"""Schedules: which forward and backward each pipeline rank runs, and in which order.

Terms
    p           number of stages; a stage waits for the one before it in forwards, for the one after it in backwards
    m           number of microbatches
    active      the most microbatches that may be between their first forward and their last backward
                (`active_microbatches`)
    in flight   microbatches of a stage whose forward has run and whose backward has not: their activations are kept
    placement   stage -> pipeline rank; a rank may have several stages: (1, 2, 1, 0)

Each schedule is a rule for the order of ONE stage's actions, as if every stage had a rank of its own. A rank with
several stages merges their orders: of the actions whose turn it is and whose values are there, a backward first, then
the oldest microbatch, in a simulation where a backward takes twice as long as a forward. The stages' orders never wait
for each other in a circle, so the merged ones do not either. Each stage runs its forwards and its backwards in
ascending order of microbatches: gradients are accumulated in the same order under every schedule, bit for bit.

Example: 1F1B for p = 3, m = 4 (`table`; the time of every action is taken as one):

    rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Virtual stages: every rank runs v pieces of the model, and a microbatch goes round the ranks v times (1F1B,
interleaved; Megatron-LM, arXiv 2104.04473, section 2.3).

Terms
    p       number of ranks
    v       pieces per rank; stage s is on rank s % p, so piece s // p of that rank
    m       number of microbatches
    turn    p microbatches that a rank takes through one piece before it goes on with its next piece

Example: p = 2, v = 2, m = 4, backwards as long as forwards (`table`):

    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
    rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from smpc.codegen.program import Action, Schedule, backward, forward, split_backwards
from smpc.codegen.simulate import Costs, chain, merge, simulate, timeline_text
from smpc.errors import ConfigError, ScheduleError

Scheduler = Callable[[int, Sequence[int], int, int], Schedule]


def simple(num_stages: int, placement: Sequence[int], num_microbatches: int, active_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965).

    Bubble (p - 1) / (m + p - 1) on balanced stages, one to a rank. In flight: m on every stage, whatever
    `active_microbatches` says, since no backward starts before the last forward.
    """
    _check_schedule_sizes(num_stages, placement, num_microbatches, active_microbatches)
    microbatches = range(num_microbatches)
    return _merge_stages(
        [_forwards(s, microbatches) + _backwards(s, microbatches) for s in range(num_stages)], placement
    )


def interleaved(num_stages: int, placement: Sequence[int], num_microbatches: int, active_microbatches: int) -> Schedule:
    """1F1B: a backward first when it is ready (PipeDream-Flush, arXiv 2006.09503; arXiv 2104.04473, section 2.2).

    A stage takes a backward whenever it can, otherwise a forward, as long as at most w = min(m, p - s, active)
    microbatches are in flight on stage s. If active >= min(m, p) that is w forwards, then a backward and a forward in
    turn, then the remaining backwards; a lower limit makes waves of microbatches, with more idle time between them.
    More than p - s in flight are of no use as long as messages take no time: before microbatch 0 is
    back, it needs p - s - 1 forwards and as many backwards of later stages, and on balanced stages p - s - 1 more
    forwards of stage s are all that the later ones can take on until then. One more would only hold its activations.

    Bubble (p - 1) / (m + p - 1) on balanced stages, one to a rank, if active >= min(m, p).
    In flight on stage s: w, under any placement.
    """
    _check_schedule_sizes(num_stages, placement, num_microbatches, active_microbatches)
    return _merge_stages(
        _backward_first(num_microbatches, _peaks(num_stages, num_microbatches, active_microbatches)), placement
    )


def evaluation(num_stages: int, placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Forwards only. Bubble (p - 1) / (m + p - 1); nothing is kept for a backward."""
    _check_schedule_sizes(num_stages, placement, num_microbatches, 1)
    return _merge_stages([_forwards(stage, range(num_microbatches)) for stage in range(num_stages)], placement)


SCHEDULES: Mapping[str, Scheduler] = MappingProxyType({"interleaved": interleaved, "simple": simple})


def scheduler(name: str) -> Scheduler:
    """The schedule of that name; ConfigError names the closest one if there is none."""
    if name not in SCHEDULES:
        known = ", ".join(repr(known) for known in SCHEDULES)
        close = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"pipeline: expected one of {known}, found {name!r}{hint}")
    return SCHEDULES[name]


def in_flight(name: str, num_stages: int, num_microbatches: int, active_microbatches: int) -> tuple[int, ...]:
    """By stage, the most microbatches whose activations the schedule of that name holds at once, under any placement.

    simple: m. interleaved: min(m, p - s, active) on stage s.
    """
    scheduler(name)
    _check_schedule_sizes(num_stages, range(num_stages), num_microbatches, active_microbatches)
    if name == "simple":
        return (num_microbatches,) * num_stages
    return _peaks(num_stages, num_microbatches, active_microbatches)


def table(schedule: Schedule) -> str:
    """A row for each rank, a column for each unit of time, every action taking one: see the module docstring.

    Backwards are either all split or none.
    """
    num_stages = 1 + max((action.stage for actions in schedule for action in actions), default=-1)
    backward_time = 2.0 if any(split_backwards(actions) for actions in schedule) else 1.0
    timeline = simulate(schedule, chain(num_stages), Costs.uniform(num_stages, backward=backward_time))
    return timeline_text(timeline, max_columns=max(1, round(timeline.makespan)))


def _peaks(num_stages: int, num_microbatches: int, active: int) -> tuple[int, ...]:
    return tuple(min(num_microbatches, num_stages - stage, active) for stage in range(num_stages))


def _forwards(stage: int, microbatches: range) -> tuple[Action, ...]:
    return tuple(forward(stage, microbatch) for microbatch in microbatches)


def _backwards(stage: int, microbatches: range) -> tuple[Action, ...]:
    return tuple(backward(stage, microbatch) for microbatch in microbatches)


def _backward_first(num_microbatches: int, peaks: Sequence[int]) -> list[tuple[Action, ...]]:
    """The order of each stage on a rank of its own, with at most `peaks[stage]` microbatches in flight."""
    microbatches, num_stages = range(num_microbatches), len(peaks)
    sequences = [(s, order(s, microbatches)) for s in range(num_stages) for order in (_forwards, _backwards)]
    costs = Costs.uniform(num_stages)
    return list(merge(sequences, chain(num_stages), costs, num_ranks=num_stages, in_flight=peaks).schedule)


def _merge_stages(orders: Sequence[tuple[Action, ...]], placement: Sequence[int]) -> Schedule:
    """The orders of the stages as orders of the ranks."""
    num_stages, num_ranks = len(orders), max(placement) + 1
    sequences = list(zip(placement, orders, strict=True))
    return merge(sequences, chain(num_stages), Costs.uniform(num_stages), num_ranks=num_ranks).schedule


def _check_schedule_sizes(num_stages: int, placement: Sequence[int], num_microbatches: int, active: int) -> None:
    """Raises an error for numbers of stages, ranks and microbatches that no schedule has."""
    problems = []
    if num_stages < 1 or len(placement) != num_stages:
        problems.append(f"expected a rank for each of {num_stages} stages, at least one; found {tuple(placement)}")
    if any(rank < 0 for rank in placement):
        problems.append(f"expected pipeline ranks from 0, found {tuple(placement)}")
    if num_microbatches < 1:
        problems.append(f"expected at least one microbatch, found {num_microbatches}")
    if active < 1:
        problems.append(f"expected at least one active microbatch, found {active}")
    if problems:
        raise ScheduleError("\n".join(problems))


def loop_placement(num_ranks: int, num_pieces: int) -> tuple[int, ...]:
    """The rank of each stage: stage s is on rank s % p."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_pieces))


def interleaved_1f1b(num_ranks: int, num_pieces: int, num_microbatches: int) -> Schedule:
    """1F1B over v pieces per rank.

    Rank r runs min(v m, 2 (p - r - 1) + (v - 1) p) forwards, then a forward and a backward in turn, then the remaining
    backwards. Its forwards take p microbatches through the first piece, the same ones through the second, and so on, then
    the next p; its backwards likewise, from the last piece to the first.

    Bubble (p - 1) / (v m + p - 1) on balanced pieces if p divides m. In flight on rank 0, in shares of a rank (v pieces
    are one): p + (p - 1) / v; rank r holds 2 r / v less. With fewer microbatches than that, v m pieces.

    If p does not divide m, it is the schedule for the next multiple of p, without the missing microbatches. No action
    is later than in that schedule, so a step takes at most as long as with ceil(m / p) p microbatches.
    """
    total = -(-num_microbatches // num_ranks) * num_ranks * num_pieces
    order = []
    for rank in range(num_ranks):
        forwards = [forward(s, m) for s, m in _forward_turns(rank, num_ranks, num_pieces, total)]
        backwards = [
            backward(num_ranks * num_pieces - 1 - s, m)
            for s, m in _forward_turns(num_ranks - 1 - rank, num_ranks, num_pieces, total)
        ]
        warm_up = min(total, 2 * (num_ranks - rank - 1) + (num_pieces - 1) * num_ranks)
        actions = [*forwards[:warm_up], *_alternate(forwards[warm_up:], backwards), *backwards[total - warm_up :]]
        order.append(tuple(action for action in actions if action.microbatch < num_microbatches))
    return tuple(order)


def _forward_turns(rank: int, num_ranks: int, num_pieces: int, total: int) -> Iterator[tuple[int, int]]:
    """(stage, microbatch) of a rank's forwards, in order."""
    for index in range(total):
        turn, within = divmod(index, num_ranks * num_pieces)
        piece, offset = divmod(within, num_ranks)
        yield piece * num_ranks + rank, turn * num_ranks + offset


def _alternate(forwards: list[Action], backwards: list[Action]) -> Iterator[Action]:
    """A forward and a backward in turn, as long as there are forwards."""
    for ahead, back in zip(forwards, backwards, strict=False):
        yield ahead
        yield back
