"""Everything about a trace that does not depend on the stage of a node, computed once."""

from __future__ import annotations

from dataclasses import dataclass

from smpc.partitioner.clusters import Clusters, find_clusters
from smpc.partitioner.coarsen import node_units
from smpc.partitioner.cost import CostModel, NodeTimes, node_times
from smpc.partitioner.graph import Graph, build_graph
from smpc.partitioner.problem import Units
from smpc.partitioner.recompute import find_recomputable
from smpc.tracer.ir import Trace


@dataclass(frozen=True)
class Analysis:
    """A trace in index form, with its costs."""

    graph: Graph
    clusters: Clusters
    times: NodeTimes
    recomputable: dict[int, tuple[int, ...]]
    units: Units  # one for each compute node, by rank
    cost_model: CostModel


def analyse(trace: Trace, cost_model: CostModel, times: NodeTimes | None = None) -> Analysis:
    """Index the trace and cost its nodes; `times` are measured ones, if there are any."""
    graph = build_graph(trace)
    clusters = find_clusters(graph)
    times = times or node_times(trace, cost_model)
    recomputable = find_recomputable(graph, clusters, cost_model)
    return Analysis(graph, clusters, times, recomputable, node_units(graph, times, cost_model), cost_model)
