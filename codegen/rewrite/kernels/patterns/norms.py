"""Norms: LayerNorm, RMSNorm, and both with the residual sum before them.

LayerNorm, written out or by torch's name, becomes `smpc.kernels.layer_norm.layer_norm`.

    (x - mean(x)) * rsqrt(mean((x - mean(x)) ** 2) + eps) * weight + bias

`torch.nn.functional.layer_norm` is what models call; Cohere and others write it out, mostly without a bias.

RMSNorm, written out or by torch's name, becomes `smpc.kernels.rms_norm.rms_norm`.

    x * rsqrt(mean(x ** 2, -1) + eps) * (weight + offset)

as Llama, T5, Qwen (offset 0) and Gemma (offset 1) write it, with 1 / sqrt or a power of -0.5 in place of rsqrt, squares as products,
casts to fp32 and back anywhere, and with or without a weight. `eps` and `offset` are the numbers that are there.

A residual sum and its norm become one op: `add_rms_norm` and `add_layer_norm` of `smpc.kernels`.

    h = residual + x;  y = norm(h)        ->        y, h = add_rms_norm(x, residual, weight, eps)

Norms are those that `find_rms_norm` and `find_layer_norm` find. The sum may be read on: it takes the name of the op's second result.

    sum and norm in one module, or the norm in a module that the sum's module calls     replaced: Llama's post_attention_layernorm,
                                                                                        GPT-2's ln_2
    the norm in the next layer                                                          left alone: between layers pipelines are cut,
                                                                                        and there h alone goes over, not x and residual
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from smpc.codegen.rewrite.kernels.pattern_graph import Find, KernelCall, NodeUsers, Refusal, Replacement, Rewrite
from smpc.tracer.constants import Ref
from smpc.tracer.ir import NodeKind, Trace

_LAYER_NORM = "layer_norm"
_LAYER_NORM_TARGET = "smpc.kernels.layer_norm.layer_norm"
_EPS = 1e-5  # torch's default


def find_layer_norm(graph: NodeUsers) -> Iterator[Replacement | Refusal]:
    """Every LayerNorm of a trace."""
    for name in graph.find("layer_norm"):
        found = _layer_norm_by_name(graph, name)
        if found is not None:
            yield found
    for name in graph.find("rsqrt"):
        found = _written_layer_norm(graph, name)
        if found is not None:
            yield found


LAYER_NORM = Rewrite(_LAYER_NORM, find_layer_norm)


def _layer_norm_by_name(graph: NodeUsers, name: str) -> Replacement | Refusal | None:
    """A call of torch.nn.functional.layer_norm; torch.layer_norm has the same arguments in front."""
    x, weight, bias = (graph.tensor(name, i, word) for i, word in ((0, "input"), (2, "weight"), (3, "bias")))
    if x is None:
        return None
    if bias is not None and weight is None:
        return Refusal(_LAYER_NORM, name, "it has a bias and no weight")
    shape, eps = tuple(graph.argument(name, 1, "normalized_shape")), graph.argument(name, 4, "eps", _EPS)
    return _layer_norm(graph, name, x, shape, weight, bias, eps)


def _layer_norm(
    graph: NodeUsers, result: str, x: str, shape: tuple[int, ...], weight: str | None, bias: str | None, eps: float
) -> Replacement:
    optional = tuple(None if name is None else Ref(name) for name in (weight, bias))
    call = KernelCall(_LAYER_NORM_TARGET, (Ref(x), shape, *optional), (("eps", eps),))
    inputs = tuple(name for name in (x, weight, bias) if name is not None)
    return Replacement(_LAYER_NORM, graph.between(result, inputs), (call,))


def _written_layer_norm(graph: NodeUsers, root: str) -> Replacement | None:
    """Reads backwards from the root to the input, then forwards to the result."""
    inner = graph.tensor(root, 0, "input")
    summands = graph.scalar_and_tensor(inner) if inner is not None and graph.op(inner) == "add" else None
    if summands is None or graph.op(summands[1]) != "mean":
        return None
    squares = graph.tensor(summands[1], 0, "input")
    centered = None if squares is None else graph.power(squares, 2)
    source = None if centered is None else _centered_in_norm(graph, centered)
    result = graph.sole_user(root)
    factor = None if result is None or graph.op(result) != "mul" else graph.other(result, root)
    if source is None or result is None or factor is None or _centered_in_norm(graph, factor) != source:
        return None
    x = graph.uncast(source)
    columns = graph.shape(x)[-1:]
    weight = bias = None
    for operation in ("mul", "add"):
        following = graph.reader(result)
        factor = (
            None
            if following is None or graph.op(following) != operation
            else _norm_parameter(graph, following, columns)
        )
        if following is None or factor is None:
            break
        result = following
        weight, bias = (factor, None) if operation == "mul" else (weight, factor)
    result = graph.cast_back(result, graph.spec(x).dtype)
    return _layer_norm(graph, result, x, columns, weight, bias, summands[0])


def _centered_in_norm(graph: NodeUsers, name: str) -> str | None:
    """x, if the node is x - mean(x)."""
    pair = graph.tensors(name) if graph.op(name) == "sub" else None
    if pair is None or graph.op(pair[1]) != "mean" or graph.tensor(pair[1], 0, "input") != pair[0]:
        return None
    return pair[0]


def _norm_parameter(graph: NodeUsers, name: str, columns: tuple[int, ...]) -> str | None:
    """The operand that is a parameter of one number for each column."""
    for operand in graph.tensors(name) or ():
        found = graph.uncast(operand)
        if graph.node(found).kind is NodeKind.GET_ATTR and graph.shape(found) == columns:
            return found
    return None


_RMS_NORM = "rms_norm"
_RMS_NORM_TARGET = "smpc.kernels.rms_norm.rms_norm"


@dataclass(frozen=True, slots=True)
class _RootMeanSquare:
    """`name` = 1 / sqrt(mean(x ** 2) + eps), or with `divides` the root itself, to be divided by."""

    name: str
    x: str
    eps: float
    divides: bool


def find_rms_norm(graph: NodeUsers) -> Iterator[Replacement | Refusal]:
    """Every RMSNorm of a trace."""
    for name in graph.find("rsqrt", "sqrt", "pow"):
        root = _read_from_root(graph, name)
        if root is not None:
            found = _written_rms_norm(graph, root)
            if found is not None:
                yield found
    for name in graph.find("rms_norm"):
        yield from _rms_norm_by_name(graph, name)


RMS_NORM = Rewrite(_RMS_NORM, find_rms_norm)


def _read_from_root(graph: NodeUsers, name: str) -> _RootMeanSquare | None:
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
    return None if base is None else _RootMeanSquare(name, graph.uncast(base), eps, divides)


def _is_over_last(graph: NodeUsers, mean: str) -> bool:
    dims = graph.argument(mean, 1, "dim")
    squares = graph.tensor(mean, 0, "input")
    last = len(graph.shape(squares)) - 1 if squares else 0
    keeps = graph.argument(mean, 2, "keepdim", False)
    return keeps is True and dims in (-1, last, (-1,), [-1], (last,), [last])


def _written_rms_norm(graph: NodeUsers, root: _RootMeanSquare) -> Replacement | None:
    """Reads forwards from the root to the result."""
    scaled = _scaled_by_root(graph, root)
    if scaled is None:
        return None
    result, weight, offset = scaled, None, 0.0
    after = graph.reader(scaled)
    if after is not None and graph.op(after) == "mul":
        factor = next((name for name in graph.tensors(after) or () if graph.uncast(name) != graph.uncast(scaled)), None)
        read = None if factor is None else _norm_weight(graph, factor, graph.shape(root.x)[-1:])
        if read is not None:
            (weight, offset), result = read, after
    result = graph.cast_back(result, graph.spec(root.x).dtype)
    inputs = (root.x,) if weight is None else (root.x, weight)
    options = (("eps", root.eps), *((("offset", offset),) if offset else ()))
    call = KernelCall(
        _RMS_NORM_TARGET, (Ref(root.x), graph.shape(root.x)[-1:], None if weight is None else Ref(weight)), options
    )
    return Replacement(_RMS_NORM, graph.between(result, inputs), (call,))


def _scaled_by_root(graph: NodeUsers, root: _RootMeanSquare) -> str | None:
    """x times 1 / root, or x over the root."""
    for user in graph.users(root.name):
        operation, pair = graph.op(user), graph.tensors(user) if graph.op(user) in ("mul", "div") else None
        if operation == "cast":
            return _scaled_by_root(graph, replace(root, name=user))
        if root.divides and (operation == "reciprocal" or (operation == "div" and graph.operands(user)[0] in (1, 1.0))):
            return _scaled_by_root(graph, replace(root, name=user, divides=False))
        if pair is None or (operation == "div") != root.divides:
            continue
        x = pair[0] if root.divides else graph.other(user, root.name)
        if x is not None and graph.uncast(x) == root.x:
            return user
    return None


def _norm_weight(graph: NodeUsers, factor: str, columns: tuple[int, ...]) -> tuple[str, float] | None:
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


def _rms_norm_by_name(graph: NodeUsers, name: str) -> Iterator[Replacement | Refusal]:
    x, weight = graph.tensor(name, 0, "input"), graph.tensor(name, 2, "weight")
    if x is None:
        return
    inputs = (x,) if weight is None else (x, weight)
    shape, eps = graph.argument(name, 1, "normalized_shape"), graph.argument(name, 3, "eps")
    call = KernelCall(
        _RMS_NORM_TARGET, (Ref(x), tuple(shape), None if weight is None else Ref(weight)), (("eps", eps),)
    )
    yield Replacement(_RMS_NORM, graph.between(name, inputs), (call,))


def find_add_norm(op: str, norms: Find, graph: NodeUsers) -> Iterator[Replacement | Refusal]:
    """Every norm among `norms` of a sum of two tensors of its shape and type."""
    for norm in norms(graph):
        if isinstance(norm, Refusal):
            continue
        [call] = norm.calls
        total = call.args[0].name
        pair = graph.tensors(total) if graph.op(total) == "add" else None
        spec = graph.spec(total)
        if pair is None or call.args[1] != spec.shape[-1:]:
            continue
        if any((graph.shape(name), graph.spec(name).dtype) != (spec.shape, spec.dtype) for name in pair):
            continue
        if _encloses_norm(graph.trace, total, norm.result):
            yield _add_norm(op, graph, norm, call, total, pair)
        else:
            yield Refusal(op, norm.result, "its sum is made in another layer, and pipelines are cut between layers")


ADD_NORM = (
    Rewrite("add_rms_norm", partial(find_add_norm, "add_rms_norm", find_rms_norm)),
    Rewrite("add_layer_norm", partial(find_add_norm, "add_layer_norm", find_layer_norm)),
)


def _add_norm(
    op: str, graph: NodeUsers, norm: Replacement, call: KernelCall, total: str, pair: tuple[str, str]
) -> Replacement:
    module, _, _ = call.target.rpartition(".")
    fused = KernelCall(f"{module}.{op}", (*map(Ref, pair), *call.args[2:]), call.kwargs)
    normed, summed = (KernelCall("_operator.getitem", (Ref("#0"), index)) for index in (0, 1))
    replaced = tuple(sorted((total, *norm.replaced), key=graph.trace.position))
    if all(user in replaced for user in graph.users(total)):
        return Replacement(op, replaced, (fused, normed))
    return Replacement(op, replaced, (fused, summed, normed), also=((total, "#1"),))


def _encloses_norm(trace: Trace, outer: str, inner: str) -> bool:
    """Whether the module call around `inner` is `outer`'s, or was made by it."""
    call, wanted = trace.node(inner).call, trace.node(outer).call
    while call not in (wanted, -1):
        call = trace.calls[call].parent
    return call == wanted
