"""The model as a tree of modules, with where each runs and what it costs.

A tree node stands for all calls of one module by one parent: a layer that is called twelve times is there once, with the
FLOPs of twelve calls. Parameters that a module and its descendants hold are counted once each, tied ones too, so the
children of a node may add up to more than the node. Modules that are never called (a ModuleList) have no node of their
own: their children are their parent's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from smpc.partitioner.plan import Plan
from smpc.tracer.ir import Trace


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module: `stages` run its operations; parameters are those it holds, FLOPs its forward's for one microbatch."""

    name: str  # its FQN; "" is the model itself
    class_name: str
    stages: tuple[int, ...]
    num_parameters: int
    forward_flops: int
    children: tuple[ModuleNode, ...]


class _Draft:
    """A tree node while calls are still being added to it."""

    def __init__(self, name: str, class_name: str) -> None:
        self.name = name
        self.class_name = class_name
        self.flops = 0
        self.stages: set[int] = set()
        self.children: dict[str, _Draft] = {}


def module_tree(trace: Trace, plan: Plan) -> ModuleNode:
    """The tree of a traced model under its plan."""
    flops = list(itertools.accumulate((node.flops for node in trace.nodes), initial=0))
    assignment = dict(plan.assignment)
    stage_of = [assignment.get(node.name, -1) for node in trace.nodes]
    drafts: list[_Draft] = []
    for call in trace.calls:
        if call.parent < 0:
            draft = _Draft(call.fqn, call.class_name)
        else:
            siblings = drafts[call.parent].children
            draft = siblings.setdefault(call.fqn, _Draft(call.fqn, call.class_name))
        draft.flops += flops[call.last] - flops[call.first]
        draft.stages.update(stage for stage in stage_of[call.first : call.last] if stage >= 0)
        drafts.append(draft)
    return _finish(drafts[0], _parameters_below(trace))


def _finish(draft: _Draft, parameters: dict[str, int]) -> ModuleNode:
    return ModuleNode(
        draft.name,
        draft.class_name,
        tuple(sorted(draft.stages)),
        parameters.get(draft.name, 0),
        draft.flops,
        tuple(_finish(child, parameters) for child in draft.children.values()),
    )


def _parameters_below(trace: Trace) -> dict[str, int]:
    """For every module that holds parameters, itself or in its descendants: how many elements, each storage once."""
    found: dict[str, dict[int, int]] = {}
    for index, state in enumerate(trace.state):
        if not state.is_parameter:
            continue
        storage = state.storage if state.storage >= 0 else -1 - index
        for name in state.names:
            parts = name.split(".")
            for depth in range(len(parts)):
                found.setdefault(".".join(parts[:depth]), {})[storage] = state.spec.num_elements
    return {module: sum(elements.values()) for module, elements in found.items()}
