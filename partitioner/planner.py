"""The planner: from a trace to a plan.

`solve_partition` cuts the chain of all operations exactly (`chain`), within 1% of the best bottleneck so that whole
modules stay together. If the proven lower bound leaves more than that 1% open, all placements that sum every gradient in
eager's order are searched (`placing`), and if that does not close the gap either and the model is not a chain (branches),
the integer program (`ilp`) looks for a better placement of coarse units.
`plan_from_assignment` makes the plan of a given assignment.

A memory limit (`plan_within`) holds for the predicted peak of every rank: `rank_peaks(plan)`. The search goes, until a plan fits, through

    1   the best contiguous partition whose intervals fit (`smpc.partitioner.solvers.chain_limited`)
    2   for models that are no chain, the integer program with the limit as a constraint, which may do better
    3   the contiguous partition whose largest peak is smallest

Solvers see each stage's peak as an upper bound. Should a plan exceed the limit all the same, the solvers' limit is lowered by as
much and step 1 taken again. Where a rank runs several stages, each gets an equal share of the limit, which is safe but not
exact. Where ranks have different limits, solvers see every peak as if all ranks had the largest: a rank with half of it counts twice.

    MemoryLimitError: expected a plan within 8.00 GiB for each rank, found none with 2 stages: the least that would do is 11.21 GiB,
    and within this limit the fewest stages that would do are 4; ...

What a plan's objective says
    bottleneck      the largest stage cost, as defined in `smpc.partitioner.stage_costs`
    lower_bound     no assignment of the nodes to this many stages, contiguous or not, has a smaller bottleneck (`bound`); if there are
                    small checkpointed regions, no assignment that leaves them whole
    gap             bottleneck / lower_bound - 1; infinite where nothing but a bound of 0 is known, as of a plan made without proof
    note            the optimum over contiguous partitions, which is exact, and any solver limit that was hit

Example: two stages, 1F1B, at most two microbatches in flight on stage 0 and one on stage 1:

    plan = solve_partition(trace, num_stages=2, in_flight=(2, 1))
    plan.stages[0].modules     # ('transformer.wte', 'transformer.wpe', 'transformer.drop', 'transformer.h.0')
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from smpc.config.numbers import at_least
from smpc.errors import MemoryLimitError, PartitionError
from smpc.partitioner.costs.device import Device
from smpc.partitioner.costs.node_costs import CostModel, NodeTimes, deferred_time, weight_time
from smpc.partitioner.graph.plan import Objective, Plan, ScheduleSummary, SharedParameter, Stage
from smpc.partitioner.graph.recompute_regions import ActiveRegions, active_regions, recompute_depths
from smpc.partitioner.graph.trace_graph import (
    Crossing,
    Graph,
    check_stages,
    condense,
    find_crossing,
    largest_whole_calls,
    stages_by_rank,
)
from smpc.partitioner.memory.memory_by_action import ActionUse
from smpc.partitioner.memory.peak import Resident, StageMemory, StageUse, distinct_state, on_one_rank, stage_memory
from smpc.partitioner.solvers.bottleneck_bound import lower_bound
from smpc.partitioner.solvers.chain import ChainSolution, solve_chain
from smpc.partitioner.solvers.chain_limited import LimitedChain, fits, least_peak, solve_limited
from smpc.partitioner.solvers.coarsen import Analysis, analyse, chain_problem, coarse_problem, keep_regions_whole
from smpc.partitioner.solvers.ilp import solve_placement, solver_name
from smpc.partitioner.solvers.peak_bound import PeakRows
from smpc.partitioner.solvers.prefix_lattice import Placed, place
from smpc.partitioner.stage_costs import LARGEST, IntArray, Scale, relative_gap, stage_costs
from smpc.tracer.ir import Trace

TOLERANCE = 0.01  # how much bottleneck may be given for whole modules and fewer bytes
_MOST_ABOVE = 1.02  # the bound, where the best contiguous cut is no further above it
MAX_COARSE_UNITS = 32
UNSCHEDULED = ScheduleSummary("unscheduled", 1, 1, 0.0, 0.0)


def solve_partition(
    trace: Trace,
    *,
    num_stages: int,
    memory_weight: float = 0.8,
    in_flight: Sequence[int],
    cost_model: CostModel | None = None,
    placement: Sequence[int] | None = None,
    schedule: ScheduleSummary = UNSCHEDULED,
    times: NodeTimes | None = None,
    memory_limit: int | None = None,
    in_flight_of: InFlight | None = None,
    recompute: Sequence[str] = (),
    resident: Sequence[Resident] | None = None,
    actions: Sequence[ActionUse] | None = None,
    prove: bool = True,
    speeds: Sequence[float] = (),
    limits: Sequence[int] = (),
) -> Plan:
    """The best plan found, with proof of how good it is.

    in_flight: microbatches that each stage holds at the peak of the schedule. placement: the pipeline rank of each
    stage; stage i on rank i if None. times: those measured,
    if any. memory_limit: most bytes at the predicted peak of a rank (see `smpc.partitioner.planner`);
    in_flight_of gives `in_flight` for other numbers of stages, to say how many would do. recompute: names of modules to checkpoint.
    resident: by stage, microbatches in flight that are not offloaded; None: all. actions: what there is beside the
    actions of the stages. prove: without, the best contiguous
    plan is taken, and nothing is said of others, which is much quicker. speeds, limits: of the stages' devices, relative to the cost
    model's, and most bytes at the peak of a rank that runs the stage, instead of `memory_limit`, if they differ. Raises
    PartitionError for more stages than modules, for settings out of range, and when no plan is within the limit.
    """
    _check_settings(num_stages, memory_weight, in_flight, placement)
    if memory_limit is not None and memory_limit < 1:
        raise PartitionError(f"expected a memory limit of at least 1 byte, found {memory_limit}")
    analysis = _analysed_to_solve(analyse(trace, cost_model or CostModel(), times, recompute), num_stages)
    scale = Scale.of(analysis.units, in_flight, memory_weight, speeds)
    contiguous, bound = _best_contiguous(analysis, scale, in_flight, prove)
    limit = max(limits, default=memory_limit or 0)

    def make(stage_of: Sequence[int], solver: str, note: str) -> Plan:
        bottleneck = float(stage_costs(analysis.units, scale, in_flight, stage_of).max())
        proven = bound if prove or num_stages == 1 else 0.0
        objective = _plan_objective(memory_weight, bottleneck, proven, solver, note, limit)
        return _plan_of_stages(
            analysis, np.asarray(stage_of), scale, in_flight, placement, schedule, objective, resident, actions
        )

    plan = _solve_unlimited(analysis, scale, in_flight, contiguous, bound, make)
    peak = max(rank_peaks(plan, limits).values())
    if not limit or peak <= limit:
        return plan
    stages_per_rank = 1 if placement is None else max(Counter(placement).values())
    bounds = (schedule.num_microbatches, limit, stages_per_rank, TOLERANCE, MAX_COARSE_UNITS, peak)
    asked = (make, in_flight_of, tuple(limits), prove, None if resident is None else tuple(resident))
    return plan_within(Limited(analysis, scale, tuple(in_flight), *bounds, *asked))


def _analysed_to_solve(analysis: Analysis, num_stages: int) -> Analysis:
    """The analysis with whole regions, for so many stages. PartitionError if there are fewer modules."""
    num_modules = analysis.graph.num_modules()
    if num_stages > num_modules:
        raise PartitionError(
            f"expected at most as many stages as modules, found {num_stages} stages and {num_modules} modules in "
            f"{analysis.graph.trace.model_class}: lower the pipeline parallel degree"
        )
    return keep_regions_whole(analysis, num_stages)


def _best_contiguous(
    analysis: Analysis, scale: Scale, in_flight: Sequence[int], prove: bool
) -> tuple[ChainSolution, float]:
    """The best contiguous cut whatever its peaks, and what no cut can be better than; inf where nothing is proven."""
    graph, clusters, units = analysis.graph, analysis.clusters, analysis.units
    chain = chain_problem(graph, clusters, analysis.recomputable, units, scale, in_flight)
    contiguous, bound = solve_chain(chain, len(in_flight), TOLERANCE), math.inf
    if prove:
        bound = lower_bound(graph, clusters, units, scale, in_flight, reached=contiguous.optimum)
    if contiguous.optimum <= bound * _MOST_ABOVE < contiguous.bottleneck:
        contiguous = solve_chain(chain, len(in_flight), bound * _MOST_ABOVE / contiguous.optimum - 1.0)
    return contiguous, bound


def _solve_unlimited(
    analysis: Analysis,
    scale: Scale,
    in_flight: Sequence[int],
    contiguous: ChainSolution,
    bound: float,
    make: MakePlan,
) -> Plan:
    """The best plan whatever its peaks."""
    stage_of, solver = contiguous.assignment(analysis.graph.num_compute), "chain"
    note, reached = f"best contiguous cut {contiguous.optimum:.6g}", contiguous.bottleneck
    if reached <= bound * (1.0 + TOLERANCE) or len(in_flight) == 1:
        return make(stage_of, solver, note)
    found = _place_freely(analysis, scale, in_flight, bound, contiguous.optimum)
    if found is not None and found.bottleneck < reached * (1.0 - TOLERANCE / 2):
        stage_of, solver = found.stage_of, "graph"
    return make(stage_of, solver, note)


def _place_freely(
    analysis: Analysis, scale: Scale, in_flight: Sequence[int], bound: float, reached: float
) -> Placed | None:
    """The best placement that sums gradients in eager's order, below what is reached; None if none is found."""
    graph = analysis.graph
    ranks = np.arange(graph.num_compute)
    labels, dag = condense(graph, analysis.clusters, ranks, graph.gradient_order())
    units = analysis.units.merged(labels, dag.number_of_nodes())
    found = place(units, dag, scale, in_flight, bound, reached)
    return None if found is None else Placed(tuple(found.stage_of[unit] for unit in labels), found.bottleneck)


def plan_from_assignment(
    trace: Trace,
    assignment: Mapping[str, int],
    *,
    num_stages: int,
    memory_weight: float = 0.8,
    in_flight: Sequence[int],
    cost_model: CostModel | None = None,
    placement: Sequence[int] | None = None,
    schedule: ScheduleSummary = UNSCHEDULED,
    times: NodeTimes | None = None,
    recompute: Sequence[str] = (),
    resident: Sequence[Resident] | None = None,
    prove: bool = True,
    actions: Sequence[ActionUse] | None = None,
) -> Plan:
    """The plan of a given assignment (node name -> stage, for every node that computes).

    prove: without, nothing is said of other assignments. Raises PartitionError if it cannot run: see
    `smpc.partitioner.graph.trace_graph.check_assignment`.
    """
    _check_settings(num_stages, memory_weight, in_flight, placement)
    analysis = analyse(trace, cost_model or CostModel(), times, recompute)
    graph = analysis.graph
    stage_of = stages_by_rank(graph, assignment)
    check_stages(graph, analysis.clusters, stage_of, num_stages)
    scale = Scale.of(analysis.units, in_flight, memory_weight)
    bottleneck = float(stage_costs(analysis.units, scale, in_flight, stage_of.tolist()).max())
    bound = 0.0
    if prove:
        bound = lower_bound(graph, analysis.clusters, analysis.units, scale, in_flight, reached=bottleneck)
    reordered = sum(bool(stage_of[graph.rank[u]] > stage_of[graph.rank[w]]) for u, w in graph.gradient_order())
    note = f"{reordered} gradient sums in another order than in one process" if reordered else ""
    objective = _plan_objective(memory_weight, bottleneck, bound, "manual", note)
    return _plan_of_stages(analysis, stage_of, scale, in_flight, placement, schedule, objective, resident, actions)


def _check_settings(
    num_stages: int, memory_weight: float, in_flight: Sequence[int], placement: Sequence[int] | None
) -> None:
    if num_stages < 1:
        raise PartitionError(f"expected at least 1 stage, found {num_stages}")
    if not 0.0 <= memory_weight <= 1.0:
        raise PartitionError(f"expected memory_weight between 0 and 1, found {memory_weight}")
    for name, values in (("in_flight", in_flight), ("placement", placement)):
        if values is not None and (len(values) != num_stages or min(values) < 0):
            raise PartitionError(
                f"expected {name} to be {num_stages} numbers from 0 up, one for each stage, found {tuple(values)}"
            )


def with_bound(plan: Plan, proven: float) -> Plan:
    """The plan, with the lower bound of another one of the same problem."""
    objective, proven = plan.objective, min(proven, plan.objective.bottleneck)
    gap = relative_gap(objective.bottleneck, proven)
    return replace(plan, objective=replace(objective, lower_bound=proven, gap=gap))


def _plan_objective(
    memory_weight: float, bottleneck: float, bound: float, solver: str, note: str, limit: int = 0
) -> Objective:
    """What a plan says of its objective and its proof."""
    proven = min(bound, bottleneck)
    return Objective(memory_weight, bottleneck, proven, relative_gap(bottleneck, proven), solver, note, limit)


def _is_away(resident: Sequence[Resident] | None, in_flight: Sequence[int]) -> bool:
    """Whether anything is offloaded."""
    return resident is not None and any(here.most < count for here, count in zip(resident, in_flight, strict=True))


def _plan_of_stages(
    analysis: Analysis,
    stage_of: IntArray,
    scale: Scale,
    in_flight: Sequence[int],
    placement: Sequence[int] | None,
    schedule: ScheduleSummary,
    objective: Objective,
    resident: Sequence[Resident] | None = None,
    actions: Sequence[ActionUse] | None = None,
) -> Plan:
    """The plan of an assignment of units to stages."""
    graph, num_stages = analysis.graph, len(in_flight)
    check_stages(graph, analysis.clusters, stage_of, num_stages)
    crossing = find_crossing(graph, analysis.recomputable, stage_of, num_stages)
    active = active_regions(graph, analysis.checkpoints.regions, stage_of, crossing.recomputed)
    costs = stage_costs(analysis.units, scale, in_flight, stage_of.tolist()).tolist()
    ranks = tuple(range(num_stages)) if placement is None else tuple(placement)
    nodes, trace = graph.trace.nodes, graph.trace
    actions = None if _is_away(resident, in_flight) else actions  # what is away counts as if backwards had one part
    uses = _stage_uses(
        graph, stage_of, crossing, active, ranks, in_flight, schedule.num_microbatches, resident, actions
    )
    memories = _memories(analysis, crossing, uses)
    made = (_plan_stage(analysis, stage_of, crossing, use, memories[use.index], costs[use.index]) for use in uses)
    stages = tuple(replace(stage, num_in_flight=in_flight[stage.index]) for stage in made)
    shared = tuple(
        SharedParameter(state.name, holders)
        for i, state in enumerate(trace.state)
        if state.is_parameter and len(holders := tuple(s for s in range(num_stages) if i in crossing.state[s])) > 1
    )
    return Plan(
        trace.model_class,
        num_stages,
        stages,
        crossing.edges,
        shared,
        objective,
        schedule,
        tuple((nodes[i].name, int(s)) for i, s in zip(graph.compute.tolist(), stage_of.tolist(), strict=True)),
        trace.fingerprint,
        device=analysis.cost_model.device,
        optimizer=analysis.cost_model.optimizer.name,
        notes=analysis.checkpoints.notes,
        split_checkpoints=active.split,
    )


def _stage_uses(
    graph: Graph,
    stage_of: IntArray,
    crossing: Crossing,
    active: ActiveRegions,
    ranks: tuple[int, ...],
    in_flight: Sequence[int],
    num_microbatches: int,
    resident: Sequence[Resident] | None,
    actions: Sequence[ActionUse] | None,
) -> list[StageUse]:
    """By stage, what it runs and holds."""
    state = graph.trace.state
    by_rank = {(rank, i) for rank, found in zip(ranks, crossing.state, strict=True) for i in found}
    number_of_holders = Counter(i for _, i in sorted(by_rank) if state[i].is_parameter)
    before_backward = in_flight if actions is None else [use.before_backward for use in actions]
    return [
        StageUse(
            s,
            tuple(sorted((*graph.compute[stage_of == s].tolist(), *crossing.recomputed[s]))),
            crossing.state[s],
            tuple(before_backward),
            ranks,
            max(num_microbatches, in_flight[s]),
            s == len(ranks) - 1,
            s == ranks.index(0),
            {i: number for i, number in number_of_holders.items() if number > 1},
            active.by_stage[s],
            None if resident is None else resident[s],
            None if actions is None else actions[s],
        )
        for s in range(len(ranks))
    ]


def _memories(analysis: Analysis, crossing: Crossing, uses: Sequence[StageUse]) -> dict[int, StageMemory]:
    """By stage, its bytes; of several on a rank, those at the rank's peak."""
    graph, costs = analysis.graph, analysis.cost_model
    found: dict[int, StageMemory] = {}
    for use in map(_once_on_a_rank(), uses):
        there = {index: memory.kept for index, memory in found.items() if use.ranks[index] == use.ranks[use.index]}
        found[use.index] = stage_memory(graph, costs, replace(use, kept_before=there), crossing.edges)
    for rank in sorted({use.ranks[use.index] for use in uses}):
        own = [use for use in uses if use.ranks[use.index] == rank]
        state = distinct_state(graph.trace, sorted({i for use in own for i in use.state}))
        update = costs.optimizer_scratch(spec for spec in state if spec.is_parameter)
        found |= on_one_rank({use.index: found[use.index] for use in own}, update)
    return found


def _once_on_a_rank() -> Callable[[StageUse], StageUse]:
    """Leaves what an earlier stage of its rank holds out of a stage's state: there is one of it."""
    seen: dict[int, set[int]] = {}

    def left(use: StageUse) -> StageUse:
        there = seen.setdefault(use.ranks[use.index], set())
        own = tuple(i for i in use.state if i not in there)
        there.update(own)
        return use if len(own) == len(use.state) else replace(use, state=own)

    return left


def _plan_stage(
    analysis: Analysis,
    stage_of: IntArray,
    crossing: Crossing,
    use: StageUse,
    memory: StageMemory,
    cost: float,
) -> Stage:
    """What a plan says of one stage."""
    graph, trace = analysis.graph, analysis.graph.trace
    index, state, positions = use.index, use.state, list(use.positions)
    again = crossing.recomputed[index]
    times, reruns = analysis.times_once, recompute_depths(use.regions)
    recompute_time = float(sum(reruns.get(i, 0) * times.forward[i] for i in positions))
    kernels = analysis.cost_model.kernels
    return Stage(
        index=index,
        rank=use.ranks[index],
        modules=largest_whole_calls(graph, stage_of, index),
        parameters=tuple(trace.state[i].name for i in state if trace.state[i].is_parameter),
        buffers=tuple(trace.state[i].name for i in state if not trace.state[i].is_parameter),
        recomputed=tuple(trace.nodes[i].name for i in again),
        num_parameters=memory.num_parameters,
        parameter_bytes=memory.parameter_bytes,
        gradient_bytes=memory.gradient_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        activation_bytes_per_microbatch=memory.activation_bytes,
        num_in_flight=use.num_in_flight,
        peak_memory_bytes=memory.peak_bytes,
        forward_flops=sum(trace.nodes[i].flops for i in positions),
        forward_time=float(times.forward[positions].sum()) + kernels.action,
        backward_time=float(times.backward[positions].sum()) + recompute_time + kernels.action,
        cost=cost,
        buffer_bytes=memory.buffer_bytes,
        communication_bytes=memory.communication_bytes,
        transient_bytes=memory.transient_bytes,
        checkpoints=use.regions,
        recompute_time=recompute_time,
        offloaded_bytes_per_microbatch=memory.offloaded_bytes,
        deferred_bytes_per_microbatch=memory.deferred_bytes,
        in_flight_bytes=memory.in_flight_bytes,
        weight_time=weight_time(trace, positions, times.backward, use.regions),
        split_time=deferred_time(trace, positions, kernels, use.regions) + kernels.action,
    )


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
    limits: tuple[int, ...] = ()  # by stage, the limit of its rank, if they differ; `limit` is the largest
    prove: bool = True  # without, the contiguous plan will do
    resident: tuple[Resident, ...] | None = None  # by stage, with offloading


class _Scaled(PeakRows):
    """Peaks as if every rank had the largest of the limits: a rank with half of it counts twice."""

    def __init__(self, peaks: PeakRows, limits: Sequence[int]) -> None:
        vars(self).update(vars(peaks))
        self.limits = limits

    def row(self, start: int, stop: int, stage: int) -> IntArray:
        """Peak of start..j for each j, scaled."""
        return _scaled_to_limit(super().row(start, stop, stage), self.limits[stage], max(self.limits))


def _scaled_to_limit(num_bytes: IntArray, limit: int, largest: int) -> IntArray:
    """A rank's bytes, scaled to the rank with the largest limit and rounded up: no more than that limit if and only if they fit."""
    if limit >= largest:
        return num_bytes
    found = np.minimum(np.ceil(num_bytes * (largest / limit)), float(LARGEST // 2)).astype(np.int64)
    scaled: IntArray = np.where(num_bytes <= limit, np.minimum(found, largest), np.maximum(found, largest + 1))
    return scaled


def rank_peaks(plan: Plan, limits: Sequence[int] = ()) -> dict[int, int]:
    """Predicted peak bytes of each rank; a bound where a rank runs several stages of which something is offloaded.

    With `limits`, by stage: in bytes of the rank with the largest limit.
    """
    peaks: dict[int, int] = {}
    for stage in plan.stages:
        peaks[stage.rank] = peaks.get(stage.rank, 0) + stage.peak_memory_bytes
    if not limits:
        return peaks
    own = {stage.rank: limit for stage, limit in zip(plan.stages, limits, strict=True)}
    return {rank: int(_scaled_to_limit(np.asarray(peak), own[rank], max(limits))) for rank, peak in peaks.items()}


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
        problem.resident,
    )
    if problem.limits:
        peaks = _Scaled(peaks, problem.limits)
    chain = _limited_chain(problem, peaks, problem.in_flight)
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
        placed = _plan_of_ilp(problem, peaks)
        if placed is not None and (best is None or _solution_improves(placed, best, problem.tolerance)):
            best = placed
    if best is not None:
        return best
    solution, _, is_least = least_peak(chain)
    plan = problem.make(
        solution.assignment(analysis.graph.num_compute), "chain", "the least memory that a contiguous cut takes"
    )
    least = max(rank_peaks(plan, problem.limits).values())
    if least <= problem.limit:
        return plan
    least = min(least, problem.unlimited_peak)
    is_least = is_least and problem.stages_per_rank == 1  # proven for the largest stage, not for the fullest rank
    raise MemoryLimitError(_no_plan_fits(problem, peaks, least, is_least), least, is_least=is_least)


def _limited_chain(problem: Limited, peaks: PeakRows, in_flight: Sequence[int]) -> LimitedChain:
    """The problem as a chain, with peaks of memory."""
    analysis = problem.analysis
    speeds = problem.scale.speeds if len(in_flight) == len(problem.in_flight) else ()
    scale = Scale.of(analysis.units, in_flight, problem.scale.memory_weight, speeds)
    chain = chain_problem(analysis.graph, analysis.clusters, analysis.recomputable, analysis.units, scale, in_flight)
    return LimitedChain.of(chain, peaks, len(in_flight))


def _solution_improves(plan: Plan, other: Plan, tolerance: float) -> bool:
    return plan.objective.bottleneck < other.objective.bottleneck * (1.0 - tolerance)


def _plan_of_ilp(problem: Limited, peaks: PeakRows) -> Plan | None:
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


def _no_plan_fits(problem: Limited, peaks: PeakRows, least: int, is_least: bool) -> str:
    """The text of the error if no plan is within the memory limit. `is_least`: it is proven that no contiguous cut needs less."""
    num_stages = len(problem.in_flight)
    if problem.limits:
        return (
            f"expected a plan within the limits of its ranks for {num_stages} stages, found none: with "
            f"{least / problem.limit:.3f} times the memory on every rank there would be one; raise memory_limit, use other devices or "
            "more of them, or make microbatches smaller"
        )
    text = (
        f"expected a plan within {at_least(problem.limit)} for each rank, found none with {num_stages} stages: the least "
        f"that {'would' if is_least else 'is known to'} do is {at_least(least)}"
    )
    if problem.in_flight_of is None:
        return f"{text}; raise memory_limit, use more stages, or fewer microbatches in flight"
    fewest, is_fewest = _fewest_stages(problem, peaks)
    if fewest is None:
        found = f"no number of stages up to {_MAX_STAGES} {'would' if is_fewest else 'is known to'} do"
    else:
        found = f"the fewest stages that {'would' if is_fewest else 'are known to'} do are {fewest}"
    text += f", and within this limit {found}"
    return f"{text}; raise memory_limit, change the number of stages, or make microbatches smaller"


def _fewest_stages(problem: Limited, peaks: PeakRows) -> tuple[int | None, bool]:
    """The fewest stages, one on each rank, with which a contiguous partition stays within the limit, and whether fewer are ruled out."""
    assert problem.in_flight_of is not None, "the schedule of other numbers of stages is known"
    is_fewest = True
    for num_stages in range(1, min(_MAX_STAGES, problem.analysis.graph.num_modules()) + 1):
        in_flight = problem.in_flight_of(num_stages)
        if in_flight is None:
            continue
        try:
            chain = _limited_chain(problem, peaks.scheduled(in_flight), in_flight)
        except PartitionError:  # fewer pieces than stages
            break
        found = fits(chain, problem.limit)
        if found:
            return num_stages, is_fewest
        is_fewest = is_fewest and found is not None
    return None, is_fewest
