"""RMSNorm, written out or by torch's name, becomes `smpc.kernels.rms_norm.rms_norm`.

    x * rsqrt(mean(x ** 2, -1) + eps) * (weight + offset)

as Llama, T5, Qwen (offset 0) and Gemma (offset 1) write it, with 1 / sqrt or a power of -0.5 in place of rsqrt, squares as products,
casts to fp32 and back anywhere, and with or without a weight. `eps` and `offset` are the numbers that stand there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from smpc.codegen.rewrite.kernels.graph import Graph
from smpc.codegen.rewrite.kernels.replacement import Call, Refusal, Replacement, Rewrite
from smpc.tracer.ir import NodeKind
from smpc.tracer.literals import Ref

_OP = "rms_norm"
_TARGET = "smpc.kernels.rms_norm.rms_norm"


@dataclass(frozen=True, slots=True)
class _Root:
    """`name` = 1 / sqrt(mean(x ** 2) + eps), or with `divides` the root itself, to be divided by."""

    name: str
    x: str
    eps: float
    divides: bool


def find(graph: Graph) -> Iterator[Replacement | Refusal]:
    """Every RMSNorm of a trace."""
    for name in graph.find("rsqrt", "sqrt", "pow"):
        root = _root(graph, name)
        if root is not None:
            found = _written_out(graph, root)
            if found is not None:
                yield found
    for name in graph.find("rms_norm"):
        yield from _by_name(graph, name)


REWRITE = Rewrite(_OP, find)


def _root(graph: Graph, name: str) -> _Root | None:
    """Reads backwards from the root to the input."""
    inner = (
        graph.power(name, -0.5) or graph.power(name, 0.5) if graph.op(name) == "pow" else graph.tensor(name, 0, "input")
    )
    divides = graph.op(name) == "sqrt" or graph.power(name, 0.5) is not None
    if inner is None or graph.op(inner) != "add":
        return None
    summands = graph.scalar_and_tensor(inner)
    if summands is None or graph.op(summands[1]) != "mean" or not _is_over_last(graph, summands[1]):
        return None
    eps, mean = summands
    squares = graph.tensor(mean, 0, "input")
    base = None if squares is None else graph.power(squares, 2)
    return None if base is None else _Root(name, graph.uncast(base), eps, divides)


def _is_over_last(graph: Graph, mean: str) -> bool:
    dims = graph.argument(mean, 1, "dim")
    squares = graph.tensor(mean, 0, "input")
    last = len(graph.shape(squares)) - 1 if squares else 0
    keeps = graph.argument(mean, 2, "keepdim", False)
    return keeps is True and dims in (-1, last, (-1,), [-1], (last,), [last])


def _written_out(graph: Graph, root: _Root) -> Replacement | None:
    """Reads forwards from the root to the result."""
    scaled = _scaled(graph, root)
    if scaled is None:
        return None
    result, weight, offset = scaled, None, 0.0
    after = graph.reader(scaled)
    if after is not None and graph.op(after) == "mul":
        factor = next((name for name in graph.tensors(after) or () if graph.uncast(name) != graph.uncast(scaled)), None)
        read = None if factor is None else _weight(graph, factor, graph.shape(root.x)[-1:])
        if read is not None:
            (weight, offset), result = read, after
    result = graph.cast_back(result, graph.spec(root.x).dtype)
    inputs = (root.x,) if weight is None else (root.x, weight)
    options = (("eps", root.eps), *((("offset", offset),) if offset else ()))
    call = Call(_TARGET, (Ref(root.x), graph.shape(root.x)[-1:], None if weight is None else Ref(weight)), options)
    return Replacement(_OP, graph.between(result, inputs), (call,))


def _scaled(graph: Graph, root: _Root) -> str | None:
    """x times 1 / root, or x over the root."""
    for user in graph.users(root.name):
        operation, pair = graph.op(user), graph.tensors(user) if graph.op(user) in ("mul", "div") else None
        if operation == "cast":
            return _scaled(graph, replace(root, name=user))
        if root.divides and (operation == "reciprocal" or (operation == "div" and graph.operands(user)[0] in (1, 1.0))):
            return _scaled(graph, replace(root, name=user, divides=False))
        if pair is None or (operation == "div") != root.divides:
            continue
        x = pair[0] if root.divides else graph.other(user, root.name)
        if x is not None and graph.uncast(x) == root.x:
            return user
    return None


def _weight(graph: Graph, factor: str, columns: tuple[int, ...]) -> tuple[str, float] | None:
    """The parameter of a factor `weight` or `weight + offset`, with the offset."""
    name, offset = graph.uncast(factor), 0.0
    if graph.op(name) == "add":
        summands = graph.scalar_and_tensor(name)
        if summands is None:
            return None
        offset, name = summands[0], graph.uncast(summands[1])
    if graph.shape(name) != columns or graph.node(name).kind is not NodeKind.GET_ATTR:
        return None
    return name, offset


def _by_name(graph: Graph, name: str) -> Iterator[Replacement | Refusal]:
    x, weight = graph.tensor(name, 0, "input"), graph.tensor(name, 2, "weight")
    if x is None:
        return
    inputs = (x,) if weight is None else (x, weight)
    shape, eps = graph.argument(name, 1, "normalized_shape"), graph.argument(name, 3, "eps")
    call = Call(_TARGET, (Ref(x), tuple(shape), None if weight is None else Ref(weight)), (("eps", eps),))
    yield Replacement(_OP, graph.between(name, inputs), (call,))
