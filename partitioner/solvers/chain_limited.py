"""The exact partition of a chain whose stages may not exceed a memory limit at their peaks.

`solve_limited` finds, among the contiguous partitions in which no stage's peak (`smpc.partitioner.solvers.peak_bound`) exceeds the
limit, the smallest bottleneck, and then the cheapest cuts, as `smpc.partitioner.solvers.chain` does without a limit.
`least_peak` finds the partition whose largest peak is smallest: no contiguous partition does with less. For long chains with many stages
that would take minutes: then it finds the best of the partitions with the cheapest cuts.

Peaks do not grow with the interval: to cut later can be to send less. So both are dynamic programs over all ends of a
stage, best[s][j] = min over i of max(best[s - 1][i], value of i..j), kept small by windows: within a bottleneck B and
a peak P, cut s is between the earliest and the latest position that B allows by cost and P by the memory that no
peak is below, and both of these do grow. B (or P) starts at the optimum of the chain without peaks and is raised
until the program has a solution; one that is within B is optimal.

    units    6 1 1 6    memory; a limit of 8 allows 6 1 | 1 6 alone, whatever time says
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from smpc.partitioner.solvers.chain import (
    ChainModel,
    ChainProblem,
    ChainSolution,
    Intervals,
    build,
    reversed_units,
    solve,
)
from smpc.partitioner.solvers.peak_bound import PeakRows
from smpc.partitioner.stage_costs import FloatArray, IntArray, Scale

_RAISES = (1.0, 1.02, 1.1, 1.3, 2.0, math.inf)
_TRIES, _NEAR = 40, 1e-3  # of a good partition: how many, and how near to what cannot be is enough
_MOST_STARTS = 20_000  # of stages, all together, that are gone through to prove a peak the least: some seconds
_NONE = np.iinfo(np.int64).max
Values = Callable[[int, int, int], FloatArray]  # (start, stop, stage) -> value of start..j; inf where not allowed


@dataclass(frozen=True)
class LimitedChain:
    """A chain problem with the peaks of its intervals. Positions count merged units, as in `ChainModel`."""

    problem: ChainProblem
    model: ChainModel
    peaks: PeakRows
    positions: IntArray  # original unit at which each merged one starts, and the number of units
    memory: Intervals  # memory that no peak is below, with `least_in_flight` of the peaks
    mirrored_memory: Intervals

    @classmethod
    def of(cls, problem: ChainProblem, peaks: PeakRows, num_stages: int) -> LimitedChain:
        """PartitionError if a stage would be empty."""
        model = build(problem, num_stages)
        positions = np.concatenate((model.starts, [len(problem.units)]))
        label = np.searchsorted(model.starts, np.arange(len(problem.units)), side="right") - 1
        units = peaks.lower_units.merged(label, len(model.starts))
        scale = Scale(1.0, 1, 1)
        return cls(problem, model, peaks, positions, Intervals(units, scale), Intervals(reversed_units(units), scale))

    def coarser(self) -> LimitedChain | None:
        """The chain with the cheapest cuts alone, as many as are quickly gone through; None if these are all of them."""
        model, num_stages = self.model, len(self.model.in_flight)
        most = max(2 * num_stages, _MOST_STARTS // num_stages)
        if model.forward.num_units <= most:
            return None
        by_price = np.lexsort((model.cut_bytes[1:], model.cut_depth[1:]))
        dropped = model.starts[1:][by_price[most - 1 :]].tolist()
        forbidden = tuple(sorted({*self.problem.forbidden, *dropped}))
        return LimitedChain.of(replace(self.problem, forbidden=forbidden), self.peaks, num_stages)

    def peak_row(self, start: int, stop: int, stage: int) -> IntArray:
        """Peaks of merged units start..j."""
        offset = int(self.positions[start])
        row = self.peaks.row(offset, int(self.positions[stop]), stage)
        return row[self.positions[start + 1 : stop + 1] - offset - 1]

    def windows(self, bound: float, limit: float) -> list[tuple[int, int]] | None:
        """Earliest and latest end of each stage within both; None if there is no partition."""
        model, n = self.model, self.model.forward.num_units
        latest, earliest = [n] * len(model.in_flight), [0] * len(model.in_flight)
        for forward, mirrored, most, in_flight in (
            (model.forward, model.backward, bound, model.in_flight),
            (self.memory, self.mirrored_memory, limit, self.peaks.least_in_flight),
        ):
            ends, _, _ = forward.reach(most, in_flight)
            starts, _, _ = mirrored.reach(most, in_flight[::-1])
            if ends[-1] != n or starts[-1] != n:
                return None
            latest = [min(pair) for pair in zip(latest, ends, strict=True)]
            from_the_end = [n - start for start in reversed(starts[:-1])] + [n]
            earliest = [max(pair) for pair in zip(earliest, from_the_end, strict=True)]
        found = list(zip(earliest, latest, strict=True))
        return found if all(low <= high for low, high in found) else None


def solve_limited(chain: LimitedChain, limit: int, tolerance: float) -> ChainSolution | None:
    """The best partition within the limit; None if there is none."""
    model = chain.model

    def costs(start: int, stop: int, stage: int) -> FloatArray:
        row = model.forward.costs(start, stop, model.in_flight[stage], stage)
        return np.where(chain.peak_row(start, stop, stage) <= limit, row, np.inf)

    _, unlimited = solve(model, 0.0)
    known = _good_limited_chain(chain, unlimited, costs)
    found = _rising_limited_chain(chain, unlimited, known, costs, lambda bound: chain.windows(bound, limit))
    if found is None:
        return None
    optimum, _ = found
    ends = _cheapest_limited_chain(chain, costs, optimum * (1.0 + tolerance), limit)
    cuts = tuple(model.starts[list(ends[:-1])].tolist())
    return ChainSolution(cuts, model.bottleneck(ends), optimum)


def least_peak(chain: LimitedChain) -> tuple[ChainSolution, int, bool]:
    """The partition whose largest peak is smallest, that peak, and whether it is proven that no other has a smaller one."""
    model = chain.model
    problem = ChainProblem(
        chain.peaks.lower_units, Scale(1.0, 1, 1), chain.peaks.least_in_flight, forbidden=chain.problem.forbidden
    )
    _, lowest = solve(build(problem, len(model.in_flight)), 0.0)

    def peaks(start: int, stop: int, stage: int) -> FloatArray:
        return chain.peak_row(start, stop, stage).astype(np.float64)

    known = _good_limited_chain(chain, lowest, peaks)
    if known is not None and not _is_quick(chain.windows(math.inf, known[0])) and (coarse := chain.coarser()):
        return (*least_peak(coarse)[:2], False)
    found = _rising_limited_chain(chain, lowest, known, peaks, lambda bound: chain.windows(math.inf, bound))
    assert found is not None, "without a limit there is a partition"
    peak, ends = found
    bottleneck = model.bottleneck(ends)
    return ChainSolution(tuple(model.starts[list(ends[:-1])].tolist()), bottleneck, bottleneck), int(peak), True


def _is_quick(windows: list[tuple[int, int]] | None) -> bool:
    return windows is None or sum(last - first + 1 for first, last in windows) <= _MOST_STARTS


def fits(chain: LimitedChain, limit: int) -> bool | None:
    """Whether a partition stays within the limit; None if none was found, and to prove that there is none would take minutes."""

    def peaks(start: int, stop: int, stage: int) -> FloatArray:
        row = chain.peak_row(start, stop, stage)
        return np.where(row <= limit, row, np.inf)

    windows = chain.windows(math.inf, limit)
    if windows is None:
        return False
    if _greedy_limited_chain(chain, peaks, limit) is not None:
        return True
    return _smallest_limited_chain(chain, peaks, windows) is not None if _is_quick(windows) else None


def _rising_limited_chain(
    chain: LimitedChain,
    start: float,
    known: tuple[float, tuple[int, ...]] | None,
    values: Values,
    windows: Callable[[float], list[tuple[int, int]] | None],
) -> tuple[float, tuple[int, ...]] | None:
    """The smallest largest value of a partition, and its ends; a partition of value v is in windows(v). `known`: some partition."""
    if known is not None:
        allowed = windows(known[0])
        found = None if allowed is None else _smallest_limited_chain(chain, values, allowed, known[0])
        return known if found is None else found
    for raised in _RAISES:
        bound = start * raised if raised < math.inf else math.inf
        allowed = windows(bound)
        found = None if allowed is None else _smallest_limited_chain(chain, values, allowed, bound)
        if found is not None:
            return found
    return None


def _good_limited_chain(chain: LimitedChain, start: float, values: Values) -> tuple[float, tuple[int, ...]] | None:
    """A partition with a small largest value, and its ends: each stage takes as much as it may. None if none was found."""
    best: tuple[float, tuple[int, ...]] | None = None
    low, bound = start, start
    for _ in range(_TRIES):
        found = _greedy_limited_chain(chain, values, bound)
        if found is not None:
            best = found
        else:
            low = bound
        if best is None:
            bound *= 2.0
        elif best[0] <= low * (1.0 + _NEAR):
            break
        else:
            bound = (low + best[0]) / 2
    return best


def _greedy_limited_chain(chain: LimitedChain, values: Values, bound: float) -> tuple[float, tuple[int, ...]] | None:
    """The partition in which each stage ends as late as the bound allows; None if the last one does not come to the end."""
    n, num_stages = chain.model.forward.num_units, len(chain.model.in_flight)
    ends: list[int] = []
    largest = 0.0
    for stage in range(num_stages):
        start, stop = ends[-1] if ends else 0, n - (num_stages - 1 - stage)
        row = values(start, stop, stage)
        allowed = np.flatnonzero(row <= bound)
        if not len(allowed) or (stage == num_stages - 1 and start + 1 + allowed[-1] != n):
            return None
        largest = max(largest, float(row[allowed[-1]]))
        ends.append(start + 1 + int(allowed[-1]))
    return largest, tuple(ends)


def _smallest_limited_chain(
    chain: LimitedChain, values: Values, windows: list[tuple[int, int]], most: float = math.inf
) -> tuple[float, tuple[int, ...]] | None:
    """The partition within the windows whose largest value is smallest, and at most `most`."""
    low, best = 0, np.zeros(1)
    parents: list[tuple[int, IntArray]] = []
    for stage, (first, last) in enumerate(windows):
        new, parent = np.full(last - first + 1, np.inf), np.zeros(last - first + 1, dtype=np.int64)
        for k in np.flatnonzero(np.isfinite(best)).tolist():
            start = low + k
            if start >= last:
                break
            row = np.maximum(values(start, last, stage), best[k])[max(0, first - start - 1) :]
            span = slice(max(0, start + 1 - first), None)
            better = (row < new[span]) & (row <= most)
            new[span][better], parent[span][better] = row[better], start
        parents.append((first, parent))
        low, best = first, new
    if not np.isfinite(best[0]):
        return None
    return float(best[0]), _ends_of_limited_chain(chain.model.forward.num_units, parents)


def _cheapest_limited_chain(chain: LimitedChain, values: Values, bound: float, limit: int) -> tuple[int, ...]:
    """Ends of the partition within the bound and the limit whose cuts break the fewest modules, then cross the fewest bytes."""
    model = chain.model
    windows = chain.windows(bound, limit)
    assert windows is not None, "the optimum is within its own tolerance"
    low, depth, size = 0, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    parents: list[tuple[int, IntArray]] = []
    for stage, (first, last) in enumerate(windows):
        width = last - first + 1
        new_depth, new_size = np.full(width, _NONE), np.full(width, _NONE)
        parent = np.zeros(width, dtype=np.int64)
        for k in np.flatnonzero(depth != _NONE).tolist():
            start = low + k
            if start >= last:
                break
            allowed = (values(start, last, stage) <= bound)[max(0, first - start - 1) :]
            span = slice(max(0, start + 1 - first), None)
            better = (new_depth[span] > depth[k]) | ((new_depth[span] == depth[k]) & (new_size[span] > size[k]))
            better &= allowed
            new_depth[span][better], new_size[span][better], parent[span][better] = depth[k], size[k], start
        parents.append((first, parent))
        low, depth, size = first, new_depth, new_size
        if stage < len(windows) - 1:
            reached = np.flatnonzero(depth != _NONE)
            depth[reached] += model.cut_depth[low + reached]
            size[reached] += model.cut_bytes[low + reached]
    assert depth[0] != _NONE, "the optimum is within its own tolerance"
    return _ends_of_limited_chain(model.forward.num_units, parents)


def _ends_of_limited_chain(num_units: int, parents: list[tuple[int, IntArray]]) -> tuple[int, ...]:
    ends = [num_units]
    for first, parent in reversed(parents[1:]):
        ends.append(int(parent[ends[-1] - first]))
    return tuple(reversed(ends))
