"""Random plans for a trace, and their programs."""

import random

import networkx as nx
import numpy as np

from smpc.codegen.schedules.named import Choice
from smpc.compile import Compilation, compile_plan
from smpc.partitioner.graph.plan import ScheduleSummary
from smpc.partitioner.graph.trace_graph import build_graph, check_assignment, condense, find_clusters
from smpc.partitioner.planner import plan_from_assignment
from smpc.tracer import Trace


def scattered(trace: Trace, num_stages: int, seed: int, disorder: float) -> dict[str, int]:
    """Random stages, never before the stages of a node's inputs, nodes that belong together on one; none empty.

    `disorder` 0 follows the order of execution where dependencies allow, 1 places at random.
    """
    rng = random.Random(seed)
    graph = build_graph(trace)
    units, dag = condense(graph, find_clusters(graph), np.arange(graph.num_compute))
    stages: dict[int, int] = {}
    for unit in nx.lexicographical_topological_sort(dag):
        position = (1 - disorder) * (unit + 0.5) / dag.number_of_nodes() + disorder * rng.random()
        stages[unit] = max([int(position * num_stages), *(stages[other] for other in dag.predecessors(unit))])
    number = {stage: i for i, stage in enumerate(sorted(set(stages.values())))}
    assignment = {
        trace.nodes[position].name: number[stages[units[graph.rank[position]]]] for position in graph.compute.tolist()
    }
    check_assignment(trace, assignment, len(number))
    return assignment


def contiguous(trace: Trace, num_stages: int, seed: int) -> dict[str, int]:
    """Random cuts of the order of execution, between nodes that may be separated; no more than there are such places."""
    rng = random.Random(seed)
    graph = build_graph(trace)
    inside = {
        rank
        for members in find_clusters(graph).members
        for rank in range(graph.rank[members[0]] + 1, graph.rank[members[-1]] + 1)
    }
    places = [rank for rank in range(1, graph.num_compute) if rank not in inside]
    cuts = sorted(rng.sample(places, min(num_stages - 1, len(places))))
    assignment = {
        trace.nodes[position].name: sum(cut <= rank for cut in cuts)
        for rank, position in enumerate(graph.compute.tolist())
    }
    check_assignment(trace, assignment, len(cuts) + 1)
    return assignment


def compile_assignment(
    trace: Trace,
    assignment: dict[str, int],
    *,
    pipeline: str = "interleaved",
    microbatches: int = 1,
    active: int | None = None,
    placement: tuple[int, ...] | None = None,
) -> Compilation:
    """The verified programs of an assignment."""
    num_stages = 1 + max(assignment.values())
    active = min(active or num_stages + 2, microbatches)
    choice = Choice(pipeline, placement or tuple(range(num_stages)), microbatches, active)
    plan = plan_from_assignment(
        trace,
        assignment,
        num_stages=num_stages,
        in_flight=choice.in_flight,
        placement=choice.placement,
        schedule=ScheduleSummary(pipeline, microbatches, active, 0.0, 0.0),
    )
    return compile_plan(trace, plan)
