"""The planner: from a trace to a plan.

`solve_partition` cuts the chain of all operations exactly (`chain`), within 1% of the best bottleneck so that whole
modules stay together. If the proven lower bound leaves more than that 1% open, all placements that sum every gradient in
eager's order are searched (`placing`), and if that does not close the gap either and the model is not a chain (branches),
the integer program (`ilp`) looks for a better placement of coarse units.
`plan_from_assignment` makes the plan of a given assignment.

What a plan's objective says
    bottleneck      the largest stage cost, as defined in `smpc.partitioner.problem`
    lower_bound     no assignment of the nodes to this many stages, contiguous or not, has a smaller bottleneck (`bound`); of
                    those that leave small checkpointed regions whole, if there are any
    gap             bottleneck / lower_bound - 1; infinite where nothing but a bound of 0 is known, as of a plan made without proof
    note            the optimum over contiguous partitions, which is exact, and any solver limit that was hit

Example: two stages, 1F1B, at most two microbatches in flight on stage 0 and one on stage 1:

    plan = solve_partition(trace, num_stages=2, in_flight=(2, 1))
    plan.stages[0].modules     # ('transformer.wte', 'transformer.wpe', 'transformer.drop', 'transformer.h.0')
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from smpc.errors import PartitionError
from smpc.partitioner.analysis import Analysis, analyse, keep_regions_whole
from smpc.partitioner.costs.cost import CostModel, NodeTimes, weight_time
from smpc.partitioner.graph.clusters import condense
from smpc.partitioner.graph.edges import Crossing, check_stages, find_crossing, stages_by_rank
from smpc.partitioner.graph.plan import Objective, Plan, ScheduleSummary, SharedParameter, Stage
from smpc.partitioner.graph.recompute import active_regions, depths
from smpc.partitioner.graph.trace_graph import largest_whole_calls
from smpc.partitioner.memory.peak import StageUse, stage_memory
from smpc.partitioner.memory_limit import InFlight, Limited, MakePlan, plan_within, rank_peaks
from smpc.partitioner.problem import IntArray, Scale, relative_gap, stage_costs
from smpc.partitioner.solvers.bound import lower_bound
from smpc.partitioner.solvers.chain import ChainSolution, solve_chain
from smpc.partitioner.solvers.coarsen import chain_problem
from smpc.partitioner.solvers.lattice import Placed, place
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
    resident: Sequence[int] | None = None,
    prove: bool = True,
    speeds: Sequence[float] = (),
    limits: Sequence[int] = (),
) -> Plan:
    """The best plan found, with proof of how good it is.

    in_flight: microbatches that each stage holds at the peak of the schedule. placement: the pipeline rank of each
    stage; stage i on rank i if None. times: those measured,
    if any. memory_limit: most bytes at the predicted peak of a rank (see `smpc.partitioner.memory_limit`);
    in_flight_of gives `in_flight` for other numbers of stages, to say how many would do. recompute: names of modules to checkpoint.
    resident: of the microbatches in flight, those whose activations are not offloaded; None: all. prove: without, the best contiguous
    plan is taken, and nothing is said of others, which is much quicker. speeds, limits: of the stages' devices, relative to the cost
    model's, and most bytes at the peak of a rank that runs the stage, instead of `memory_limit`, if they differ. Raises
    PartitionError for more stages than modules, for settings out of range, and when no plan is within the limit.
    """
    _check_settings(num_stages, memory_weight, in_flight, placement)
    if memory_limit is not None and memory_limit < 1:
        raise PartitionError(f"expected a memory limit of at least 1 byte, found {memory_limit}")
    analysis = _analysed(analyse(trace, cost_model or CostModel(), times, recompute), num_stages)
    scale = Scale.of(analysis.units, in_flight, memory_weight, speeds)
    chain = chain_problem(analysis.graph, analysis.clusters, analysis.recomputable, analysis.units, scale, in_flight)
    contiguous = solve_chain(chain, num_stages, TOLERANCE)
    bound = math.inf
    if prove:
        bound = lower_bound(
            analysis.graph, analysis.clusters, analysis.units, scale, in_flight, reached=contiguous.optimum
        )
    if contiguous.optimum <= bound * _MOST_ABOVE < contiguous.bottleneck:
        contiguous = solve_chain(chain, num_stages, bound * _MOST_ABOVE / contiguous.optimum - 1.0)
    limit = max(limits, default=memory_limit or 0)

    def make(stage_of: Sequence[int], solver: str, note: str) -> Plan:
        bottleneck = float(stage_costs(analysis.units, scale, in_flight, stage_of).max())
        proven = bound if prove or num_stages == 1 else 0.0
        objective = _objective(memory_weight, bottleneck, proven, solver, note, limit)
        return _plan(analysis, np.asarray(stage_of), scale, in_flight, placement, schedule, objective, resident)

    plan = _unlimited(analysis, scale, in_flight, contiguous, bound, make)
    peak = max(rank_peaks(plan, limits).values())
    if not limit or peak <= limit:
        return plan
    stages_per_rank = 1 if placement is None else max(Counter(placement).values())
    bounds = (schedule.num_microbatches, limit, stages_per_rank, TOLERANCE, MAX_COARSE_UNITS, peak)
    return plan_within(Limited(analysis, scale, tuple(in_flight), *bounds, make, in_flight_of, tuple(limits), prove))


def _analysed(analysis: Analysis, num_stages: int) -> Analysis:
    """With whole regions for so many stages. PartitionError if there are fewer modules."""
    num_modules = analysis.graph.num_modules()
    if num_stages > num_modules:
        raise PartitionError(
            f"expected at most as many stages as modules, found {num_stages} stages and {num_modules} modules in "
            f"{analysis.graph.trace.model_class}: lower the pipeline parallel degree"
        )
    return keep_regions_whole(analysis, num_stages)


def _unlimited(
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
    resident: Sequence[int] | None = None,
) -> Plan:
    """The plan of a given assignment (node name -> stage, for every node that computes).

    Raises PartitionError if it cannot run: see `smpc.partitioner.graph.edges.check_assignment`.
    """
    _check_settings(num_stages, memory_weight, in_flight, placement)
    analysis = analyse(trace, cost_model or CostModel(), times, recompute)
    graph = analysis.graph
    stage_of = stages_by_rank(graph, assignment)
    check_stages(graph, analysis.clusters, stage_of, num_stages)
    scale = Scale.of(analysis.units, in_flight, memory_weight)
    bottleneck = float(stage_costs(analysis.units, scale, in_flight, stage_of.tolist()).max())
    bound = lower_bound(graph, analysis.clusters, analysis.units, scale, in_flight, reached=bottleneck)
    reordered = sum(bool(stage_of[graph.rank[u]] > stage_of[graph.rank[w]]) for u, w in graph.gradient_order())
    note = f"{reordered} gradient sums in another order than in one process" if reordered else ""
    objective = _objective(memory_weight, bottleneck, bound, "manual", note)
    return _plan(analysis, stage_of, scale, in_flight, placement, schedule, objective, resident)


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


def _objective(
    memory_weight: float, bottleneck: float, bound: float, solver: str, note: str, limit: int = 0
) -> Objective:
    proven = min(bound, bottleneck)
    return Objective(memory_weight, bottleneck, proven, relative_gap(bottleneck, proven), solver, note, limit)


def _plan(
    analysis: Analysis,
    stage_of: IntArray,
    scale: Scale,
    in_flight: Sequence[int],
    placement: Sequence[int] | None,
    schedule: ScheduleSummary,
    objective: Objective,
    resident: Sequence[int] | None = None,
) -> Plan:
    graph, num_stages = analysis.graph, len(in_flight)
    check_stages(graph, analysis.clusters, stage_of, num_stages)
    crossing = find_crossing(graph, analysis.recomputable, stage_of, num_stages)
    active = active_regions(graph, analysis.checkpoints.regions, stage_of, crossing.recomputed)
    costs = stage_costs(analysis.units, scale, in_flight, stage_of.tolist()).tolist()
    ranks = tuple(range(num_stages)) if placement is None else tuple(placement)
    nodes, trace = graph.trace.nodes, graph.trace
    number_of_holders = Counter(i for found in crossing.state for i in found if trace.state[i].is_parameter)
    uses = [
        StageUse(
            s,
            tuple(sorted((*graph.compute[stage_of == s].tolist(), *crossing.recomputed[s]))),
            crossing.state[s],
            tuple(in_flight),
            ranks,
            max(schedule.num_microbatches, in_flight[s]),
            s == num_stages - 1,
            s == ranks.index(0),
            {i: number for i, number in number_of_holders.items() if number > 1},
            active.by_stage[s],
            None if resident is None else resident[s],
        )
        for s in range(num_stages)
    ]
    stages = tuple(_stage(analysis, stage_of, crossing, use, ranks[use.index], costs[use.index]) for use in uses)
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


def _stage(
    analysis: Analysis,
    stage_of: IntArray,
    crossing: Crossing,
    use: StageUse,
    rank: int,
    cost: float,
) -> Stage:
    graph, trace = analysis.graph, analysis.graph.trace
    index, state, positions = use.index, use.state, list(use.positions)
    again = crossing.recomputed[index]
    memory = stage_memory(graph, analysis.cost_model, use, crossing.edges)
    times, reruns = analysis.times_once, depths(use.regions)
    recompute_time = float(sum(reruns.get(i, 0) * times.forward[i] for i in positions))
    return Stage(
        index=index,
        rank=rank,
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
        forward_time=float(times.forward[positions].sum()),
        backward_time=float(times.backward[positions].sum()) + recompute_time,
        cost=cost,
        buffer_bytes=memory.buffer_bytes,
        communication_bytes=memory.communication_bytes,
        transient_bytes=memory.transient_bytes,
        checkpoints=use.regions,
        recompute_time=recompute_time,
        offloaded_bytes_per_microbatch=memory.offloaded_bytes,
        weight_time=weight_time(trace, positions, times.backward, use.regions),
    )
