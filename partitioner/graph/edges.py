"""What crosses between stages, given the stage of every node; and the check that an assignment is possible at all.

Rules
  - A value used by later stages travels along the chain of its consumers: owned by 0 and used by 2 and 3, it is on
    the edges 0 -> 2 and 2 -> 3.
  - The values that the model returns are consumed by the last stage.
  - Model inputs go from INPUTS to each stage that reads them, the last stage included if the model returns them.
  - Recomputable values (see `smpc.partitioner.graph.recompute`) are computed again by each other stage that needs them;
    what such a cone reads is inputs and buffers only, so it adds no edge between stages.
  - Parameters and buffers never cross: each stage reads its own replica.
  - A stage that runs a whole module call also gets those of its arguments that are model inputs or recomputable, though
    no node may read them: with all its arguments at hand, the module can be called as it is.

Edges are ordered by destination, then source; their values by execution order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from smpc.errors import PartitionError
from smpc.partitioner.graph.clusters import Clusters, find_clusters
from smpc.partitioner.graph.plan import INPUTS, Edge
from smpc.partitioner.graph.trace_graph import Graph, build_graph
from smpc.partitioner.problem import IntArray
from smpc.tracer.constants import references
from smpc.tracer.ir import NodeKind, Trace

_SHOWN = 5  # violations listed in one message


@dataclass(frozen=True)
class Crossing:
    """What goes between stages and what each stage runs again. Positions, by stage, are in execution order."""

    edges: tuple[Edge, ...]
    recomputed: tuple[tuple[int, ...], ...]
    state: tuple[tuple[int, ...], ...]  # indices of the parameters and buffers that each stage reads


def find_crossing(
    graph: Graph, recomputable: Mapping[int, tuple[int, ...]], stage_of: IntArray, num_stages: int
) -> Crossing:
    """Edges, recomputed nodes and state of each stage; `stage_of` is by rank."""
    stages = range(num_stages)
    needed = _needed(graph, recomputable, stage_of, num_stages)
    again: list[set[int]] = [set() for _ in stages]
    carried: dict[tuple[int, int], list[int]] = {}
    for position, users in needed.items():
        if not graph.is_compute(position):
            continue
        owner = int(stage_of[graph.rank[position]])
        others = sorted(users - {owner})
        if position in recomputable:
            for stage in others:
                again[stage].update(recomputable[position])
            continue
        for source, destination in itertools.pairwise((owner, *others)):
            carried.setdefault((destination, source), []).append(position)
    reads = _reads(graph, needed, again)
    state: list[set[int]] = [set() for _ in stages]
    for index, positions in enumerate(graph.state_users):
        for position in positions:
            state[stage_of[graph.rank[position]]].add(index)
    for stage, positions_read in enumerate(reads):
        for position in positions_read:
            if graph.trace.nodes[position].kind is NodeKind.PLACEHOLDER:
                carried.setdefault((stage, INPUTS), []).append(position)
            elif graph.state_of[position] >= 0:
                state[stage].add(graph.state_of[position])
    recomputed = tuple(tuple(i for i in sorted(again[stage]) if stage_of[graph.rank[i]] != stage) for stage in stages)
    return Crossing(_edges(graph.trace, carried), recomputed, tuple(tuple(sorted(found)) for found in state))


def check_assignment(trace: Trace, assignment: Mapping[str, int], num_stages: int) -> None:
    """Raises PartitionError unless `assignment` (node name -> stage) can run as a pipeline of `num_stages` stages."""
    graph = build_graph(trace)
    check_stages(graph, find_clusters(graph), stages_by_rank(graph, assignment), num_stages)


def stages_by_rank(graph: Graph, assignment: Mapping[str, int]) -> IntArray:
    """The stage of each compute node. PartitionError if the names are not exactly those of the compute nodes."""
    names = [graph.trace.nodes[i].name for i in graph.compute.tolist()]
    missing = [name for name in names if name not in assignment]
    known = set(names)
    unknown = [name for name in assignment if name not in known]
    problems = [f"no stage for node {name}" for name in missing] + [
        f"node {name} computes nothing in this trace" for name in unknown
    ]
    _report("expected a stage for every node that computes", problems)
    return np.asarray([assignment[name] for name in names], dtype=np.int64)


def check_stages(graph: Graph, clusters: Clusters, stage_of: IntArray, num_stages: int) -> None:
    """`check_assignment` on stages by rank."""
    nodes = graph.trace.nodes

    def stage(position: int) -> int:
        return int(stage_of[graph.rank[position]])

    _report(
        f"expected stages from 0 to {num_stages - 1}",
        [
            f"node {nodes[i].name} is on stage {stage(i)}"
            for i in graph.compute.tolist()
            if not 0 <= stage(i) < num_stages
        ],
    )
    used = np.bincount(stage_of, minlength=num_stages)
    _report(
        "expected every stage to run at least one node",
        [f"stage {s} is empty" for s in np.flatnonzero(used == 0).tolist()],
    )
    _report(
        "expected every node on the stage of its inputs or a later one",
        [
            f"{nodes[u].name} (stage {stage(u)}) is read by {nodes[w].name} (stage {stage(w)})"
            for u, w in graph.dependencies()
            if stage(u) > stage(w)
        ],
    )
    _report(
        "expected nodes joined by in-place writes or by a result that is no tensor to share a stage",
        [
            f"{nodes[members[0]].name} (stage {stage(members[0])}) and {nodes[other].name} (stage {stage(other)})"
            for members in clusters.members
            for other in members[1:]
            if stage(other) != stage(members[0])
        ],
    )


def _report(expected: str, problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise PartitionError(f"{expected}, found: {'; '.join(problems[:_SHOWN])}{more}")


def _needed(
    graph: Graph, recomputable: Mapping[int, tuple[int, ...]], stage_of: IntArray, num_stages: int
) -> dict[int, set[int]]:
    """For each node, in execution order: the stages that use its value."""
    needed: dict[int, set[int]] = {}
    for position, consumers in enumerate(graph.consumers):
        stages = {int(stage_of[graph.rank[i]]) for i in consumers if graph.is_compute(i)}
        if stages:
            needed[position] = stages
    for position in graph.outputs:
        needed.setdefault(position, set()).add(num_stages - 1)
    for call, (first, last) in zip(graph.trace.calls, graph.call_spans.tolist(), strict=True):
        stages = set(stage_of[first:last].tolist())
        nodes = graph.trace.nodes[call.first : call.last]
        if len(stages) != 1 or not any(node.name in graph.trace.live for node in nodes):
            continue
        for name in references(call.argument_leaves):
            position = graph.trace.position(name)
            if position in recomputable or graph.trace.nodes[position].kind is NodeKind.PLACEHOLDER:
                needed.setdefault(position, set()).update(stages)
    return dict(sorted(needed.items()))


def _reads(graph: Graph, needed: Mapping[int, set[int]], again: list[set[int]]) -> list[list[int]]:
    """Inputs and attributes that each stage reads, in execution order."""
    reads: list[set[int]] = [set() for _ in again]
    for position, stages in needed.items():
        if not graph.is_compute(position):
            for stage in sorted(stages):
                reads[stage].add(position)
    for stage, cone in enumerate(again):
        for position in cone:
            reads[stage].update(i for i in graph.inputs[position] if not graph.is_compute(i))
    return [sorted(found) for found in reads]


def _edges(trace: Trace, carried: Mapping[tuple[int, int], list[int]]) -> tuple[Edge, ...]:
    edges = []
    for index, ((destination, source), positions) in enumerate(sorted(carried.items())):
        nodes = [trace.nodes[i] for i in positions]
        specs = [node.spec for node in nodes]
        num_bytes = sum(spec.num_bytes for spec in specs if spec is not None)
        returned = [spec.num_bytes for spec in specs if spec is not None and spec.requires_grad]
        gradient_bytes = 0 if source == INPUTS else sum(returned)
        assert None not in specs, "a value without a shape crosses between stages"
        edges.append(Edge(index, source, destination, tuple(node.name for node in nodes), num_bytes, gradient_bytes))
    return tuple(edges)
