"""A lower bound on the bottleneck of any plan, contiguous in execution order or not.

For weights v[s] >= 0 that sum to 1, the largest stage cost of a plan is at least sum of v[s] * cost(s), hence at
least the minimum of that sum over everything that might be a plan:

    bound(v) = min over placements of sum over s of v[s] * cost(s)

A placement must keep the order that every plan keeps. A waist is a node that all core nodes before it reach and that
reaches all core nodes after it (the residual additions of a transformer); the core are the nodes between the first
costly node and the last. Waists cut the core into segments, and each segment runs on the stages between its two waists'
stages. Inside a segment the bound may place time, static bytes and activations as it likes; so may it with nodes
outside the core. A shared item counts once, in the segment of its first user. All of this only lowers the bound, so it
holds for every plan. The minimum is a dynamic program over (segment, stage); v is improved by multiplicative weights,
starting where moving an average unit to the next stage changes nothing.

Three more bounds are taken into account. The units on one path of the graph keep their order in every plan, so the exact optimum
of the chain of the heaviest path alone, empty stages allowed, is a bound; if all costly units are on one path it is the optimum
itself. A cluster costs something on whatever stage it runs. And where these stay more than `_CLOSE` below a known plan, all
placements of the graph are searched (`smpc.partitioner.solvers.prefix_lattice`), which sees that units are not divisible; it needs a
bottleneck to start from.

Devices: of different speeds, the simple bounds take the fastest for all; limits count in the heaviest path and the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import networkx as nx
import numpy as np

from smpc.partitioner.graph.trace_graph import Clusters, Graph, condense
from smpc.partitioner.solvers.chain import relaxed_optimum
from smpc.partitioner.solvers.prefix_lattice import best_chain, build_lattice
from smpc.partitioner.stage_costs import FloatArray, IntArray, Scale, Units, heaviest_path, own_costs

_ROUNDS = 40
_MAX_SEGMENTS = 500  # more are joined with their neighbours, which lowers the bound a little
_CLOSE = 0.002  # simple bounds suffice
_ROUNDING = 1e-9  # floating point arithmetic of the bound itself


def lower_bound(
    graph: Graph,
    clusters: Clusters,
    units: Units,
    scale: Scale,
    in_flight: Sequence[int],
    reached: float = math.inf,
) -> float:
    """No placement of these units (compute nodes, by rank) on the stages has a smaller bottleneck.

    reached: the bottleneck of a known placement. If simple bounds come within `_CLOSE` of it, no more is tried.
    """
    fixed, held = _segment_costs(units, scale, _segments_for_bound(graph, clusters))
    multiplier = np.asarray(in_flight, dtype=np.float64)
    weights = 1.0 / np.maximum(fixed.sum() + multiplier * held.sum(), 1e-300)
    weights /= weights.sum()
    # Where nothing is held, cutting all costs into equal parts is one of the placements: no weights find a larger bound.
    best, rate, most = 0.0, 0.5, math.inf if held.any() else float(fixed.sum()) / len(multiplier)
    for _ in range(_ROUNDS if len(multiplier) > 1 else 1):
        if best >= most * (1.0 - _ROUNDING):
            break
        value, costs = _cheapest_for_bound(fixed, held, multiplier, weights)
        best = max(best, value)
        weights = weights * _exponential(rate * (costs / max(float(costs.max()), 1e-300)))
        weights /= weights.sum()
        rate *= 0.95
    labels, dag = condense(graph, clusters, np.arange(graph.num_compute))
    whole = units.merged(labels, dag.number_of_nodes())
    return float(max(best * (1.0 - _ROUNDING), graph_bound(whole, dag, scale, in_flight, best, reached)))


def _exponential(exponents: FloatArray) -> FloatArray:
    """About e to the power of each, with the same bits on every processor: numpy's own bits depend on its vector instructions."""
    powers = 1.0 + exponents / 1024.0
    for _ in range(10):  # 1024 is 2 to the power of 10
        powers = powers * powers
    return powers


def graph_bound(
    units: Units, dag: nx.DiGraph[int], scale: Scale, in_flight: Sequence[int], low: float, reached: float = math.inf
) -> float:
    """The same of a graph of units, given a bound that is proven already."""
    path = heaviest_path(dag, own_costs(units, scale, max(1, sum(in_flight) // len(in_flight))))
    best = max(low, _heaviest_unit(units, scale, in_flight), _heaviest_path(units, path, scale, in_flight))
    if best * (1.0 + _CLOSE) < reached < math.inf:
        lattice = build_lattice(units, dag, scale, in_flight)
        if lattice is not None:
            best = max(best, best_chain(lattice, scale, in_flight, best, reached).bound)
    return float(best) * (1.0 - _ROUNDING)


def _segments_for_bound(graph: Graph, clusters: Clusters) -> IntArray:
    """Segment of each rank, from 1; 0 for nodes outside the core."""
    n = graph.num_compute
    members = [r for r, position in enumerate(graph.compute.tolist()) if not clusters.input_only[position]]
    if not members:
        return np.zeros(n, dtype=np.int64)
    dag: nx.DiGraph[int] = nx.DiGraph()
    dag.add_nodes_from(range(n))
    dag.add_edges_from((int(graph.rank[u]), int(graph.rank[w])) for u, w in graph.dependencies())
    ends = [int(graph.rank[i]) for i in graph.outputs if graph.is_compute(i)]
    last = max(ends, default=members[-1])
    before = nx.ancestors(dag, last) | {last}
    start = min((r for r in members if r in before), default=last)
    core = np.zeros(n, dtype=bool)
    core[sorted((nx.descendants(dag, start) | {start}) & before)] = True
    first_consumer, last_producer = np.arange(n), np.arange(n)  # of nodes outside the core: no obstacle
    first_consumer[core], last_producer[core] = n, -1
    first_consumer[last], last_producer[start] = last, start
    for u, w in dag.edges:
        if core[u] and core[w]:
            first_consumer[u] = min(first_consumer[u], w)
            last_producer[w] = max(last_producer[w], u)
    reached = np.concatenate(([-1], np.maximum.accumulate(first_consumer)[:-1])) <= np.arange(n)
    following = np.minimum.accumulate(last_producer[::-1])[::-1]
    reaches = np.concatenate((following[1:], [n])) >= np.arange(n)
    waist = core & reached & reaches
    joined = -(-int(waist.sum()) // _MAX_SEGMENTS)
    return np.where(core, (np.cumsum(waist) - waist) // joined + 1, 0)


def _segment_costs(units: Units, scale: Scale, segment: IntArray) -> tuple[FloatArray, FloatArray]:
    """Per segment: cost of time and static bytes, and cost of the activations of one microbatch."""
    size = int(segment.max()) + 1
    time, static, held = np.zeros((3, size), dtype=np.int64)
    for total, column in ((time, units.time), (static, units.static_bytes), (held, units.activation_bytes)):
        np.add.at(total, segment, np.asarray(column, dtype=np.int64))
    for item in units.shared:
        inside = segment[list(item.users)]
        owner = int(inside[inside > 0].min()) if (inside > 0).any() else 0
        static[owner] += item.static_bytes
        held[owner] += item.activation_bytes
    return scale.cost(time, static, scale.fastest), scale.cost(np.zeros_like(held), held)


def _cheapest_for_bound(
    fixed: FloatArray, held: FloatArray, in_flight: FloatArray, weights: FloatArray
) -> tuple[float, FloatArray]:
    """The smallest weighted sum of stage costs, and the stage costs of a placement that has it."""
    num_stages = len(weights)
    per_held = weights * in_flight
    (fixed_min, fixed_at), (held_min, held_at) = _window_minimum(weights), _window_minimum(per_held)
    backwards = np.where(np.tri(num_stages, k=-1, dtype=bool), np.inf, 0.0)  # stages never go down
    value = np.zeros(num_stages)
    value[1:] = np.inf  # the first segment may use any stage from 0 on
    choices = []
    for k in range(1, len(fixed)):
        window = value[:, None] + backwards + fixed[k] * fixed_min + held[k] * held_min
        choices.append(window.argmin(axis=0))
        value = window.min(axis=0)
    stage = int(value.argmin())
    total = float(value[stage]) + fixed[0] * float(weights.min()) + held[0] * float(per_held.min())
    costs = np.zeros(num_stages)
    costs[int(weights.argmin())] += fixed[0]
    costs[int(per_held.argmin())] += held[0] * in_flight[int(per_held.argmin())]
    for k in range(len(fixed) - 1, 0, -1):
        low = int(choices[k - 1][stage])
        t, u = fixed_at[low, stage], held_at[low, stage]
        costs[t] += fixed[k]
        costs[u] += held[k] * in_flight[u]
        stage = low
    return total, costs


def _window_minimum(weights: FloatArray) -> tuple[FloatArray, IntArray]:
    """For stages l <= s: the smallest weight among l..s and its stage; zero where l > s."""
    n = len(weights)
    smallest, where = np.zeros((n, n)), np.zeros((n, n), dtype=np.int64)
    for low in range(n):
        at = low
        for high in range(low, n):
            at = high if weights[high] < weights[at] else at
            smallest[low, high], where[low, high] = weights[at], at
    return smallest, where


def _heaviest_unit(units: Units, scale: Scale, in_flight: Sequence[int]) -> float:
    """Cost of the heaviest unit where it costs least."""
    return float(own_costs(units, scale, min(in_flight)).max())


def _heaviest_path(units: Units, path: list[int], scale: Scale, in_flight: Sequence[int]) -> float:
    """Optimum of the chain of units on the heaviest path."""
    return relaxed_optimum(units.subset(path), scale, in_flight)
