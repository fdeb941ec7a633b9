"""Equal blocks of a trace: what is decided for one layer holds for all like it.

Two module calls are equal if their nodes agree one by one: same operations, constants and specs, the same values inside, values from
outside in the same order and with the same specs, parameters of the same names below the module. They count as equal blocks if their
names differ in numbers alone (`h.0` and `h.1`, not `q` and `k`) and they call modules themselves: the layers of one feed-forward network
are to differ even where they are equal. Of nested calls the outermost count.

    >>> representatives(trace)            # doctest: +SKIP
    (0, 1, 2, 3, 2, 3, 2, 3, 8)           # nodes 2 and 3 are a block; it comes again at 4 and at 6
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from smpc.tracer.ir import ModuleCall, Node, NodeKind, Trace
from smpc.tracer.literals import map_references


def representatives(trace: Trace) -> tuple[int, ...]:
    """For each node, by position, the position of the first one that plays its part."""
    found = list(range(len(trace.nodes)))
    composite = dict.fromkeys(call.parent for call in trace.calls)
    signatures = [_signature(trace, call) if index in composite else "" for index, call in enumerate(trace.calls)]
    count = Counter(signatures)
    first_of: dict[str, ModuleCall] = {}
    end = 0
    for call, signature in zip(trace.calls, signatures, strict=True):
        if not signature or count[signature] < 2 or call.first < end or call.first == call.last:
            continue
        end = call.last
        first = first_of.setdefault(signature, call)
        for offset in range(call.last - call.first):
            found[call.first + offset] = first.first + offset
    return tuple(found)


def _signature(trace: Trace, call: ModuleCall) -> str:
    outside: dict[str, int] = {}
    span = range(call.first, call.last)

    def named(name: str) -> Any:
        position = trace.position(name)
        if position in span:
            return position - call.first
        return "outside", outside.setdefault(name, len(outside)), _spec(trace.node(name))

    rows = []
    for node in trace.nodes[call.first : call.last]:
        target = node.target
        if node.kind in (NodeKind.GET_ATTR, NodeKind.SET_ATTR, NodeKind.CALL_MODULE):
            target = target.removeprefix(f"{call.fqn}.")
        arguments = map_references((node.args, dict(node.kwargs)), named)
        rows.append(repr((node.kind.value, target, arguments, _spec(node), bool(node.mutates), node.grad_enabled)))
    return "\n".join([re.sub(r"\d+", "*", call.fqn), call.class_name, *rows])


def _spec(node: Node) -> Any:
    return None if node.spec is None else (node.spec.shape, node.spec.dtype, node.spec.requires_grad)
