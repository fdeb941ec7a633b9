"""A trace in index form, the nodes that may not be separated, and the values that cross between stages.

Terms
    position    index into Trace.nodes
    compute     nodes that belong to a stage: calls and attribute writes; inputs and attribute reads belong to none
    rank        index into the compute nodes, in execution order; `rank[position]` is -1 for the others
    cluster     compute nodes that must share a stage
    input_only  a value that is computed from model inputs, buffers that never change and constants alone, draws no random numbers and
                needs no gradient. Any stage can compute it again. Where it involves in-place writes, all writers must be input-only too

Parameters and buffers are known by index into Trace.state. A call_module node uses all the state below its module.
State that only dead nodes read belongs to the first of these, as the module around it may be called whole; state that no node reads to
the first node of the nearest enclosing module that runs. Where a list or a dict of modules is nearer, in which others run, it belongs to a
node of the one before it, or else behind it: later batches may use another head, or more layers. So every parameter has an owner.

Nodes share a cluster when
  - one reads a result that is not a single tensor (the parts of a `split`), or whose shape depends on values: such results do not cross
    between stages. If the model returns one, it is computed on the last stage, with the last node;
  - they touch a storage that is written in place, up to the last node that writes it: create it, view it, read it,
    write it. After the last write its tensors are ordinary values;
  - they touch, at any time, a storage that is written in place and does not come from a node of the graph: a
    parameter, a buffer, a model input; or name a buffer that is rebound (set_attr), or a buffer inside a module that
    is called whole. Each stage has its own replica of those, and only one may be changed.

Example: `m = torch.zeros(4); m[0] = 1; y = x * m` gives one cluster {zeros, setitem}; both are input-only.

What crosses, given the stage of every node:
  - A value used by later stages travels along the chain of its consumers: owned by 0 and used by 2 and 3, it is on
    the edges 0 -> 2 and 2 -> 3.
  - The values that the model returns are consumed by the last stage.
  - Model inputs go from INPUTS to each stage that reads them, the last stage included if the model returns them.
  - Recomputable values (see `smpc.partitioner.graph.recompute_regions`) are computed again by each other stage that needs them;
    what such a cone reads is inputs and buffers only, so it adds no edge between stages.
  - Parameters and buffers never cross: each stage reads its own replica.
  - A stage that runs a whole module call also gets its arguments that are model inputs or recomputable, though
    no node may read them: with all its arguments at hand, the module can be called as it is.

Edges are ordered by destination, then source; their values by execution order.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np

from smpc.errors import PartitionError
from smpc.partitioner.costs.node_costs import Workspace
from smpc.partitioner.graph.plan import INPUTS, Edge
from smpc.partitioner.stage_costs import IntArray
from smpc.tracer.constants import references
from smpc.tracer.ir import NodeKind, Trace

NO_STAGE = (NodeKind.PLACEHOLDER, NodeKind.GET_ATTR)


@dataclass(frozen=True)
class Graph:
    """Index form of `trace`; tuples are by position unless said otherwise."""

    trace: Trace
    inputs: tuple[tuple[int, ...], ...]  # positions of a node's inputs
    consumers: tuple[tuple[int, ...], ...]  # positions of the live nodes that read it, in order
    compute: IntArray  # positions of the compute nodes
    rank: IntArray  # by position: index into `compute`, or -1
    state_of: tuple[int, ...]  # state that a get_attr or set_attr node names; -1: none (a constant tensor)
    state_users: tuple[tuple[int, ...], ...]  # by state: positions of the compute nodes that use it, in order
    outputs: tuple[int, ...]  # positions of the model's outputs
    call_spans: IntArray  # by call: first and last + 1 rank of its compute nodes, shape [calls, 2]
    saved: tuple[
        tuple[int, ...], ...
    ]  # storages kept for the backward pass, in regions that are computed again by the first node alone
    workspace: Workspace | None = None  # by position: what nodes make and drop while they work, where that was measured

    @property
    def num_compute(self) -> int:
        """Number of compute nodes."""
        return len(self.compute)

    @cached_property
    def call_parents(self) -> IntArray:
        """By call: the call around it, or -1."""
        return np.array([call.parent for call in self.trace.calls], dtype=np.int64)

    @cached_property
    def called_modules(self) -> tuple[int, ...]:
        """Positions of the modules that are called whole."""
        return tuple(i for i, node in enumerate(self.trace.nodes) if node.kind is NodeKind.CALL_MODULE)

    def is_compute(self, position: int) -> bool:
        """Whether the node belongs to a stage."""
        return bool(self.rank[position] >= 0)

    def dependencies(self) -> Iterator[tuple[int, int]]:
        """(producer, consumer) pairs of compute nodes, as positions, by consumer."""
        for consumer in self.compute.tolist():
            for producer in self.inputs[consumer]:
                if self.rank[producer] >= 0:
                    yield producer, consumer

    def gradient_order(self) -> Iterator[tuple[int, int]]:
        """(u, w) pairs of consumers of one value, in order of execution, whose gradients eager sums w first.

        A pipeline sums gradients of later stages first, so a placement with stage(u) <= stage(w) gives the same bits. For
        two summands the order makes no difference; the loss counts as one if the model returns the value.
        """
        nodes, returned = self.trace.nodes, set(self.outputs)
        for position, readers in enumerate(self.consumers):
            spec = nodes[position].spec
            if self.is_compute(position) and spec is not None and spec.requires_grad:
                summands = [i for i in readers if self._passes_gradient(i)]
                if len(summands) + (position in returned) > 2:
                    yield from itertools.pairwise(summands)

    def _passes_gradient(self, position: int) -> bool:
        spec = self.trace.nodes[position].spec
        return spec is None or spec.requires_grad

    def num_modules(self) -> int:
        """Number of innermost module calls that compute something; a module called whole is one, and so is each node outside of
        these that reads a parameter: `F.linear(x, self.weights[i])`."""
        spans = self.call_spans.tolist()
        parents = {call.parent for call, (first, last) in zip(self.trace.calls, spans, strict=True) if last > first}
        alone = Counter(self.trace.nodes[i].call for i in self.compute.tolist() if self._is_module(i))
        innermost = (bool(last > first) and i not in parents for i, (first, last) in enumerate(spans))
        return max(1, sum(max(int(is_innermost), alone[i]) for i, is_innermost in enumerate(innermost)))

    def _is_module(self, position: int) -> bool:
        """Whether a node is like a module: one called whole, or a call of a function with a parameter."""
        if self.trace.nodes[position].kind is NodeKind.CALL_MODULE:
            return True
        states = (self.state_of[i] for i in self.inputs[position])
        return any(state >= 0 and self.trace.state[state].is_parameter for state in states)


def build_graph(trace: Trace) -> Graph:
    """The index form of a trace. PartitionError if it computes nothing."""
    index = {node.name: i for i, node in enumerate(trace.nodes)}
    inputs = tuple(tuple(index[name] for name in node.inputs) for node in trace.nodes)
    consumers: list[list[int]] = [[] for _ in trace.nodes]
    for i, (node, names) in enumerate(zip(trace.nodes, inputs, strict=True)):
        for j in names if node.name in trace.live else ():
            consumers[j].append(i)
    compute = np.asarray([i for i, node in enumerate(trace.nodes) if node.kind not in NO_STAGE], dtype=np.int64)
    if len(compute) == 0:
        raise PartitionError(f"expected a model that computes something, found no operation in {trace.model_class}")
    rank = np.full(len(trace.nodes), -1, dtype=np.int64)
    rank[compute] = np.arange(len(compute))
    spans = _call_spans(trace, compute)
    state_names = {name: i for i, state in enumerate(trace.state) for name in state.names}
    attributes = (NodeKind.GET_ATTR, NodeKind.SET_ATTR)
    state_of = tuple(state_names.get(node.target, -1) if node.kind in attributes else -1 for node in trace.nodes)
    return Graph(
        trace,
        inputs,
        tuple(tuple(found) for found in consumers),
        compute,
        rank,
        state_of,
        _state_users(trace, consumers, state_of, compute, spans),
        tuple(index[name] for name in trace.output_names),
        spans,
        tuple(node.saved for node in trace.nodes),
    )


def _call_spans(trace: Trace, compute: IntArray) -> IntArray:
    bounds = np.asarray([(call.first, call.last) for call in trace.calls], dtype=np.int64).reshape(-1, 2)
    return np.searchsorted(compute, bounds)


def _state_users(
    trace: Trace, consumers: list[list[int]], state_of: tuple[int, ...], compute: IntArray, spans: IntArray
) -> tuple[tuple[int, ...], ...]:
    users: list[set[int]] = [set() for _ in trace.state]
    below = sorted((name, i) for i, state in enumerate(trace.state) for name in state.names)
    for position, node in enumerate(trace.nodes):
        if node.kind is NodeKind.GET_ATTR and state_of[position] >= 0:
            users[state_of[position]].update(i for i in consumers[position] if trace.nodes[i].kind not in NO_STAGE)
        elif node.kind is NodeKind.SET_ATTR and state_of[position] >= 0:
            users[state_of[position]].add(position)
        elif node.kind is NodeKind.CALL_MODULE:
            start = bisect.bisect_left(below, (node.target + ".", -1))
            stop = bisect.bisect_left(below, (node.target + "/", -1))  # "/" comes right after "."
            for _, i in below[start:stop]:
                users[i].add(position)
    dead_users: dict[int, int] = {}
    first_of: dict[str, int] = {}
    for call, (first, last) in zip(trace.calls, spans.tolist(), strict=True):
        if last > first:
            first_of.setdefault(call.fqn, int(compute[first]))
    returned = {state_of[trace.position(name)] for name in trace.output_names}
    for position in reversed(compute.tolist()):  # so the first of dead nodes stays
        for name in trace.nodes[position].inputs if trace.nodes[position].name not in trace.live else ():
            dead_users[state_of[trace.position(name)]] = position
    used = [(state.name, users[i]) for i, state in enumerate(trace.state)]
    for i, state in enumerate(trace.state):
        if not used[i][1] and i not in returned:
            owner = dead_users.get(i)
            if owner is None:
                owner = _owner_in_graph(state.name, first_of, int(compute[0]), used[:i], used[i + 1 :])
            users[i] = {owner}
    return tuple(tuple(sorted(found)) for found in users)


def _owner_in_graph(
    name: str,
    first_of: dict[str, int],
    otherwise: int,
    before: Sequence[tuple[str, set[int]]],
    after: Sequence[tuple[str, set[int]]],
) -> int:
    """A node for state that none uses, see above. `before` and `after`: other state, in the model's order, with its users."""
    while name:
        name = name.rpartition(".")[0]
        if name in first_of:
            return first_of[name]
        beside = f"{name}."
        last = next((max(users) for other, users in reversed(before) if users and other.startswith(beside)), None)
        if last is None:
            last = next((min(users) for other, users in after if users and other.startswith(beside)), None)
        if last is not None:
            return last
    return otherwise


def largest_whole_calls(graph: Graph, stage_of: IntArray, stage: int) -> tuple[str, ...]:
    """FQNs of the largest module calls whose compute nodes all run on `stage`, in execution order, each once.

    `stage_of` is by rank.
    """
    mine = np.concatenate(([0], np.cumsum(stage_of == stage)))
    first, last = graph.call_spans.T
    whole = (last > first) & (mine[last] - mine[first] == last - first)
    outermost = whole & ~((graph.call_parents >= 0) & whole[graph.call_parents])
    found = [(int(first[call]), graph.trace.calls[call].fqn) for call in np.flatnonzero(outermost).tolist()]
    for position in graph.called_modules:
        node = graph.trace.nodes[position]
        if stage_of[graph.rank[position]] == stage and not whole[node.call]:
            found.append((int(graph.rank[position]), node.target))
    return tuple(dict.fromkeys(fqn for _, fqn in sorted(found, key=lambda pair: pair[0])))


@dataclass(frozen=True)
class Clusters:
    """Clusters and input-only values of a graph, by position."""

    members: tuple[tuple[int, ...], ...]  # clusters of two nodes and more, members in order
    writers: dict[int, tuple[int, ...]]  # node -> all nodes that must run with it because of in-place writes
    input_only: tuple[bool, ...]  # False for inputs and attribute reads themselves


def find_clusters(graph: Graph) -> Clusters:
    """Which nodes share a cluster, and which values are input-only: the rules of the module docstring."""
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


_SHOWN = 5  # violations listed in one message


@dataclass(frozen=True)
class Crossing:
    """The values sent between stages, and the nodes that each stage recomputes. Positions, by stage, are in execution order."""

    edges: tuple[Edge, ...]
    recomputed: tuple[tuple[int, ...], ...]
    state: tuple[tuple[int, ...], ...]  # indices of the parameters and buffers that each stage reads


def find_crossing(
    graph: Graph, recomputable: Mapping[int, tuple[int, ...]], stage_of: IntArray, num_stages: int
) -> Crossing:
    """Edges, recomputed nodes and state of each stage; `stage_of` is by rank."""
    stages = range(num_stages)
    needed = _stages_that_need_nodes(graph, recomputable, stage_of, num_stages)
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
    reads = _reads_of_graph_stages(graph, needed, again)
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
    return Crossing(_graph_edges(graph.trace, carried), recomputed, tuple(tuple(sorted(found)) for found in state))


def check_assignment(trace: Trace, assignment: Mapping[str, int], num_stages: int) -> None:
    """Raises PartitionError unless `assignment` (node name -> stage) can run as a pipeline of `num_stages` stages."""
    graph = build_graph(trace)
    check_stages(graph, find_clusters(graph), stages_by_rank(graph, assignment), num_stages)


def stages_by_rank(graph: Graph, assignment: Mapping[str, int]) -> IntArray:
    """The stage of each compute node. PartitionError if the names are not exactly the compute nodes' names."""
    names = [graph.trace.nodes[i].name for i in graph.compute.tolist()]
    missing = [name for name in names if name not in assignment]
    known = set(names)
    unknown = [name for name in assignment if name not in known]
    problems = [f"no stage for node {name}" for name in missing] + [
        f"node {name} computes nothing in this trace" for name in unknown
    ]
    _report_on_graph("expected a stage for every node that computes", problems)
    return np.asarray([assignment[name] for name in names], dtype=np.int64)


def check_stages(graph: Graph, clusters: Clusters, stage_of: IntArray, num_stages: int) -> None:
    """`check_assignment` on stages by rank."""
    nodes = graph.trace.nodes

    def stage(position: int) -> int:
        return int(stage_of[graph.rank[position]])

    _report_on_graph(
        f"expected stages from 0 to {num_stages - 1}",
        [
            f"node {nodes[i].name} is on stage {stage(i)}"
            for i in graph.compute.tolist()
            if not 0 <= stage(i) < num_stages
        ],
    )
    used = np.bincount(stage_of, minlength=num_stages)
    _report_on_graph(
        "expected every stage to run at least one node",
        [f"stage {s} is empty" for s in np.flatnonzero(used == 0).tolist()],
    )
    _report_on_graph(
        "expected every node on the stage of its inputs or a later one",
        [
            f"{nodes[u].name} (stage {stage(u)}) is read by {nodes[w].name} (stage {stage(w)})"
            for u, w in graph.dependencies()
            if stage(u) > stage(w)
        ],
    )
    _report_on_graph(
        "expected nodes joined by in-place writes or by a result that is no tensor to share a stage",
        [
            f"{nodes[members[0]].name} (stage {stage(members[0])}) and {nodes[other].name} (stage {stage(other)})"
            for members in clusters.members
            for other in members[1:]
            if stage(other) != stage(members[0])
        ],
    )


def _report_on_graph(expected: str, problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise PartitionError(f"{expected}, found: {'; '.join(problems[:_SHOWN])}{more}")


def _stages_that_need_nodes(
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


def _reads_of_graph_stages(graph: Graph, needed: Mapping[int, set[int]], again: list[set[int]]) -> list[list[int]]:
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


def _graph_edges(trace: Trace, carried: Mapping[tuple[int, int], list[int]]) -> tuple[Edge, ...]:
    """The edges of the graph, with the bytes of values and gradients that cross."""
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
