"""Plans whose ranks stay within a memory limit, and what to say when there is none.

The limit holds for the predicted peak of every rank: `rank_peaks(plan)`. The search goes, until a plan fits, through

    1   the best contiguous partition whose intervals fit (`smpc.partitioner.solvers.chain_limited`)
    2   for models that are no chain, the integer program with the limit as a constraint, which may do better
    3   the contiguous partition whose largest peak is smallest

Solvers see each stage's peak as an upper bound. Should a plan exceed the limit all the same, the solvers' limit is lowered by as
much and step 1 taken again. Where a rank runs several stages, each gets an equal share of the limit, which is safe but not
exact.

Where ranks have different limits, solvers see every peak as if all ranks had the largest: a rank with half of it counts twice.

    MemoryLimitError: expected a plan within 8.00 GiB for each rank, found none with 2 stages: the least that would do is 11.21 GiB,
    and within this limit the fewest stages that would do are 4; ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from smpc.errors import MemoryLimitError, PartitionError
from smpc.partitioner.analysis import Analysis
from smpc.partitioner.costs.device import Device
from smpc.partitioner.graph.plan import Plan
from smpc.partitioner.problem import LARGEST, IntArray, Scale
from smpc.partitioner.sizes import at_least
from smpc.partitioner.solvers.chain_limited import LimitedChain, fits, least_peak, solve_limited
from smpc.partitioner.solvers.coarsen import chain_problem, coarse_problem
from smpc.partitioner.solvers.ilp import solve_placement, solver_name
from smpc.partitioner.solvers.peaks import PeakRows

_ATTEMPTS = 6
_MAX_STAGES = 128  # the search for the fewest stages that would do goes no further
InFlight = Callable[[int], Sequence[int] | None]  # by stage, for a number of stages; None: no such schedule
MakePlan = Callable[[Sequence[int], str, str], Plan]  # (stage of each rank, solver, note)


@dataclass(frozen=True)
class Limited:
    """A problem with a limit. `make` gives the plan of a placement."""

    analysis: Analysis
    scale: Scale
    in_flight: tuple[int, ...]
    num_microbatches: int
    limit: int
    stages_per_rank: int
    tolerance: float
    max_coarse_units: int
    unlimited_peak: int  # of the best plan without a limit
    make: MakePlan
    in_flight_of: InFlight | None = None
    limits: tuple[int, ...] = ()  # by stage, that of its rank, if they differ; `limit` is the largest
    prove: bool = True  # without, the contiguous plan will do


class _Scaled(PeakRows):
    """Peaks as if every rank had the largest of the limits: a rank with half of it counts twice."""

    def __init__(self, peaks: PeakRows, limits: Sequence[int]) -> None:
        vars(self).update(vars(peaks))
        self.limits = limits

    def row(self, start: int, stop: int, stage: int) -> IntArray:
        """Peak of start..j for each j, scaled."""
        return _scaled(super().row(start, stop, stage), self.limits[stage], max(self.limits))


def _scaled(num_bytes: IntArray, limit: int, largest: int) -> IntArray:
    """Bytes of a rank in those of the rank with the largest limit, rounded up; no more than that limit if and only if they fit."""
    if limit >= largest:
        return num_bytes
    found = np.minimum(np.ceil(num_bytes * (largest / limit)), float(LARGEST // 2)).astype(np.int64)
    scaled: IntArray = np.where(num_bytes <= limit, np.minimum(found, largest), np.maximum(found, largest + 1))
    return scaled


def rank_peaks(plan: Plan, limits: Sequence[int] = ()) -> dict[int, int]:
    """Predicted peak bytes of each rank; a bound where a rank runs several stages, since only one is at work at a time.

    With `limits`, by stage: in bytes of the rank with the largest limit.
    """
    peaks: dict[int, int] = {}
    for stage in plan.stages:
        peaks[stage.rank] = peaks.get(stage.rank, 0) + stage.peak_memory_bytes
    if not limits:
        return peaks
    own = {stage.rank: limit for stage, limit in zip(plan.stages, limits, strict=True)}
    return {rank: int(_scaled(np.asarray(peak), own[rank], max(limits))) for rank, peak in peaks.items()}


def check_peaks(plan: Plan, limits: Sequence[int]) -> None:
    """PartitionError if a rank of a plan that was made by hand exceeds its limit; `limits` by rank, empty: none."""
    over = [
        f"rank {rank} needs {at_least(peak)} of {at_least(limits[rank])}"
        for rank, peak in rank_peaks(plan).items()
        if limits and peak > limits[rank]
    ]
    if over:
        raise PartitionError(
            f"expected every rank within its memory limit, found that {', '.join(over)} in the given assignment; move modules to other "
            "ranks, or raise memory_limit"
        )


def with_size_note(plan: Plan, devices: Sequence[Device]) -> Plan:
    """The plan, with a note if a rank needs more memory than its device has."""
    excess = {rank: peak - devices[rank].memory_bytes for rank, peak in rank_peaks(plan).items()}
    rank = max(excess, key=lambda rank: excess[rank])
    if excess[rank] <= 0:
        return plan
    device = devices[rank]
    peak = excess[rank] + device.memory_bytes
    note = f"rank {rank} needs {at_least(peak)}, but {device.name} has {at_least(device.memory_bytes)}"
    return with_note(plan, note)


def with_note(plan: Plan, note: str) -> Plan:
    """The plan, whose objective says this too."""
    notes = "; ".join(filter(None, (plan.objective.note, note)))
    return replace(plan, objective=replace(plan.objective, note=notes))


def plan_within(problem: Limited) -> Plan:
    """The best plan found within the limit. MemoryLimitError if there is none: see the module docstring."""
    analysis, num_stages = problem.analysis, len(problem.in_flight)
    peaks = PeakRows(
        analysis.graph,
        analysis.cost_model,
        analysis.times,
        tuple(analysis.recomputable),
        problem.in_flight,
        problem.num_microbatches,
        analysis.checkpoints.regions,
    )
    if problem.limits:
        peaks = _Scaled(peaks, problem.limits)
    chain = _chain(problem, peaks, problem.in_flight)
    limit = problem.limit // problem.stages_per_rank
    best: Plan | None = None
    for _ in range(_ATTEMPTS):
        solution = solve_limited(chain, limit, problem.tolerance)
        if solution is None:
            break
        note = f"best contiguous cut within the limit {solution.optimum:.6g}"
        plan = problem.make(solution.assignment(analysis.graph.num_compute), "chain", note)
        excess = max(rank_peaks(plan, problem.limits).values()) - problem.limit
        if excess <= 0:
            best = plan
            break
        limit -= excess
    if num_stages > 1 and (best is None or (problem.prove and best.objective.gap > problem.tolerance)):
        placed = _placed(problem, peaks)
        if placed is not None and (best is None or _improves(placed, best, problem.tolerance)):
            best = placed
    if best is not None:
        return best
    solution, _ = least_peak(chain)
    plan = problem.make(
        solution.assignment(analysis.graph.num_compute), "chain", "the least memory that a contiguous cut takes"
    )
    least = max(rank_peaks(plan, problem.limits).values())
    if least <= problem.limit:
        return plan
    least = min(least, problem.unlimited_peak)
    raise MemoryLimitError(_infeasible(problem, peaks, least), least)


def _chain(problem: Limited, peaks: PeakRows, in_flight: Sequence[int]) -> LimitedChain:
    analysis = problem.analysis
    speeds = problem.scale.speeds if len(in_flight) == len(problem.in_flight) else ()
    scale = Scale.of(analysis.units, in_flight, problem.scale.memory_weight, speeds)
    chain = chain_problem(analysis.graph, analysis.clusters, analysis.recomputable, analysis.units, scale, in_flight)
    return LimitedChain.of(chain, peaks, len(in_flight))


def _improves(plan: Plan, other: Plan, tolerance: float) -> bool:
    return plan.objective.bottleneck < other.objective.bottleneck * (1.0 - tolerance)


def _placed(problem: Limited, peaks: PeakRows) -> Plan | None:
    """The plan of the integer program, if it finds one that fits."""
    analysis = problem.analysis
    coarse = coarse_problem(
        analysis.graph,
        analysis.clusters,
        analysis.recomputable,
        analysis.units,
        problem.scale,
        problem.in_flight,
        problem.max_coarse_units,
    )
    if coarse.is_ordered or not coarse.start or solver_name() is None:
        return None
    working = [0] * len(coarse.problem.units)
    for rank, unit in enumerate(coarse.unit_of):
        working[unit] = max(working[unit], peaks.working(rank))
    limited = coarse.problem.limited(problem.limit // problem.stages_per_rank, tuple(working))
    try:
        found = solve_placement(limited, gap=problem.tolerance / 10)
    except PartitionError:  # none within the limit, or within the solver's own
        return None
    plan = problem.make([found.assignment[unit] for unit in coarse.unit_of], "ilp", found.note)
    return plan if max(rank_peaks(plan, problem.limits).values()) <= problem.limit else None


def _infeasible(problem: Limited, peaks: PeakRows, least: int) -> str:
    num_stages = len(problem.in_flight)
    if problem.limits:
        return (
            f"expected a plan within the limits of its ranks for {num_stages} stages, found none: with "
            f"{least / problem.limit:.3f} times the memory on every rank there would be one; raise memory_limit, use other devices or "
            "more of them, or make microbatches smaller"
        )
    text = (
        f"expected a plan within {at_least(problem.limit)} for each rank, found none with {num_stages} stages: the least "
        f"that would do is {at_least(least)}"
    )
    if problem.in_flight_of is None:
        return f"{text}; raise memory_limit, use more stages, or fewer microbatches in flight"
    fewest = _fewest_stages(problem, peaks)
    if fewest is not None:
        text += f", and within this limit the fewest stages that would do are {fewest}"
    else:
        text += f", and within this limit no number of stages up to {_MAX_STAGES} would do"
    return f"{text}; raise memory_limit, change the number of stages, or make microbatches smaller"


def _fewest_stages(problem: Limited, peaks: PeakRows) -> int | None:
    """The fewest stages, one on each rank, with which a contiguous partition stays within the limit."""
    assert problem.in_flight_of is not None, "the schedule of other numbers of stages is known"
    for num_stages in range(1, min(_MAX_STAGES, problem.analysis.graph.num_modules()) + 1):
        in_flight = problem.in_flight_of(num_stages)
        if in_flight is None:
            continue
        try:
            chain = _chain(problem, peaks.scheduled(in_flight), in_flight)
        except PartitionError:  # fewer pieces than stages
            return None
        if chain.windows(math.inf, problem.limit) is not None and fits(chain, problem.limit):
            return num_stages
    return None
