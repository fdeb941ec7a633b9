"""The sharding rule of experts that are one module with parameters for all of them.

input    gate_up_proj    down_proj    output
B        S(2I)           S(I)         P         each rank a slice of every expert
"""

from __future__ import annotations

from collections.abc import Iterator

from smpc.codegen.rewrite.tensor_parallel.layouts import BROADCAST, PARTIAL, Layout
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy
from smpc.tracer.ir import Node


def experts(facts: Facts, node: Node) -> Iterator[Strategy]:
    """A module called whole that holds fused experts: split along I.

    They are gate_up_proj [E, 2I, H] and down_proj [E, H, I], or, where rows are multiplied from the left, [E, H, 2I] and [E, I, H].
    """
    own = {s.name.removeprefix(f"{node.target}."): s for s in facts.trace.state if s.name.startswith(f"{node.target}.")}
    spec = facts.spec(node.name)
    if sorted(own) != ["down_proj", "gate_up_proj"] or spec is None or not node.inputs:
        return
    up, down = own["gate_up_proj"], own["down_proj"]
    if any(facts.read_inside[state.name] > 1 or facts.is_read(state.name) for state in (up, down)):
        return  # others read it as it is
    if len(down.spec.shape) != 3:
        return
    num_experts, *sizes = down.spec.shape
    for dim in (1, 2):  # the one of gate_up_proj that has 2I, where down_proj has H
        hidden, inner = sizes if dim == 1 else reversed(sizes)
        expected = (2 * inner, hidden) if dim == 1 else (hidden, 2 * inner)
        if up.spec.shape == (num_experts, *expected) and inner and inner % facts.degree == 0:
            state = ((up.name, Layout.sharded(dim, (inner, inner))), (down.name, Layout.sharded(3 - dim)))
            yield Strategy((BROADCAST,) * len(node.inputs), PARTIAL, state)
