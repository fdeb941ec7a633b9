"""Rotary position embedding, written out, becomes `smpc.kernels.rotary.rotary`.

    x * cos + rotated(x) * sin

    rotated(x) = cat((-x[..., half:], x[..., :half]), -1)               Llama and most others
    rotated(x) = stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)    GPT-J, Cohere: neighbours are pairs

x may be the first features of a wider tensor, the rest of which is joined again (GPT-NeoX). The op takes one column of cos and
sin for each pair where models have two: the rewrite looks for the operation that doubles them, and the check includes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smpc.codegen.rewrite.kernels.pattern_graph import KernelCall, NodeUsers, Refusal, Replacement, Rewrite
from smpc.tracer.constants import Ref, references

_OP = "rotary"
_TARGET = "smpc.kernels.rotary.rotary"
# The operations that make a table from its doubled angles, one tensor in, column by column.
_POINTWISE = ("cos", "sin", "mul", "cast", "contiguous", "unsqueeze", "add", "div", "expand")


@dataclass(frozen=True, slots=True)
class _Turned:
    """`total` = x * cos + rotated(x) * sin."""

    total: str
    x: str
    cos: str
    sin: str
    interleaved: bool


def find_rotary(graph: NodeUsers) -> Iterator[Replacement | Refusal]:
    """Every rotation of a trace."""
    for name in graph.find("neg"):
        turned = _read_from_half(graph, name)
        if turned is not None:
            yield _rotary_replacement(graph, turned)


REWRITE = Rewrite(_OP, find_rotary)


def _read_from_half(graph: NodeUsers, neg: str) -> _Turned | None:
    """Reads forwards from the negated half."""
    joined = graph.sole_user(neg)
    interleaved = joined is not None and graph.op(joined) == "stack"
    if joined is None or graph.op(joined) not in ("cat", "stack") or graph.node(joined).inputs[0] != neg:
        return None
    parts = [graph.node(part).inputs[0] for part in (graph.node(neg).inputs[0], *graph.node(joined).inputs[1:])]
    parts = [graph.node(part).inputs[0] if graph.op(part) in ("chunk", "split") else part for part in parts]
    rotated = graph.sole_user(joined) if interleaved else joined
    scaled = None if rotated is None else graph.sole_user(rotated)
    total = None if scaled is None else graph.sole_user(scaled)
    if rotated is None or scaled is None or total is None or len(parts) != 2 or parts[0] != parts[1]:
        return None
    if graph.op(scaled) != "mul" or graph.op(total) != "add":
        return None
    x, sin, plain = parts[0], graph.other(scaled, rotated), graph.other(total, scaled)
    cos = None if plain is None or graph.op(plain) != "mul" else graph.other(plain, x)
    return None if sin is None or cos is None else _Turned(total, x, cos, sin, interleaved)


def _rotary_replacement(graph: NodeUsers, turned: _Turned) -> Replacement | Refusal:
    """The rotary kernel in the place of operations that turn x, or why it cannot be."""
    result, x = _with_rest(graph, turned)
    shape = graph.shape(x)
    table_shape = graph.shape(turned.cos)
    if len(shape) != 4:
        return Refusal(_OP, result, f"x has {len(shape)} dimensions, expected 4")
    if any(graph.spec(table).requires_grad for table in (turned.cos, turned.sin)):
        return Refusal(_OP, result, "its tables need gradients")
    padded = (1,) * (4 - len(table_shape)) + table_shape
    positions = next((dim for dim, head in ((2, 1), (1, 2)) if padded[dim] == shape[dim] and padded[head] == 1), None)
    if positions is None or padded[0] not in (1, shape[0]):
        return Refusal(_OP, result, f"its tables {list(table_shape)} have no row for each position of x {list(shape)}")
    calls: list[KernelCall] = []
    tables: list[Ref] = []
    given: dict[str, None] = {}
    for table in (turned.cos, turned.sin):
        source = _doubled_table(graph, table)
        if source is None:
            return Refusal(_OP, result, "nothing shows that its tables hold every column twice")
        flat = _flat_rotary_table(graph, table, 1 if positions == 2 else 2)
        if flat is None:
            calls.append(KernelCall("torch.Tensor.squeeze", (Ref(table), 1 if positions == 2 else 2)))
            flat = f"#{len(calls) - 1}"
        tables.append(Ref(flat))
        given |= dict.fromkeys(graph.between(table, (source,)))
    options: list[tuple[str, object]] = [("interleaved", True)] if turned.interleaved else []
    options += [("seq_dim", positions), ("doubled", True)]
    calls.append(KernelCall(_TARGET, (Ref(x), *tables), tuple(options)))
    kept = tuple(sorted(given, key=graph.trace.position))
    return Replacement(_OP, graph.between(result, (x, turned.cos, turned.sin)), tuple(calls), kept)


def _with_rest(graph: NodeUsers, turned: _Turned) -> tuple[str, str]:
    """The result and the input, with the features that are not turned if there are any."""
    joined = graph.sole_user(turned.total)
    if joined is None or graph.op(joined) != "cat" or graph.op(turned.x) != "getitem":
        return turned.total, turned.x
    parts, base = graph.node(joined).inputs, graph.node(turned.x).inputs[0]
    if len(parts) != 2 or parts[0] != turned.total or graph.op(parts[1]) != "getitem":
        return turned.total, turned.x
    whole = graph.node(parts[1]).inputs[0] == base and graph.shape(joined) == graph.shape(base)
    return (joined, base) if whole else (turned.total, turned.x)


def _flat_rotary_table(graph: NodeUsers, table: str, head: int) -> str | None:
    """The table without the dimension of heads: itself, or what got that dimension; None if it has to be taken out."""
    if len(graph.shape(table)) < 4:
        return table
    if graph.op(table) == "unsqueeze" and graph.argument(table, 1, "dim") in (head, head - 4):
        return graph.node(table).inputs[0]
    return None


def _doubled_table(graph: NodeUsers, table: str) -> str | None:
    """The input of the operation that doubles the columns of a table."""
    name = table
    while True:
        inputs = graph.node(name).inputs
        if graph.op(name) == "cat":
            items = references(graph.argument(name, 0, "tensors"))
            return items[0] if len(items) == 1 else None
        if graph.op(name) == "repeat_interleave":
            return inputs[0]
        if graph.op(name) in ("flatten", "reshape", "view") and inputs and graph.op(inputs[0]) == "stack":
            return graph.node(inputs[0]).inputs[0] if len(graph.node(inputs[0]).inputs) == 1 else None
        if graph.op(name) != "getitem" and (graph.op(name) not in _POINTWISE or len(inputs) != 1):
            return None
        name = inputs[0]
