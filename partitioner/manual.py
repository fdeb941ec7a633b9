"""Manual assignment: from the partitions that a user gave to modules to the stage of every node.

Terms
    mark        module name -> partition, as `smp.partition(i)` and `smp.set_partition(module, i)` set it. A partition is a pipeline
                rank
    stage       a run of nodes of one partition that follow each other in the order of execution; one partition may have several

Which partition a node belongs to
    - the partition of the innermost marked module whose call contains it;
    - `default`, if the innermost module around it has no mark on it, around it or inside it: it was placed nowhere;
    - none, if it is in the forward of an unmarked module that calls marked ones: it joins the nodes before it, or at the
      very beginning the nodes after it. So a loss after the last module stays with that module;
    - none either, if nothing that the model returns depends on it, or if it only takes a part out of a result that is not a tensor.
Values that depend on the model's inputs alone (masks, positions) go to the first stage that uses them, and others compute them again.

Stages follow the order of execution, moving only what a cluster (see `smpc.partitioner.graph.trace_graph`) joins, so gradients are summed
as in one process. Example: children created on partitions 1, 2, 1 and by default 0, called in this order, are four stages on the ranks
(1, 2, 1, 0):

    assignment, placement = assign_manually(trace, {"child0": 1, "child1": 2, "child2": 1}, default=0, num_ranks=3)
    placement    # (1, 2, 1, 0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from smpc.errors import ConfigError, PartitionError
from smpc.partitioner.graph.trace_graph import Clusters, Graph, build_graph, condense, find_clusters
from smpc.tracer.ir import NodeKind, Trace


@dataclass(frozen=True, slots=True)
class ManualPartition:
    """Marks as (module name, partition) pairs, and the partition of modules without one."""

    marks: tuple[tuple[str, int], ...]
    default: int


def check_marks(marks: Mapping[str, int], default: int, num_ranks: int) -> None:
    """Raises ConfigError, with a line for every partition that does not exist."""
    places = [(f"module {name or 'the model itself'}", index) for name, index in marks.items()]
    wrong = [
        f"{place}: expected a partition from 0 to pipeline_parallel_degree - 1 = {num_ranks - 1}, found {index}"
        for place, index in (*places, ("default_partition", default))
        if not 0 <= index < num_ranks
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def assign_manually(
    trace: Trace, partition_of: Mapping[str, int], default: int, *, num_ranks: int
) -> tuple[dict[str, int], tuple[int, ...]]:
    """(node name -> stage, rank of each stage); `partition_of` has the marks by canonical module name.

    Raises ConfigError for partitions that do not exist, PartitionError if modules on different partitions cannot be separated or a
    partition has nothing to run.
    """
    check_marks(partition_of, default, num_ranks)
    graph = build_graph(trace)
    clusters = find_clusters(graph)
    labels, dag = condense(graph, clusters, np.arange(graph.num_compute))
    members: list[list[int]] = [[] for _ in dag]
    for position, unit in zip(graph.compute.tolist(), labels, strict=True):
        members[unit].append(position)
    wishes = _unit_wishes(trace, members, _node_wishes(graph, clusters, partition_of, default))
    order = list(nx.lexicographical_topological_sort(dag))
    movable = [all(clusters.input_only[position] for position in found) for found in members]
    stages, placement = _stages_of_wishes([unit for unit in order if not movable[unit]], wishes, default)
    _place_movable(graph, members, labels, order, stages, dag)
    empty = [str(rank) for rank in range(num_ranks) if rank not in placement]
    if empty:
        raise PartitionError(
            f"expected every one of {num_ranks} partitions to run something in {trace.model_class}, found nothing for partition "
            f"{', '.join(empty)}; in the order of execution the model runs on partitions {', '.join(map(str, placement))}: place "
            "modules with smp.partition or smp.set_partition, or lower pipeline_parallel_degree"
        )
    names = [trace.nodes[position].name for position in graph.compute.tolist()]
    return {name: stages[unit] for name, unit in zip(names, labels, strict=True)}, tuple(placement)


def _node_wishes(graph: Graph, clusters: Clusters, marks: Mapping[str, int], default: int) -> tuple[int | None, ...]:
    """By position: the partition that a node has to be on; None if it goes with others."""
    trace = graph.trace
    around: list[int | None] = []  # by call: the innermost mark on it or around it
    for call in trace.calls:
        around.append(marks.get(call.fqn, around[call.parent] if call.parent >= 0 else None))
    holds_marks = [False] * len(trace.calls)  # whether modules called inside are marked
    whole = [(node.call, node.target) for node in trace.nodes if node.kind is NodeKind.CALL_MODULE]
    for index, fqn in (*((call.parent, call.fqn) for call in reversed(trace.calls)), *whole):
        parent = index
        while fqn in marks and parent >= 0 and not holds_marks[parent]:
            holds_marks[parent] = True
            parent = trace.calls[parent].parent
    wishes: list[int | None] = []
    for position, node in enumerate(trace.nodes):
        wish = around[node.call]
        if node.kind is NodeKind.CALL_MODULE:
            _check_whole(node.target, marks, wish if wish is not None else default)
            wish = marks.get(node.target, default if wish is None else wish)
        elif wish is None and not holds_marks[node.call]:
            wish = default
        takes_part = any(trace.nodes[i].spec is None for i in graph.inputs[position] if graph.is_compute(i))
        if takes_part or clusters.input_only[position] or node.name not in trace.live:
            wish = None
        wishes.append(wish)
    return tuple(wishes)


def _check_whole(fqn: str, marks: Mapping[str, int], outside: int) -> None:
    """A module that is called whole cannot have parts elsewhere."""
    own = marks.get(fqn, outside)
    apart = [f"{name} on {index}" for name, index in marks.items() if name.startswith(f"{fqn}.") and index != own]
    if apart:
        raise PartitionError(
            f"module {fqn} on partition {own} is called whole, since its forward cannot be recorded, and has modules on other "
            f"partitions: {', '.join(apart)}; place them together"
        )


def _unit_wishes(trace: Trace, members: Sequence[Sequence[int]], wishes: Sequence[int | None]) -> list[int | None]:
    """The partition of each unit; PartitionError where members want different ones."""
    found: list[int | None] = []
    wrong: list[str] = []
    for positions in members:
        first: dict[int, int] = {}
        for position in positions:
            wish = wishes[position]
            if wish is not None:
                first.setdefault(wish, position)
        if len(first) > 1:
            places = [f"{_node_as_text(trace, position)} on partition {wish}" for wish, position in first.items()]
            wrong.append(" and ".join(places))
        found.append(next(iter(first), None))
    if wrong:
        raise PartitionError(
            "\n".join(
                [
                    "modules that share memory which is written in place, or a buffer that changes, cannot be on different "
                    "partitions; place them together:",
                    *wrong,
                ]
            )
        )
    return found


def _node_as_text(trace: Trace, position: int) -> str:
    """A node as messages name it: its module and source line."""
    node = trace.nodes[position]
    module = node.target if node.kind is NodeKind.CALL_MODULE else trace.calls[node.call].fqn
    where = f", {node.source}" if node.source else ""
    return f"{f'module {module}' if module else 'the model itself'} ({node.name}{where})"


def _stages_of_wishes(
    units: Sequence[int], wishes: Sequence[int | None], default: int
) -> tuple[dict[int, int], list[int]]:
    """Stage of each of these units, given in the order of execution, and the partition of each stage."""
    stages: dict[int, int] = {}
    placement: list[int] = []
    for unit in units:
        wish = wishes[unit]
        if wish is not None and (not placement or placement[-1] != wish):
            placement.append(wish)
        stages[unit] = max(len(placement) - 1, 0)
    return stages, placement or [default]


def _place_movable(
    graph: Graph,
    members: Sequence[Sequence[int]],
    labels: Sequence[int],
    order: Sequence[int],
    stages: dict[int, int],
    dag: nx.DiGraph[int],
) -> None:
    """Stages of the units that depend on inputs alone: where they are first used. Writes into `stages`.

    A stage uses values of its own or of earlier stages, since the others are in topological order.
    """
    for unit in reversed(order):
        if unit not in stages:
            readers = (i for position in members[unit] for i in graph.consumers[position] if graph.is_compute(i))
            used = [stages[labels[graph.rank[i]]] for i in readers if labels[graph.rank[i]] in stages]
            if used:
                stages[unit] = min(used)
    for unit in order:
        if unit not in stages:
            stages[unit] = max((stages[other] for other in dag.predecessors(unit)), default=0)
