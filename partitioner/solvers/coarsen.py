"""From a trace to the solvers' numbers: units, their shared items, and the cost of cuts.

For the chain solver every compute node is a unit and cuts inside a cluster's range are forbidden, so its optimum is
exact at the finest granularity there is. The cost of a cut before node p:

    depth   module calls that the cut breaks: those with compute nodes on both sides. Cuts between whole modules win
    bytes   values made before p and used at or after it (the model's outputs are used at the end), recomputable ones
            left out

For the integer program the module tree gives coarse units: starting from the model itself, the costliest call is opened
(into the calls inside it and the runs of nodes between them) until none costs more than a small part of a stage, or there
are `max_units`. Units that a cluster joins, or that depend on each other in a circle, become one. Units that read the same
differentiable value keep their order, so that gradients are summed as in one process, bit for bit.

Shared items: a parameter or buffer (with gradient and optimizer state) is held once by each stage that uses it, an
activation storage once by each stage whose nodes save it.

`analyse` finds out, once, everything about a trace that does not depend on the stage of a node.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from smpc.partitioner.costs.node_costs import CostModel, NodeTimes, node_times
from smpc.partitioner.graph.recompute_regions import (
    RequestedRegions,
    find_recomputable,
    recompute_depths,
    requested_regions,
    with_regions,
)
from smpc.partitioner.graph.trace_graph import Clusters, Graph, build_graph, condense, find_clusters
from smpc.partitioner.memory.peak import state_bytes
from smpc.partitioner.solvers.chain import ChainProblem, solve_chain
from smpc.partitioner.solvers.ilp import PlacementProblem, Value
from smpc.partitioner.stage_costs import FloatArray, IntArray, Scale, SharedItem, Units, check_total, stage_costs
from smpc.tracer.ir import StateSpec, Trace

_PIECES_PER_STAGE = 4  # a unit of the integer program should cost at most this part of a stage


def node_units(graph: Graph, times: NodeTimes, cost_model: CostModel) -> Units:
    """One unit for each compute node, by rank."""
    trace, n = graph.trace, graph.num_compute
    static, activation = [0] * n, [0] * n
    shared: list[SharedItem] = []
    for users, num_bytes in state_items(graph, lambda state: state_bytes(state, cost_model)):
        if len(users) == 1:
            static[users[0]] += num_bytes
        else:
            shared.append(SharedItem(users, static_bytes=num_bytes))
    savers: dict[int, list[int]] = {}
    for rank, position in enumerate(graph.compute.tolist()):
        for storage in graph.saved[position]:
            savers.setdefault(storage, []).append(rank)
    state_storages = {state.storage for state in trace.state}
    for storage, ranks in savers.items():
        if storage in state_storages:
            continue
        if len(ranks) == 1:
            activation[ranks[0]] += trace.storages[storage]
        else:
            shared.append(SharedItem(tuple(ranks), activation_bytes=trace.storages[storage]))
    time = times.whole()[graph.compute]
    return Units(tuple(time.tolist()), tuple(static), tuple(activation), tuple(shared))


def state_items(graph: Graph, num_bytes: Callable[[StateSpec], int]) -> list[tuple[tuple[int, ...], int]]:
    """Users (ranks) and bytes of each piece of state memory; `num_bytes` says what counts."""
    users: dict[tuple[int, int], set[int]] = {}
    size: dict[tuple[int, int], int] = {}
    for i, (state, positions) in enumerate(zip(graph.trace.state, graph.state_users, strict=True)):
        key = (state.storage, -1 if state.storage >= 0 else i)
        users.setdefault(key, set()).update(graph.rank[list(positions)].tolist())
        size.setdefault(key, num_bytes(state))
    return [(tuple(sorted(found)), size[key]) for key, found in users.items() if found]


def chain_problem(
    graph: Graph,
    clusters: Clusters,
    recomputable: Mapping[int, tuple[int, ...]],
    units: Units,
    scale: Scale,
    in_flight: Sequence[int],
) -> ChainProblem:
    """The chain of all compute nodes in execution order."""
    n = graph.num_compute
    broken, inside, crossing = np.zeros((3, n + 1), dtype=np.int64)
    for first, last in graph.call_spans.tolist():
        if last - first > 1:
            broken[first + 1] += 1
            broken[last] -= 1
    for members in clusters.members:
        ranks = graph.rank[list(members)]
        inside[ranks.min() + 1] += 1
        inside[ranks.max() + 1] -= 1
    for position, num_bytes in _crossing_values(graph, recomputable):
        last = n - 1 if position in graph.outputs else max(graph.rank[list(graph.consumers[position])])
        crossing[graph.rank[position] + 1] += num_bytes
        crossing[last + 1] -= num_bytes
    depth, num_open, num_bytes_at = (np.cumsum(column)[:n] for column in (broken, inside, crossing))
    return ChainProblem(
        units,
        scale,
        tuple(in_flight),
        tuple(depth.tolist()),
        tuple(num_bytes_at.tolist()),
        tuple(np.flatnonzero(num_open > 0).tolist()),
    )


def _crossing_values(graph: Graph, recomputable: Mapping[int, tuple[int, ...]]) -> list[tuple[int, int]]:
    """Position and bytes of each value that is sent when its users are elsewhere."""
    outputs = set(graph.outputs)
    return [
        (position, spec.num_bytes)
        for position in graph.compute.tolist()
        if (spec := graph.trace.nodes[position].spec) is not None
        and position not in recomputable
        and (graph.consumers[position] or position in outputs)
    ]


@dataclass(frozen=True)
class CoarseProblem:
    """A placement problem on coarse units, and how to read its solution."""

    problem: PlacementProblem
    unit_of: tuple[int, ...]  # by rank
    start: tuple[int, ...]  # a placement to start from: the best contiguous one; empty if there are too few units
    is_ordered: bool  # every two units that cost something depend on each other, so the chain is the only order


def coarse_problem(
    graph: Graph,
    clusters: Clusters,
    recomputable: Mapping[int, tuple[int, ...]],
    units: Units,
    scale: Scale,
    in_flight: Sequence[int],
    max_units: int,
) -> CoarseProblem:
    """At most about `max_units` units for the integer program."""
    pieces = _open_calls(graph, units, scale, in_flight, max_units)
    labels, dag = condense(graph, clusters, pieces, graph.gradient_order())
    merged = units.merged(labels, dag.number_of_nodes())
    values: dict[tuple[int, tuple[int, ...]], int] = {}
    for position, num_bytes in _crossing_values(graph, recomputable):
        producer = labels[graph.rank[position]]
        users = {labels[graph.rank[i]] for i in graph.consumers[position]} - {producer}
        if users:
            key = (producer, tuple(sorted(users)))
            values[key] = values.get(key, 0) + num_bytes
    problem = PlacementProblem(
        merged,
        scale,
        tuple(in_flight),
        tuple(sorted(nx.transitive_reduction(dag).edges)),
        tuple(Value(producer, users, num_bytes) for (producer, users), num_bytes in sorted(values.items())),
    )
    start = _contiguous_coarse(problem, list(nx.lexicographical_topological_sort(dag)))
    return CoarseProblem(problem, tuple(labels), start, _is_ordered(dag, merged, scale))


def _contiguous_coarse(problem: PlacementProblem, order: list[int]) -> tuple[int, ...]:
    """The best placement in which the stages are intervals of this order."""
    if len(order) < len(problem.in_flight):
        return ()
    chain = ChainProblem(problem.units.subset(order), problem.scale, problem.in_flight)
    stages = solve_chain(chain, len(problem.in_flight)).assignment(len(order))
    placed = dict(zip(order, stages, strict=True))
    return tuple(placed[unit] for unit in range(len(order)))


def _open_calls(graph: Graph, units: Units, scale: Scale, in_flight: Sequence[int], max_units: int) -> IntArray:
    """Piece of each rank."""
    spans = graph.call_spans.tolist()
    children: dict[int, list[int]] = {}
    for i, call in enumerate(graph.trace.calls):
        if spans[i][1] > spans[i][0]:
            children.setdefault(call.parent, []).append(i)
    weight = np.concatenate(([0.0], np.cumsum(_rank_costs(units, scale, in_flight))))
    small = weight[-1] / (len(in_flight) * _PIECES_PER_STAGE)
    pieces = np.zeros(graph.num_compute, dtype=np.int64)
    queue = [(-float(weight[-1]), i) for i in children.get(-1, [])]
    num_pieces = next_label = 1
    while queue and num_pieces < max_units:
        negative, index = heapq.heappop(queue)
        if -negative <= small:
            break
        first, last = spans[index]
        inner = children.get(index, [])
        starts = (
            sorted({first, *(bound for i in inner for bound in spans[i])} - {last}) if inner else [*range(first, last)]
        )
        room = max_units - num_pieces + 1
        starts = starts[:: -(-len(starts) // room)]  # too many: join neighbours
        parts = tuple(itertools.pairwise((*starts, last)))
        for label, (start, stop) in enumerate(parts, next_label):
            pieces[start:stop] = label
        next_label += len(parts)
        num_pieces += len(parts) - 1
        for i in inner:
            if tuple(spans[i]) in parts:
                heapq.heappush(queue, (-float(weight[spans[i][1]] - weight[spans[i][0]]), i))
    return pieces


def _rank_costs(units: Units, scale: Scale, in_flight: Sequence[int]) -> FloatArray:
    """About what each unit adds to a stage; shared items count with their first user."""
    static, activation = np.asarray(units.static_bytes), np.asarray(units.activation_bytes)
    for item in units.shared:
        static[item.users[0]] += item.static_bytes
        activation[item.users[0]] += item.activation_bytes
    return scale.cost(np.asarray(units.time), static + max(in_flight) * activation)


def _is_ordered(dag: nx.DiGraph[int], units: Units, scale: Scale) -> bool:
    """Whether the units that cost something form a chain."""
    alike = replace(scale, speeds=(), limits=())  # a stage for each unit here
    costs = stage_costs(units, alike, (1,) * len(units), range(len(units)))
    order = [unit for unit in nx.lexicographical_topological_sort(dag) if costs[unit] > 1e-6 * costs.sum()]
    reachable = nx.transitive_closure_dag(dag)
    return all(reachable.has_edge(u, w) for u, w in itertools.pairwise(order))


@dataclass(frozen=True)
class Analysis:
    """A trace in index form, with its costs."""

    graph: Graph
    clusters: Clusters
    times: NodeTimes  # a backward includes the forwards that are run again for it
    times_once: NodeTimes  # it does not
    recomputable: dict[int, tuple[int, ...]]
    units: Units  # one for each compute node, by rank
    cost_model: CostModel
    checkpoints: RequestedRegions


def analyse(
    trace: Trace, cost_model: CostModel, times: NodeTimes | None = None, recompute: Sequence[str] = ()
) -> Analysis:
    """Index the trace and cost its nodes; `times` are measured ones, if there are any. `recompute`: names of modules to checkpoint."""
    wanted = tuple(recompute)
    requested, graph, clusters = trace.remembered((_index_to_coarsen, wanted), lambda: _index_to_coarsen(trace, wanted))
    once = times or node_times(trace, cost_model)
    graph = replace(graph, workspace=once.workspace)
    times = once.with_reruns(recompute_depths(requested.regions))
    recomputable = find_recomputable(graph, clusters, cost_model)
    units = node_units(graph, times, cost_model)
    return Analysis(graph, clusters, times, once, recomputable, units, cost_model, requested)


def _index_to_coarsen(trace: Trace, recompute: tuple[str, ...]) -> tuple[RequestedRegions, Graph, Clusters]:
    """The part that depends on no cost."""
    _check_bytes(trace)
    requested = requested_regions(trace, recompute)
    graph = with_regions(build_graph(trace), requested.regions)
    return requested, graph, find_clusters(graph)


def _check_bytes(trace: Trace) -> None:
    """PartitionError if the bytes of one microbatch cannot be added up exactly: all its storages, and four times all values and state.

    While one node works, a value has at most two gradients and their sum, and a parameter one gradient.
    """
    specs = [node.spec for node in trace.nodes if node.spec is not None] + [state.spec for state in trace.state]
    total = sum(trace.storages) + 4 * sum(spec.num_bytes for spec in specs)
    check_total(total, "bytes of values and gradients of one microbatch", "make microbatches smaller")


def keep_regions_whole(analysis: Analysis, num_stages: int) -> Analysis:
    """The analysis with nodes of a checkpointed region in one cluster, where the region takes no more than a stage's share of the time.

    A region that a cut goes through is not checkpointed. Without change if that leaves fewer pieces than stages.
    """
    graph, time = analysis.graph, analysis.units.time
    share, end = sum(time) / num_stages, 0
    joined: nx.Graph[int] = nx.Graph()
    for members in analysis.clusters.members:
        nx.add_path(joined, members)
    inside = np.zeros(graph.num_compute + 1, dtype=np.int64)
    for region in analysis.checkpoints.regions:
        positions = [i for i in range(region.first, region.last) if graph.is_compute(i)]
        ranks = graph.rank[positions]
        if region.first < end or len(positions) < 2 or sum(time[rank] for rank in ranks.tolist()) > share:
            continue
        end = region.last
        nx.add_path(joined, positions)
    groups = sorted(tuple(sorted(found)) for found in nx.connected_components(joined))
    for group in groups:
        ranks = graph.rank[list(group)]
        inside[ranks.min() + 1] += 1
        inside[ranks.max() + 1] -= 1
    if np.count_nonzero(np.cumsum(inside)[:-1] == 0) < num_stages:
        return analysis
    return replace(analysis, clusters=replace(analysis.clusters, members=tuple(groups)))
