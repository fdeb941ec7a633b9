"""A plan for a new trace of the same model: every module stays on its stage.

A trace belongs to one input signature and one mode. When either changes, the model is traced again, but parameters must not move
between ranks. A node goes, in this order, to the stage of
    - the planned node of the same name, when both traces have the same nodes;
    - the innermost module call around it that lay wholly in one stage of the plan (the k-th call of a module follows its k-th call);
    - the stage that holds a parameter which it reads;
    - the last of its producers' stages or, if it depends on inputs alone, the first of its consumers' stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from smpc.errors import PartitionError
from smpc.partitioner.plan import Plan
from smpc.tracer.ir import Node, NodeKind, Trace

_NO_STAGE = (NodeKind.PLACEHOLDER, NodeKind.GET_ATTR)


def follow(trace: Trace, planned: Trace, plan: Plan) -> dict[str, int]:
    """Node name -> stage, for every node of `trace` that computes; `plan` was made for `planned`.

    Raises PartitionError when a module would have to run before what it depends on.
    """
    nodes = [node for node in trace.nodes if node.kind not in _NO_STAGE]
    before = [node for node in planned.nodes if node.kind not in _NO_STAGE]
    if [(node.name, node.target) for node in nodes] == [(node.name, node.target) for node in before]:
        return dict(plan.assignment)
    stages = _by_module(trace, planned, plan, nodes)
    _fill(nodes, stages)
    for node in nodes:
        late = [name for name in node.inputs if stages.get(name, 0) > stages[node.name]]
        if late:
            module = trace.calls[node.call].fqn or "the model"
            raise PartitionError(
                f"with these inputs {module} ({node.name}, stage {stages[node.name]}) needs {late[0]} of stage "
                f"{stages[late[0]]}, which runs later in the present partition; partition the model for these inputs instead"
            )
    return stages


def fits(plan: Plan, trace: Trace) -> bool:
    """Whether a plan that was made for another trace gives every operation of this one a stage."""
    return [node.name for node in trace.nodes if node.kind not in _NO_STAGE] == [name for name, _ in plan.assignment]


def _by_module(trace: Trace, planned: Trace, plan: Plan, nodes: list[Node]) -> dict[str, int]:
    """Stages of the nodes inside modules, or reading parameters, that have one."""
    of_call = _stages_of_calls(planned, plan)
    calls = list(_occurrences(trace))
    of_parameter: dict[str, int] = {}
    for stage in plan.stages:
        for name in stage.parameters:
            of_parameter.setdefault(name, stage.index)
    found: dict[str, int] = {}
    for node in nodes:
        call = node.call
        while call > 0 and calls[call] not in of_call:
            call = trace.calls[call].parent
        if call > 0:
            found[node.name] = of_call[calls[call]]
            continue
        reads = (trace.node(name) for name in node.inputs)
        held = [
            of_parameter[read.target]
            for read in reads
            if read.kind is NodeKind.GET_ATTR and read.target in of_parameter
        ]
        if held:
            found[node.name] = max(held)
    return found


def _stages_of_calls(planned: Trace, plan: Plan) -> dict[tuple[str, int], int]:
    """(module, how many calls of it came before) -> stage, for the calls that lie wholly in one stage."""
    assignment = dict(plan.assignment)
    found: dict[tuple[str, int], int] = {}
    for key, call in zip(_occurrences(planned), planned.calls, strict=True):
        span = planned.nodes[call.first : call.last]
        stages = {assignment[node.name] for node in span if node.name in assignment}
        if len(stages) == 1:
            found[key] = stages.pop()
    return found


def _occurrences(trace: Trace) -> Iterator[tuple[str, int]]:
    count: Counter[str] = Counter()
    for call in trace.calls:
        yield call.fqn, count[call.fqn]
        count[call.fqn] += 1


def _fill(nodes: list[Node], stages: dict[str, int]) -> None:
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
