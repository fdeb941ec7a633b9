"""Which nodes may not be separated, and which values depend on the inputs alone.

Nodes share a cluster, and so a stage, when
  - one reads a result that is not a single tensor (the parts of a `split`), or whose shape depends on values: such results do not cross
    between stages. If the model returns one, it is computed on the last stage, with the last node;
  - they touch a storage that is written in place, up to the last node that writes it: create it, view it, read it,
    write it. After the last write its tensors are ordinary values;
  - they touch, at any time, a storage that is written in place and does not come from a node of the graph: a
    parameter, a buffer, a model input; or name a buffer that is rebound (set_attr), or a buffer inside a module that
    is called whole. Each stage has its own replica of those, and only one may be changed.

A value is `input_only` when it is computed from model inputs, buffers that never change and constants alone, draws no
random numbers and needs no gradient. Any stage can compute it again. Where it involves in-place writes, all the
writers must be input-only too.

Example: `m = torch.zeros(4); m[0] = 1; y = x * m` gives one cluster {zeros, setitem}; both are input-only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx

from smpc.partitioner.graph.trace_graph import Graph
from smpc.partitioner.problem import IntArray
from smpc.tracer.ir import NodeKind


@dataclass(frozen=True)
class Clusters:
    """Clusters and input-only values of a graph, by position."""

    members: tuple[tuple[int, ...], ...]  # clusters of two nodes and more, members in order
    writers: dict[int, tuple[int, ...]]  # node -> all nodes that must run with it because of in-place writes
    input_only: tuple[bool, ...]  # False for inputs and attribute reads themselves


def find_clusters(graph: Graph) -> Clusters:
    """Apply the rules of the module docstring."""
    written = _written_groups(graph)
    union: nx.Graph[int] = nx.Graph()
    writers: nx.Graph[int] = nx.Graph()
    for group in written:
        nx.add_path(union, group)
        nx.add_path(writers, group)
    for producer, consumer in graph.dependencies():
        if graph.trace.nodes[producer].spec is None:
            union.add_edge(producer, consumer)
    together = {node: group for group in _components(writers) for node in group}
    input_only = _input_only(graph, together)
    for position in graph.outputs:
        if graph.is_compute(position) and graph.trace.nodes[position].spec is None and not input_only[position]:
            union.add_edge(position, int(graph.compute[-1]))
    return Clusters(tuple(_components(union)), together, input_only)


def condense(
    graph: Graph, clusters: Clusters, pieces: IntArray, also: Iterable[tuple[int, int]] = ()
) -> tuple[list[int], nx.DiGraph[int]]:
    """Unit of each rank, numbered in execution order, and the dependencies between units.

    `pieces` gives each rank a piece. Pieces that a cluster joins, or that depend on each other in a circle, become one
    unit. `also` are further pairs of positions (u, w) that count as dependencies: w not before u.
    """
    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(sorted(set(pieces.tolist())))
    for members in clusters.members:
        joined = pieces[graph.rank[list(members)]].tolist()
        nx.add_cycle(quotient, joined)
    for u, w in itertools.chain(graph.dependencies(), also):
        quotient.add_edge(int(pieces[graph.rank[u]]), int(pieces[graph.rank[w]]))
    component_of: dict[int, int] = {}
    for i, component in enumerate(nx.strongly_connected_components(quotient)):
        component_of.update(dict.fromkeys(component, i))
    components = [component_of[piece] for piece in pieces.tolist()]
    number = {component: i for i, component in enumerate(dict.fromkeys(components))}
    dag: nx.DiGraph[int] = nx.DiGraph()
    dag.add_nodes_from(range(len(number)))
    for u, w in sorted(quotient.edges):
        source, target = number[component_of[u]], number[component_of[w]]
        if source != target:
            dag.add_edge(source, target)
    return [number[component] for component in components], dag


def _components(graph: nx.Graph[int]) -> list[tuple[int, ...]]:
    return sorted(tuple(sorted(component)) for component in nx.connected_components(graph))


def _written_groups(graph: Graph) -> list[list[int]]:
    """For each thing written in place: the compute nodes that touch it and may not be separated."""
    nodes = graph.trace.nodes
    last_write = {
        nodes[graph.trace.position(name)].storage: position
        for position, node in enumerate(nodes)
        for name in node.mutates
    }
    last_write.pop(-1, None)
    touching: dict[int, list[int]] = {storage: [] for storage in last_write}
    outside: set[int] = set()  # storages that exist before the first node
    for position, node in enumerate(nodes):
        if not graph.is_compute(position):
            outside.add(node.storage)
            continue
        written = (graph.trace.position(name) for name in node.mutates)
        storages = (node.storage, *(nodes[i].storage for i in (*graph.inputs[position], *written)))
        for storage in dict.fromkeys(storages):
            if storage in touching:
                touching[storage].append(position)
    groups = [
        found if storage in outside else [position for position in found if position <= last_write[storage]]
        for storage, found in touching.items()
    ]
    return [group for group in (*groups, *_rebound_groups(graph)) if len(group) > 1]


def _rebound_groups(graph: Graph) -> Iterable[list[int]]:
    """Users of each buffer, and of those in the same memory, that is rebound or that a module called whole may change."""
    nodes, changed = graph.trace.nodes, (NodeKind.SET_ATTR, NodeKind.CALL_MODULE)
    users_of: dict[tuple[int, int], set[int]] = {}
    for i, (state, users) in enumerate(zip(graph.trace.state, graph.state_users, strict=True)):
        if not state.is_parameter:
            users_of.setdefault((state.storage, -1 if state.storage >= 0 else i), set()).update(users)
    for found in users_of.values():
        if any(nodes[i].kind in changed for i in found):
            yield sorted(found)


def _input_only(graph: Graph, together: dict[int, tuple[int, ...]]) -> tuple[bool, ...]:
    nodes = graph.trace.nodes
    fixed = _unchanging_reads(graph)
    tainted = [False] * len(nodes)  # depends on more than inputs, directly or not
    for position, node in enumerate(nodes):
        if node.kind is NodeKind.PLACEHOLDER:
            tainted[position] = node.spec is not None and node.spec.requires_grad
        elif node.kind is NodeKind.GET_ATTR:
            tainted[position] = position not in fixed
        else:
            tainted[position] = _has_effect_or_chance(graph, position)
    readers: list[list[int]] = [[] for _ in nodes]  # dead ones too: an argument may lead to them
    for position, read in enumerate(graph.inputs):
        for producer in read:
            readers[producer].append(position)
    pending = [position for position, bad in enumerate(tainted) if bad]
    while pending:
        position = pending.pop()
        for reached in (*readers[position], *together.get(position, ())):
            if not tainted[reached]:
                tainted[reached] = True
                pending.append(reached)
    return tuple(graph.is_compute(i) and not bad for i, bad in enumerate(tainted))


def _has_effect_or_chance(graph: Graph, position: int) -> bool:
    node = graph.trace.nodes[position]
    if node.random or node.kind is NodeKind.SET_ATTR or bool(node.spec and node.spec.requires_grad):
        return True
    if node.kind is NodeKind.CALL_MODULE:
        return any(state.name.startswith(node.target + ".") for state in graph.trace.state)
    return False


def _unchanging_reads(graph: Graph) -> set[int]:
    """get_attr nodes of buffers and constants that the model never changes."""
    nodes = graph.trace.nodes
    written = {nodes[graph.trace.position(name)].storage for node in nodes for name in node.mutates}
    rebound = {graph.state_of[i] for i, node in enumerate(nodes) if node.kind is NodeKind.SET_ATTR}
    found: set[int] = set()
    for position, node in enumerate(nodes):
        state = graph.state_of[position]
        if node.kind is not NodeKind.GET_ATTR or node.storage in written:
            continue
        if state < 0 or (not graph.trace.state[state].is_parameter and state not in rebound):
            found.add(position)
    return found
