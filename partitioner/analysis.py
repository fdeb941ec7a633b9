"""Everything about a trace that does not depend on the stage of a node, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from smpc.partitioner.costs.cost import CostModel, NodeTimes, node_times
from smpc.partitioner.graph.clusters import Clusters, find_clusters
from smpc.partitioner.graph.recompute import Requested, depths, find_recomputable, requested_regions, with_regions
from smpc.partitioner.graph.trace_graph import Graph, build_graph
from smpc.partitioner.problem import Units, check_total
from smpc.partitioner.solvers.coarsen import node_units
from smpc.tracer.ir import Trace


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
    checkpoints: Requested


def analyse(
    trace: Trace, cost_model: CostModel, times: NodeTimes | None = None, recompute: Sequence[str] = ()
) -> Analysis:
    """Index the trace and cost its nodes; `times` are measured ones, if there are any. `recompute`: names of modules to checkpoint."""
    wanted = tuple(recompute)
    requested, graph, clusters = trace.remembered((_index, wanted), lambda: _index(trace, wanted))
    once = times or node_times(trace, cost_model)
    graph = replace(graph, workspace=once.workspace)
    times = once.with_reruns(depths(requested.regions))
    recomputable = find_recomputable(graph, clusters, cost_model)
    units = node_units(graph, times, cost_model)
    return Analysis(graph, clusters, times, once, recomputable, units, cost_model, requested)


def _index(trace: Trace, recompute: tuple[str, ...]) -> tuple[Requested, Graph, Clusters]:
    """What depends on no cost."""
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
