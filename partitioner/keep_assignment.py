"""A plan for a new trace of the same model: every module stays on its stage.

A trace belongs to one input signature and one mode. When either changes, the model is traced again, but parameters must not move
between ranks, nor buffers that forward writes, nor random generators. A node that uses one of these has to run on a rank that holds
it. Every other node prefers, in this order, the stage of
    - the planned node of the same name, when both traces have the same nodes;
    - the innermost module call around it that lay wholly in one stage of the plan (the k-th call of a module follows its k-th call);
    - the planned node that it corresponds to, when the module call was cut: the longest common runs of operations are matched;
    - the last of its producers' stages or, if it depends on inputs alone, the first of its consumers' stages;
and takes the nearest stage on which it runs after what it reads, and together with the nodes that write to the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher

import networkx as nx

from smpc.errors import PartitionError
from smpc.partitioner.graph.plan import Plan
from smpc.partitioner.graph.trace_graph import NO_STAGE, Graph, build_graph, find_clusters
from smpc.tracer.ir import Node, NodeKind, Trace
from smpc.tracer.state.state_use import StateUse

_OTHERWISE = (
    "in the present partition, which the inputs of the first program have decided; begin with inputs like these, or partition the model "
    "for these instead"
)


def follow(trace: Trace, planned: Trace, plan: Plan) -> dict[str, int]:
    """Node name -> stage, for every node of `trace` that computes; `plan` was made for `planned`.

    Raises PartitionError when a module would have to run before what it depends on.
    """
    nodes, before = _compute_nodes(trace), _compute_nodes(planned)
    if [(node.name, node.target) for node in nodes] == [(node.name, node.target) for node in before]:
        return dict(plan.assignment)
    wanted = _kept_preferred(trace, planned, plan)
    graph = build_graph(trace)
    return _Units(graph, _kept_allowed(graph, planned, plan), len(plan.stages)).assign(wanted)


def fits(plan: Plan, trace: Trace) -> bool:
    """Whether a plan that was made for another trace gives every operation of this one a stage."""
    return [node.name for node in _compute_nodes(trace)] == [name for name, _ in plan.assignment]


def _compute_nodes(trace: Trace) -> list[Node]:
    return [node for node in trace.nodes if node.kind not in NO_STAGE]


# -- where nodes prefer to be ------------------------------------------------------------------------------------------


def _kept_preferred(trace: Trace, planned: Trace, plan: Plan) -> dict[str, int]:
    """The stage that every node prefers, whether or not it can run there."""
    of_call, matched = _stages_of_calls(planned, plan), _kept_matched(trace, planned, plan)
    calls = list(_module_occurrences(trace))
    found: dict[str, int] = {}
    nodes = _compute_nodes(trace)
    for node in nodes:
        call = node.call
        while call > 0 and calls[call] not in of_call:
            call = trace.calls[call].parent
        if call > 0:
            found[node.name] = of_call[calls[call]]
        elif node.name in matched:
            found[node.name] = matched[node.name]
    _fill_stages(nodes, found)
    return found


def _stages_of_calls(planned: Trace, plan: Plan) -> dict[tuple[str, int], int]:
    """(module, how many calls of it came before) -> stage, for the calls that are wholly in one stage."""
    assignment = dict(plan.assignment)
    found: dict[tuple[str, int], int] = {}
    for key, call in zip(_module_occurrences(planned), planned.calls, strict=True):
        span = planned.nodes[call.first : call.last]
        stages = {assignment[node.name] for node in span if node.name in assignment}
        if len(stages) == 1:
            found[key] = stages.pop()
    return found


def _kept_matched(trace: Trace, planned: Trace, plan: Plan) -> dict[str, int]:
    """Stages of the planned nodes that correspond to nodes of the trace: the same operations, in the same order, of the same call."""
    assignment, earlier = dict(plan.assignment), _nodes_of_calls(planned)
    found: dict[str, int] = {}
    for key, nodes in _nodes_of_calls(trace).items():
        known = earlier.get(key, [])
        before, now = ([(node.kind.value, node.target) for node in side] for side in (known, nodes))
        for match in SequenceMatcher(None, before, now, autojunk=False).get_matching_blocks():
            for i in range(match.size):
                found[nodes[match.b + i].name] = assignment[known[match.a + i].name]
    return found


def _nodes_of_calls(trace: Trace) -> dict[tuple[str, int], list[Node]]:
    """The compute nodes of every call, without the nodes of calls inside it."""
    calls = list(_module_occurrences(trace))
    found: dict[tuple[str, int], list[Node]] = {}
    for node in _compute_nodes(trace):
        found.setdefault(calls[node.call], []).append(node)
    return found


def _module_occurrences(trace: Trace) -> Iterator[tuple[str, int]]:
    """The name of each module call and how often it has occurred before."""
    count: Counter[str] = Counter()
    for call in trace.calls:
        yield call.fqn, count[call.fqn]
        count[call.fqn] += 1


def _fill_stages(nodes: list[Node], stages: dict[str, int]) -> None:
    """Stages for the rest: after the producers, or, without any, at the first consumer. Writes into `stages`."""
    for node in nodes:
        producers = [stages[name] for name in node.inputs if name in stages]
        if node.name not in stages and producers:
            stages[node.name] = max(producers)
    first_use: dict[str, int] = {}
    for node in reversed(nodes):
        if node.name not in stages:
            stages[node.name] = first_use.get(node.name, 0)
        for name in node.inputs:
            first_use[name] = min(first_use.get(name, stages[node.name]), stages[node.name])


# -- where they can be -------------------------------------------------------------------------------------------------


def _kept_allowed(graph: Graph, planned: Trace, plan: Plan) -> dict[int, frozenset[int]]:
    """By position, the stages on whose ranks all is that a node uses and that may not move; without an entry, all stages."""
    stages_on: dict[int, set[int]] = {}
    for stage in plan.stages:
        stages_on.setdefault(stage.rank, set()).add(stage.index)
    written = StateUse.of(planned).written | StateUse.of(graph.trace).written
    holding: dict[str, set[int]] = {}
    for stage in plan.stages:
        for name in (*stage.parameters, *(name for name in stage.buffers if name in written)):
            holding.setdefault(name, set()).update(stages_on[stage.rank])
    found: dict[int, frozenset[int]] = {}

    def restrict(position: int, stages: set[int]) -> None:
        found[position] = found.get(position, frozenset(range(len(plan.stages)))) & stages

    for index, state in enumerate(graph.trace.state):
        stages = set[int]().union(*(holding.get(name, ()) for name in state.names))
        for position in graph.state_users[index] if stages else ():
            if _kept_uses(graph, position, index):
                restrict(position, stages)
    drawn = _kept_generators(planned, dict(plan.assignment))
    for position, node in enumerate(graph.trace.nodes):
        for name in node.mutates:
            target = _kept_generator(graph.trace, name)
            if target in drawn:
                restrict(position, {drawn[target]})
    return found


def _kept_uses(graph: Graph, position: int, index: int) -> bool:
    """Whether a node itself uses a parameter or buffer; state that nothing uses has an owner all the same."""
    node = graph.trace.nodes[position]
    if node.kind is NodeKind.CALL_MODULE:
        return any(name.startswith(f"{node.target}.") for name in graph.trace.state[index].names)
    return index in (graph.state_of[position], *(graph.state_of[i] for i in graph.inputs[position]))


def _kept_generators(planned: Trace, assignment: dict[str, int]) -> dict[str, int]:
    """Random generator -> the stage that draws from it."""
    drawn = ((_kept_generator(planned, name), node.name) for node in planned.nodes for name in node.mutates)
    return {target: assignment[name] for target, name in drawn if target and name in assignment}


def _kept_generator(trace: Trace, name: str) -> str:
    """The random generator that a node reads; "" if it reads something else."""
    node = trace.node(name)
    return node.target if node.kind is NodeKind.GET_ATTR and node.spec is None else ""


class _Units:
    """Nodes that have to share a stage, each with the stages on which it can run."""

    def __init__(self, graph: Graph, allowed: dict[int, frozenset[int]], num_stages: int) -> None:
        self._graph, self._allowed = graph, allowed
        together: nx.DiGraph[int] = nx.DiGraph()
        together.add_nodes_from(graph.compute.tolist())
        together.add_edges_from(graph.dependencies())
        for members in find_clusters(graph).members:
            nx.add_cycle(together, members)
        self._dag = nx.condensation(together)
        self._members = {unit: sorted(found) for unit, found in self._dag.nodes(data="members")}
        self._order = list(nx.lexicographical_topological_sort(self._dag, key=lambda unit: self._members[unit][0]))
        everywhere = frozenset(range(num_stages))
        self._stages = {
            unit: everywhere.intersection(*(allowed.get(position, everywhere) for position in members))
            for unit, members in self._members.items()
        }

    def assign(self, wanted: dict[str, int]) -> dict[str, int]:
        """The stage of every node by name: the nearest to its preference on which its unit can run, not before the unit's inputs."""
        nodes = self._graph.trace.nodes
        latest = self._latest()
        chosen: dict[int, int] = {}
        for unit in self._order:
            first = max((chosen[before] for before in self._dag.predecessors(unit)), default=0)
            best = max(wanted[nodes[position].name] for position in self._members[unit])
            possible = (stage for stage in self._stages[unit] if first <= stage <= latest[unit])
            chosen[unit] = min(possible, key=lambda stage: (abs(stage - best), stage))
        of_node = {position: chosen[unit] for unit, members in self._members.items() for position in members}
        return {nodes[position].name: of_node[position] for position in self._graph.compute.tolist()}

    def _latest(self) -> dict[int, int]:
        """The last stage on which each unit can run, so that all that reads it can run, too. PartitionError if there is none."""
        earliest: dict[int, int] = {}
        for unit in self._order:
            before = max(self._dag.predecessors(unit), key=lambda i: earliest[i], default=None)
            first = 0 if before is None else earliest[before]
            possible = [stage for stage in self._stages[unit] if stage >= first]
            if not possible:
                raise self._impossible(unit, before, first)
            earliest[unit] = min(possible)
        latest: dict[int, int] = {}
        for unit in reversed(self._order):
            last = min((latest[after] for after in self._dag.successors(unit)), default=max(self._stages[unit]))
            latest[unit] = max(stage for stage in self._stages[unit] if stage <= last)
        return latest

    def _impossible(self, unit: int, before: int | None, first: int) -> PartitionError:
        """The reason why a unit cannot run anywhere."""
        held = [(position, self._allowed[position]) for position in self._members[unit] if position in self._allowed]
        position, stages = held[0]
        if self._stages[unit] and before is not None:
            late = self._graph.trace.nodes[self._members[before][-1]].name
            return PartitionError(
                f"with these inputs {self._place(position)}, stage {max(stages)}) needs {late} of stage {first}, "
                f"which runs later {_OTHERWISE}"
            )
        places = " and ".join(f"{self._place(i)}, {_kept_stages_by_name(stages)})" for i, stages in held)
        return PartitionError(
            f"with these inputs {places} share memory that is written or a result that is no tensor, "
            f"and use parameters or buffers that are on different stages {_OTHERWISE}"
        )

    def _place(self, position: int) -> str:
        node = self._graph.trace.nodes[position]
        return f"{self._graph.trace.calls[node.call].fqn or 'the model'} ({node.name}"


def _kept_stages_by_name(stages: frozenset[int]) -> str:
    return f"stage {', '.join(map(str, sorted(stages)))}" if stages else "several stages"
