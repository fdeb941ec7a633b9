"""The sharding rules of experts that are one module with parameters for all of them.

input    gate_up_proj, its bias    down_proj    its bias    output
B        S(2I)                     S(I)         P           P         each rank a slice of every expert

The slices of gate_up_proj are in two blocks where all of the gate comes first, in one where gate and up alternate: which of the two it is
`fused_experts` says. A rank has the last bias whole, and all but the first take zeros for it: it is added once.

input    every parameter    output
B        S(0)               P           each rank some of the experts: `by_expert`, for modules of which it is known that this is right
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from smpc.codegen.rewrite.tensor_parallel.layouts import BROADCAST, PARTIAL, Layout
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Rule, Strategy, of_module
from smpc.tracer.ir import Node

_WEIGHTS, _BIASES = ["down_proj", "gate_up_proj"], ["down_proj_bias", "gate_up_proj_bias"]


def experts(facts: Facts, node: Node) -> Iterator[Strategy]:
    """A module called whole that holds fused experts: split along I.

    They are gate_up_proj [E, 2I, H] and down_proj [E, H, I], or, where rows are multiplied from the left, [E, H, 2I] and [E, I, H].
    """
    own = {s.name.removeprefix(f"{node.target}."): s for s in facts.trace.state if s.name.startswith(f"{node.target}.")}
    spec = facts.spec(node.name)
    if sorted(own) not in (_WEIGHTS, sorted(_WEIGHTS + _BIASES)) or spec is None or not node.inputs:
        return
    if any(facts.read_inside[state.name] > 1 or facts.is_read(state.name) for state in own.values()):
        return  # others read it as it is
    up, down = own["gate_up_proj"], own["down_proj"]
    if len(down.spec.shape) != 3:
        return
    num_experts, *sizes = down.spec.shape
    for dim in (1, 2):  # the one of gate_up_proj that has 2I, where down_proj has H
        hidden, inner = sizes if dim == 1 else reversed(sizes)
        expected = (2 * inner, hidden) if dim == 1 else (hidden, 2 * inner)
        if up.spec.shape != (num_experts, *expected) or not inner or inner % facts.degree:
            continue
        for blocks in ((inner, inner), ()):
            layouts = {"gate_up_proj": Layout.sharded(dim, blocks), "down_proj": Layout.sharded(3 - dim)}
            if len(own) > len(layouts):
                layouts |= {"gate_up_proj_bias": Layout.sharded(1, blocks), "down_proj_bias": PARTIAL}
            state = tuple((own[name].name, layout) for name, layout in layouts.items())
            yield Strategy((BROADCAST,) * len(node.inputs), PARTIAL, state)


def by_expert_rules(modules: Mapping[str, tuple[str, ...]]) -> dict[str, Rule]:
    """The rules, for `Facts.more`, of modules of which ranks may have whole experts; by name, the attributes that count experts."""

    def rule(facts: Facts, node: Node) -> Iterator[Strategy]:
        own = [state for state in facts.trace.state if state.name.startswith(f"{node.target}.") and state.is_parameter]
        if not own or not node.inputs or any(facts.is_read(s.name) or facts.read_inside[s.name] > 1 for s in own):
            return
        if any(not state.spec.shape or state.spec.shape[0] % facts.degree for state in own):
            return
        state = tuple((each.name, Layout.sharded(0)) for each in own)
        yield Strategy((BROADCAST,) * len(node.inputs), PARTIAL, state, counts=modules[node.target])

    return {of_module(name): rule for name in modules}
