"""A trace in index form: what the partitioner asks about a trace, looked up once.

Terms
    position    index into Trace.nodes
    compute     nodes that belong to a stage: calls and attribute writes; inputs and attribute reads belong to none
    rank        index into the compute nodes, in execution order; `rank[position]` is -1 for the others
    cluster     compute nodes that must share a stage (see `smpc.partitioner.graph.clusters`)

Parameters and buffers are known by index into Trace.state. A call_module node uses all the state below its module.
State that only dead nodes read belongs to the first of these, as the module around it may be called whole; state that no node reads to
the first node of the nearest enclosing module that runs. So every parameter has an owner.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from smpc.errors import PartitionError
from smpc.partitioner.costs.cost import Workspace
from smpc.partitioner.problem import IntArray
from smpc.tracer.ir import ModuleCall, NodeKind, Trace

NO_STAGE = (NodeKind.PLACEHOLDER, NodeKind.GET_ATTR)


@dataclass(frozen=True)
class Graph:
    """Index form of `trace`; tuples are by position unless said otherwise."""

    trace: Trace
    inputs: tuple[tuple[int, ...], ...]  # positions of what a node reads
    consumers: tuple[tuple[int, ...], ...]  # positions of the live nodes that read it, in order
    compute: IntArray  # positions of the compute nodes
    rank: IntArray  # by position: index into `compute`, or -1
    state_of: tuple[int, ...]  # state that a get_attr or set_attr node names; -1: none (a constant tensor)
    state_users: tuple[tuple[int, ...], ...]  # by state: positions of the compute nodes that use it, in order
    outputs: tuple[int, ...]  # positions of what the model returns
    call_spans: IntArray  # by call: first and last + 1 rank of its compute nodes, shape [calls, 2]
    saved: tuple[
        tuple[int, ...], ...
    ]  # storages kept for the backward pass, in regions that are computed again by the first node alone
    workspace: Workspace | None = None  # by position: what nodes make and drop while they work, where that was measured

    @property
    def num_compute(self) -> int:
        """Number of compute nodes."""
        return len(self.compute)

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

        A pipeline sums those of later stages first, so a placement with stage(u) <= stage(w) gives the same bits. For two
        summands the order makes no difference; the loss counts as one if the model returns the value.
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
    for position in reversed(compute.tolist()):  # so that of dead nodes the first stays
        for name in trace.nodes[position].inputs if trace.nodes[position].name not in trace.live else ():
            dead_users[state_of[trace.position(name)]] = position
    for i, state in enumerate(trace.state):
        if not users[i] and i not in returned:
            users[i].add(dead_users.get(i, _owner(state.name, first_of, int(compute[0]))))
    return tuple(tuple(sorted(found)) for found in users)


def _owner(name: str, first_of: dict[str, int], otherwise: int) -> int:
    """The first compute node of the nearest enclosing module that runs."""
    while name:
        name = name.rpartition(".")[0]
        if name in first_of:
            return first_of[name]
    return otherwise


def largest_whole_calls(graph: Graph, stage_of: IntArray, stage: int) -> tuple[str, ...]:
    """FQNs of the largest module calls whose compute nodes all run on `stage`, in execution order, each once.

    `stage_of` is by rank.
    """
    whole: list[bool] = []
    found: list[tuple[int, str]] = []
    mine = np.concatenate(([0], np.cumsum(stage_of == stage)))
    for call, (first, last) in zip(graph.trace.calls, graph.call_spans.tolist(), strict=True):
        inside = bool(last > first and mine[last] - mine[first] == last - first)
        whole.append(inside)
        if inside and not _inside_whole(call, whole):
            found.append((first, call.fqn))
    for position, node in enumerate(graph.trace.nodes):
        if node.kind is NodeKind.CALL_MODULE and stage_of[graph.rank[position]] == stage and not whole[node.call]:
            found.append((int(graph.rank[position]), node.target))
    return tuple(dict.fromkeys(fqn for _, fqn in sorted(found, key=lambda pair: pair[0])))


def _inside_whole(call: ModuleCall, whole: list[bool]) -> bool:
    return call.parent >= 0 and whole[call.parent]
