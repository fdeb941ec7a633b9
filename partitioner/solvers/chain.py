"""The exact partition of a chain of units into contiguous stages.

Input: `ChainProblem`, numbers only. Output: `ChainSolution`: the cut positions (cut p is between units p - 1 and p),
the bottleneck of that partition, and `optimum`, the smallest bottleneck of any contiguous partition without empty
stages.

Phase 1 finds the optimum. A longer interval never costs less, so whether every stage can stay within a bound B is
decided by letting each stage reach as far as it can (n log n for a bound, and B moves by bisection between values that
stages really have). Phase 2 looks at the partitions whose bottleneck is at most optimum * (1 + tolerance) and takes the
one with the smallest sum of cut depths, then of cut bytes, then the earliest cuts. Each cut is between the earliest and
the latest position that this bound allows; the dynamic program runs over those windows only, so tens of thousands of
units are no problem.

    units   3 1 1 1 3     two stages, costs are times:   3 1 | 1 1 3 -> 5   and   3 1 1 | 1 3 -> 5   are both optimal;
    depth    0 2 1 0      the second cut is less deep, so the answer is cuts=(3,)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smpc.errors import PartitionError
from smpc.partitioner.stage_costs import FloatArray, IntArray, Scale, SharedItem, Units, check_total, stage_costs

_ANY = float(np.finfo(np.float64).max)  # a bound that every finite cost is within
_NO_BYTES = np.zeros(1, dtype=np.int64)  # of all intervals, where memory changes no cost


@dataclass(frozen=True, slots=True)
class ChainProblem:
    """Units in order, and the cost of a cut before unit p: `cut_depth[p]`, `cut_bytes[p]` (entry 0 is not used)."""

    units: Units
    scale: Scale
    in_flight: tuple[int, ...]  # by stage
    cut_depth: tuple[int, ...] = ()  # empty: all zero
    cut_bytes: tuple[int, ...] = ()
    forbidden: tuple[int, ...] = ()  # positions where no cut may be

    def __post_init__(self) -> None:
        for column in (self.cut_depth, self.cut_bytes):
            assert len(column) in (0, len(self.units)), "chain problem: one cut cost for every unit"
        assert min(self.in_flight, default=0) >= 0, "chain problem: negative in_flight"


@dataclass(frozen=True, slots=True)
class ChainSolution:
    """Where to cut. `optimum` <= `bottleneck` <= `optimum` * (1 + tolerance)."""

    cuts: tuple[int, ...]
    bottleneck: float
    optimum: float

    def assignment(self, num_units: int) -> tuple[int, ...]:
        """The stage of each unit."""
        return tuple(np.searchsorted(np.asarray(self.cuts), np.arange(num_units), side="right").tolist())


def solve_chain(problem: ChainProblem, num_stages: int, tolerance: float = 0.0) -> ChainSolution:
    """The best contiguous partition: see the module docstring. PartitionError if a stage would be empty."""
    model = build(problem, num_stages)
    ends, optimum = solve(model, tolerance)
    return decode(problem, model, ends, optimum)


class Intervals:
    """Costs of intervals of units that start at one place."""

    def __init__(self, units: Units, scale: Scale) -> None:
        self.num_units = len(units)
        self.total_bytes = units.totals()[1]  # that are static
        self.scale = scale
        self.time, self.static, self.activation = (
            _prefix_sums(column) for column in (units.time, units.static_bytes, units.activation_bytes)
        )
        rows = [
            (user, previous, item.static_bytes, item.activation_bytes)
            for item in units.shared
            for previous, user in zip((-1, *item.users[:-1]), item.users, strict=True)
        ]
        uses = np.asarray(sorted(rows), dtype=np.int64).reshape(-1, 4)
        self.previous_use, self.use_static, self.use_activation = uses[:, 1], uses[:, 2], uses[:, 3]
        # uses of unit i are use_offset[i]:use_offset[i + 1]
        self.use_offset = np.searchsorted(uses[:, 0], np.arange(self.num_units + 1))

    def costs(self, start: int, stop: int, in_flight: int, stage: int = 0) -> FloatArray:
        """Cost of start..j on a stage for j = start + 1, ..., stop (exclusive ends). It never falls along the row."""
        time = self.time[start + 1 : stop + 1] - self.time[start]
        memory = self.memory(start, stop, in_flight) if self.scale.counts_memory else _NO_BYTES
        return self.scale.cost_on(stage, time, memory)

    def ends(self, starts: Sequence[int], stop: int, bound: float, in_flight: int, stage: int) -> list[int]:
        """How far intervals from these places get when none may cost more than `bound`: at most to `stop`."""
        if self.scale.counts_memory:
            rows = ((start, self.costs(start, stop, in_flight, stage)) for start in starts)
            return [start + int(np.searchsorted(row, bound, side="right")) for start, row in rows]
        first = np.asarray(starts, dtype=np.int64)
        low, high = first, np.full(len(first), stop)
        while (low < high).any():  # all at once: each is between an end that is within the bound and one that may be
            middle = (low + high + 1) // 2
            cost = self.scale.cost_on(stage, self.time[middle] - self.time[first], _NO_BYTES)
            low, high = np.where(cost <= bound, middle, low), np.where(cost <= bound, high, middle - 1)
        found: list[int] = low.tolist()
        return found

    def memory(self, start: int, stop: int, in_flight: int = 1) -> IntArray:
        """Bytes of start..j for the same j, with so many microbatches in flight."""
        static = self.static[start + 1 : stop + 1] - self.static[start]
        activation = self.activation[start + 1 : stop + 1] - self.activation[start]
        lo, hi = self.use_offset[start], self.use_offset[stop]
        if lo < hi:
            fresh = self.previous_use[lo:hi] < start
            at = self.use_offset[start + 1 : stop + 1] - lo
            static += _prefix_sums(self.use_static[lo:hi] * fresh)[at]
            activation += _prefix_sums(self.use_activation[lo:hi] * fresh)[at]
        found: IntArray = static + in_flight * activation
        return found

    def reach(
        self, bound: float, in_flight: Sequence[int], may_be_empty: bool = False
    ) -> tuple[list[int], float, float]:
        """How far the first stages get when none may cost more than `bound`; a unit is left for each stage after.

        Returns the end of each stage (no partition within the bound has a later one), the largest cost met, and the
        smallest cost above the bound at which a stage stopped: below it, nothing would change.
        """
        ends, largest, following, start = [], 0.0, math.inf, 0
        for stage, multiplier in enumerate(in_flight):
            stop = self.num_units - (0 if may_be_empty else len(in_flight) - 1 - stage)
            row = self.costs(start, stop, multiplier, stage)
            count = int(np.searchsorted(row, bound, side="right"))
            if count:
                largest = max(largest, float(row[count - 1]))
            if count < len(row):
                following = min(following, float(row[count]))
            start += count
            ends.append(start)
        return ends, largest, following


@dataclass(frozen=True)
class ChainModel:
    """The problem without forbidden cuts: units that no cut separates are one."""

    units: Units
    starts: IntArray  # first original unit of each merged one
    forward: Intervals
    backward: Intervals  # the same units, last one first
    in_flight: tuple[int, ...]
    cut_depth: IntArray
    cut_bytes: IntArray

    def bottleneck(self, ends: Sequence[int]) -> float:
        """The largest stage cost of a partition given by the exclusive end of each stage."""
        starts = (0, *ends[:-1])
        rows = enumerate(zip(starts, ends, self.in_flight, strict=True))
        return max(float(self.forward.costs(start, end, held, stage)[-1]) for stage, (start, end, held) in rows)


def build(problem: ChainProblem, num_stages: int) -> ChainModel:
    """Merge what may not be cut and index the rest."""
    n = len(problem.units)
    if num_stages < 1 or len(problem.in_flight) != num_stages:
        raise PartitionError(
            f"expected at least one stage and one in_flight for each, found {num_stages} and {len(problem.in_flight)}"
        )
    first = np.ones(n, dtype=bool)
    first[[p for p in problem.forbidden if 0 < p < n]] = False
    starts = np.flatnonzero(first).astype(np.int64)
    if len(starts) < num_stages:
        raise PartitionError(
            f"expected at least {num_stages} separable pieces for {num_stages} stages, found {len(starts)}: "
            "use fewer stages"
        )
    check_total(
        (num_stages - 1) * max(problem.cut_bytes, default=0), "bytes between stages", "make microbatches smaller"
    )
    units = problem.units.merged(np.cumsum(first) - 1, len(starts))
    depth, size = (
        np.asarray(column or (0,) * n, dtype=np.int64)[starts] for column in (problem.cut_depth, problem.cut_bytes)
    )
    forward, backward = Intervals(units, problem.scale), Intervals(reversed_units(units), problem.scale.mirrored())
    return ChainModel(units, starts, forward, backward, problem.in_flight, depth, size)


def solve(model: ChainModel, tolerance: float) -> tuple[tuple[int, ...], float]:
    """Ends of the stages, in merged units, and the optimum."""
    optimum = _chain_optimum(model)
    ends = _cheapest_cuts(model, optimum * (1.0 + tolerance))
    assert ends is not None, "the optimum is within its own tolerance"
    return ends, optimum


def decode(problem: ChainProblem, model: ChainModel, ends: Sequence[int], optimum: float) -> ChainSolution:
    """Cuts in the problem's own units; the bottleneck is computed afresh from the definition."""
    solution = ChainSolution(tuple(model.starts[list(ends[:-1])].tolist()), model.bottleneck(ends), optimum)
    assignment = solution.assignment(len(problem.units))
    costs = stage_costs(problem.units, problem.scale, problem.in_flight, assignment)
    assert float(costs.max()) == solution.bottleneck, "solver and definition disagree on the bottleneck"
    return solution


def _chain_optimum(model: ChainModel) -> float:
    """The smallest bottleneck.

    `reach` may leave a stage empty (a unit too heavy for this stage but not for a later one); then its answer is a
    lower bound only, and bisection goes on with the exact test.
    """
    n, num_stages = model.forward.num_units, len(model.in_flight)
    high = model.bottleneck([n * (stage + 1) // num_stages for stage in range(num_stages)])
    low = _bisect_chain(model.forward, model.in_flight, high, may_be_empty=False)
    ends, _, _ = model.forward.reach(low, model.in_flight)
    whole = ends[-1] == n and all(start < end for start, end in zip((0, *ends[:-1]), ends, strict=True))
    if whole or _cheapest_cuts(model, low) is not None:
        return low
    if high == math.inf:
        cuts = _cheapest_cuts(model, _ANY)
        if cuts is None:
            raise PartitionError("expected stages of consecutive units within the memory limits, found none")
        high = model.bottleneck(cuts)
    while low < (middle := (low + high) / 2) < high:
        cuts = _cheapest_cuts(model, middle)
        if cuts is None:
            low = middle
        else:
            high = model.bottleneck(cuts)
    return high


def relaxed_optimum(units: Units, scale: Scale, in_flight: Sequence[int]) -> float:
    """The smallest bottleneck of a contiguous partition whose stages may be empty; infinite if limits allow none."""
    intervals = Intervals(units, scale)
    everything = float(intervals.costs(0, len(units), in_flight[0])[-1])
    return _bisect_chain(intervals, in_flight, everything, may_be_empty=True)


def _bisect_chain(intervals: Intervals, in_flight: Sequence[int], high: float, may_be_empty: bool) -> float:
    """The smallest bound with which the last stage reaches the end, at most `high`, with which it does."""
    low = 0.0
    if high == math.inf:  # limits: anything that they allow
        ends, largest, _ = intervals.reach(_ANY, in_flight, may_be_empty)
        if ends[-1] != intervals.num_units:
            return low if not may_be_empty else math.inf
        high = largest
    while low < high:
        middle = (low + high) / 2
        bound = middle if low < middle < high else low
        ends, largest, following = intervals.reach(bound, in_flight, may_be_empty)
        if ends[-1] == intervals.num_units:
            high = largest
        else:
            low = following
    return high


def _cheapest_cuts(model: ChainModel, bound: float) -> tuple[int, ...] | None:
    """Ends of the partition within `bound` that has the cheapest cuts; None if there is none."""
    n, num_stages = model.forward.num_units, len(model.in_flight)
    latest, _, _ = model.forward.reach(bound, model.in_flight)
    mirrored, _, _ = model.backward.reach(bound, model.in_flight[::-1])
    if latest[-1] != n or mirrored[-1] != n:
        return None
    earliest = [n - mirrored[num_stages - 2 - stage] for stage in range(num_stages - 1)] + [n]
    depths, sizes = model.cut_depth.tolist(), model.cut_bytes.tolist()
    reached = {0: (0, 0)}  # where the stage may start, in order: depth and bytes of the cheapest cuts so far
    parents: list[dict[int, int]] = []
    for stage, multiplier in enumerate(model.in_flight):
        starts = [start for start in reached if start < latest[stage]]
        farthest = model.forward.ends(starts, latest[stage], bound, multiplier, stage)
        costs = [reached[start] for start in starts]
        parent = _cheapest_starts(starts, farthest, costs, range(earliest[stage], latest[stage] + 1))
        parents.append(parent)
        if stage < num_stages - 1:
            reached = {
                end: (reached[start][0] + depths[end], reached[start][1] + sizes[end]) for end, start in parent.items()
            }
    if n not in parents[-1]:
        return None
    ends = [n]
    for parent in reversed(parents[1:]):
        ends.append(parent[ends[-1]])
    return tuple(reversed(ends))


def _cheapest_starts(
    starts: Sequence[int], farthest: Sequence[int], costs: Sequence[tuple[int, int]], ends: range
) -> dict[int, int]:
    """For each end that a stage can have, the start with the least cost, of equal ones the first.

    A later start reaches at least as far, so the possible starts of an end are consecutive. Only starts that are cheaper than all later
    ones are kept in the queue: costs rise from the first to the last.
    """
    found: dict[int, int] = {}
    waiting: deque[int] = deque()  # by index
    following = 0
    for end in ends:
        while following < len(starts) and starts[following] < end:
            while waiting and costs[waiting[-1]] > costs[following]:
                waiting.pop()
            waiting.append(following)
            following += 1
        while waiting and farthest[waiting[0]] < end:
            waiting.popleft()
        if waiting:
            found[end] = starts[waiting[0]]
    return found


def _prefix_sums(values: Sequence[int] | IntArray) -> IntArray:
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(np.asarray(values, dtype=np.int64), out=sums[1:])
    return sums


def reversed_units(units: Units) -> Units:
    """The same units, last one first."""
    last = len(units) - 1
    shared = tuple(
        SharedItem(tuple(last - user for user in reversed(item.users)), item.static_bytes, item.activation_bytes)
        for item in units.shared
    )
    return Units(units.time[::-1], units.static_bytes[::-1], units.activation_bytes[::-1], shared)
