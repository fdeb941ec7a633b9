"""The sharding rules of experts that are one module with parameters for all of them.

input    gate_up_proj, its bias    down_proj    its bias    output
B        S(2I)                     S(I)         P           P         each rank a slice of every expert

The slices of gate_up_proj are in two blocks where all of the gate comes first, in one where gate and up alternate: which of the two it is
`fused_experts` says. A rank has the last bias whole, and all but the first take zeros for it: it is added once.

input    every parameter    output
B        S(0)               P           each rank some of the experts: `by_expert`, for modules of which it is known that this is right
R        S(0), of some      R           so inside of a block that is called whole: `in_segments`, which puts results together itself
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from smpc.codegen.rewrite.tensor_parallel.layouts import BROADCAST, PARTIAL, REPLICATED, Layout
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
            yield Strategy((BROADCAST,) * len(node.inputs), PARTIAL, state, whole_bytes=_row_bytes(facts, node))


def _row_bytes(facts: Facts, node: Node) -> int:
    """Bytes of one row for each token and each of its experts, as experts of which a rank has slices get and return them; 0: not known."""
    out = facts.spec(node.name)
    chosen = [
        spec
        for name in node.inputs
        if (spec := facts.spec(name)) is not None and not spec.torch_dtype.is_floating_point
    ]
    if out is None or len(chosen) != 1:
        return 0
    return chosen[0].num_elements * out.num_bytes // max(1, out.num_elements) * out.shape[-1]


Counts = Mapping[str, tuple[str, ...]]  # by the name of a module, the attributes that count experts


def whole_expert_rules(by_expert: Counts, segmented: Counts) -> Mapping[str, Rule]:
    """The rules, for `Facts.more`, of modules in which ranks may have whole experts; see `StylePlan`."""

    def summands(facts: Facts, node: Node) -> Iterator[Strategy]:
        if node.inputs and (state := _by_expert(facts, node.target)):
            yield Strategy((BROADCAST,) * len(node.inputs), PARTIAL, state, experts=(("", by_expert[node.target]),))

    def within(facts: Facts, node: Node) -> Iterator[Strategy]:
        inside = [name for name in segmented if f"{name}.".startswith(f"{node.target}.") and _by_expert(facts, name)]
        if not inside or not node.inputs:
            return
        state = tuple(own for name in inside for own in _by_expert(facts, name))
        experts = tuple((name[len(node.target) + 1 :], segmented[name]) for name in inside)
        sent, back = _sent_inside(facts, node, inside)
        yield Strategy((REPLICATED,) * len(node.inputs), REPLICATED, state, sent, back, experts=experts)

    parts = [name.split(".") for name in segmented]
    around = (".".join(own[:end]) for own in parts for end in range(1, len(own) + 1))
    return {of_module(name): within for name in around} | {of_module(name): summands for name in by_expert}


def _by_expert(facts: Facts, module: str) -> tuple[tuple[str, Layout], ...]:
    """The layouts of a module's parameters if each rank has some of the experts; none if others read these, or ranks do not divide them."""
    own = [state for state in facts.trace.state if state.name.startswith(f"{module}.") and state.is_parameter]
    if any(facts.is_read(state.name) or facts.read_inside.get(state.name) != 1 for state in own):
        return ()
    if any(not state.spec.shape or state.spec.shape[0] % facts.degree for state in own):
        return ()
    return tuple((state.name, Layout.sharded(0)) for state in own)


def _sent_inside(facts: Facts, node: Node, inside: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes that a rank sends for the results of the products in a block, and for the gradients of their rows."""
    weights = [state.spec for state in facts.trace.state if state.name.startswith(tuple(f"{name}." for name in inside))]
    weights = [spec for spec in weights if len(spec.shape) == 3]
    elements = sum(spec.num_elements // spec.shape[0] for spec in weights)
    rows = node.flops // (2 * elements) if elements else 0
    each = tuple(
        round(rows * sum(spec.shape[1:]) / 2 * spec.torch_dtype.itemsize * 2 * (facts.degree - 1) / facts.degree)
        for spec in weights
    )
    return each, each
