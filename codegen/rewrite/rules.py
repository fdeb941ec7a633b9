"""Sharding rules: for every operation of a trace, the strategies by which tensor-parallel ranks may share it.

For linear(x[B, S, K], w[N, K], b[N]) on a layout table of `smpc.codegen.rewrite.sharding`:

    x      w      b      output
    R      R      R      R         every operation has this
    B      B      B      B         ... and this, if gradients flow and it draws on no module
    S(0)   B      B      S(0)      each rank some of the samples
    S(1)   B      B      S(1)
    B      S(0)   S(0)   S(2)      column parallel
    S(2)   S(1)   P      P         row parallel

Operations that no rule knows have the first two alone: they are never wrong, only never shared. Custom autograd functions have the
first alone, as their backward need not be linear: it may clip what it gets. In-place operations, and whatever reads
a tensor before it is written for the last time, take and give whole values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from smpc.codegen.rewrite import rules_shape
from smpc.codegen.rewrite.sharding import BROADCAST, PARTIAL, REPLICATED, Layout
from smpc.codegen.rewrite.strategy import Facts, Strategy, argument, short_name
from smpc.tracer.ir import Node, NodeKind
from smpc.tracer.literals import Ref
from smpc.tracer.targets import APPLY

Rule = Callable[[Facts, Node], Iterator[Strategy]]

_POINTWISE = (
    "abs", "add", "sub", "mul", "div", "pow", "neg", "__neg__", "__rsub__", "__rpow__", "__rdiv__", "exp", "log", "log1p", "sqrt",
    "rsqrt", "reciprocal", "square", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "relu6", "gelu", "silu", "mish", "elu", "selu",
    "leaky_relu", "softplus", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "clamp", "clip", "where", "masked_fill", "dropout",
    "minimum", "maximum", "sign", "floor", "ceil", "round", "to", "float", "half", "bfloat16", "double", "type", "contiguous", "clone",
    "detach", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__and__", "__or__", "__xor__", "__invert__", "logical_not",
    "logical_and", "logical_or", "isnan", "isinf", "zeros_like", "ones_like", "full_like", "nan_to_num", "addcmul", "lerp", "true_divide",
)  # fmt: skip
_KEEPS_SUMS = ("neg", "__neg__", "to", "float", "half", "bfloat16", "double", "contiguous", "clone")


def strategies(facts: Facts, node: Node) -> tuple[Strategy, ...]:
    """The strategies of a node that computes, the plain one first, each once."""
    whole = Strategy((REPLICATED,) * len(node.inputs), REPLICATED)
    found: dict[Strategy, None] = {whole: None}
    if node.mutates or node.kind is NodeKind.SET_ATTR:
        return (whole,)
    if node.kind is NodeKind.CALL_FUNCTION:
        if facts.requires_grad(node.name) and not node.target.endswith(APPLY):
            found[Strategy((BROADCAST,) * len(node.inputs), BROADCAST)] = None
        rule = _RULES.get(short_name(node.target)) or rules_shape.RULES.get(node.target)
    else:
        rule = _experts
    for strategy in rule(facts, node) if rule is not None and facts.spec(node.name) is not None else ():
        known = tuple(
            layout.for_gradient(facts.requires_grad(name))
            for name, layout in zip(node.inputs, strategy.inputs, strict=True)
        )
        output = strategy.output.for_gradient(facts.requires_grad(node.name))
        found[dataclasses.replace(strategy, inputs=known, output=output)] = None
    return tuple(found)


def _pointwise(facts: Facts, node: Node) -> Iterator[Strategy]:
    shape = facts.shape(node.name)
    for dim, size in enumerate(shape):
        yield from facts.along(node, broadcast_dims(facts, node.inputs, shape, dim), dim, size)
    if _keeps_sums(node):
        yield Strategy((PARTIAL,) * len(node.inputs), PARTIAL)


def broadcast_dims(facts: Facts, names: tuple[str, ...], shape: tuple[int, ...], dim: int) -> dict[str, int | None]:
    """Where operands that are broadcast to `shape` have its dimension `dim`."""
    found: dict[str, int | None] = {}
    for name in names:
        own = facts.shape(name)
        place = dim - (len(shape) - len(own))
        found[name] = place if place >= 0 and own[place] == shape[dim] else None
    return found


def _keeps_sums(node: Node) -> bool:
    """Whether the operation on summands gives summands of its result."""
    name = short_name(node.target)
    if name in ("add", "sub"):
        return len(node.inputs) == 2 and len(node.args) == 2
    if name in ("mul", "div", "true_divide"):
        return isinstance(node.args[0], Ref) and len(node.inputs) == 1 and isinstance(node.args[1], (int, float))
    if name == "dropout":
        return argument(node, 1, "p", 0.5) == 0 or not argument(node, 2, "training", True)
    return name in _KEEPS_SUMS


def _names(*values: Any) -> tuple[str, ...] | None:
    """Names of operands; None if one is no tensor of the trace, or is there twice."""
    if not all(isinstance(value, Ref) for value in values):
        return None
    names = tuple(value.name for value in values)
    return names if len(dict.fromkeys(names)) == len(names) else None


def _linear(facts: Facts, node: Node) -> Iterator[Strategy]:
    bias = argument(node, 2, "bias")
    names = _names(argument(node, 0, "input"), argument(node, 1, "weight"), *([] if bias is None else [bias]))
    if names is None:
        return
    x, weight, *rest = names
    last = len(facts.shape(x)) - 1
    if len(facts.shape(weight)) != 2:
        return
    for dim in range(last):
        yield from facts.along(node, {x: dim}, dim, facts.shape(x)[dim])
    columns, rows = facts.shape(weight)
    yield from facts.along(node, {weight: 0, **dict.fromkeys(rest, 0)}, last, columns)
    yield from facts.along(node, {x: last, weight: 1}, None, rows, dict.fromkeys(rest, PARTIAL))


def _addmm(facts: Facts, node: Node) -> Iterator[Strategy]:
    names = _names(*node.args[:3]) if len(node.args) >= 3 else None
    if names is None:
        return
    bias, x, weight = names
    out = facts.shape(node.name)
    for dim, dims in ((0, {x: 0}), (1, {weight: 1})):
        added = broadcast_dims(facts, (bias,), out, dim)
        yield from facts.along(node, {**dims, **added}, dim, out[dim])
    yield from facts.along(node, {x: 1, weight: 0}, None, facts.shape(x)[1], {bias: PARTIAL})


def _matmul(facts: Facts, node: Node) -> Iterator[Strategy]:
    names = _names(*node.args[:2]) if len(node.args) >= 2 else None
    if names is None or min(len(facts.shape(name)) for name in names) < 2:
        return
    a, b = names
    if short_name(node.target) == "__rmatmul__":
        a, b = b, a
    out = facts.shape(node.name)
    rank, rank_a, rank_b = len(out), len(facts.shape(a)), len(facts.shape(b))
    for dim in range(rank - 2):
        batch: dict[str, int | None] = {}
        for name in (a, b):
            own = facts.shape(name)
            place = dim - (rank - len(own))
            batch[name] = place if place >= 0 and own[place] == out[dim] else None
        yield from facts.along(node, batch, dim, out[dim])
    yield from facts.along(node, {a: rank_a - 2}, rank - 2, out[-2])
    yield from facts.along(node, {b: rank_b - 1}, rank - 1, out[-1])
    yield from facts.along(node, {a: rank_a - 1, b: rank_b - 2}, None, facts.shape(a)[-1])


def _einsum(facts: Facts, node: Node) -> Iterator[Strategy]:
    operands = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
    names = _names(*operands)
    equation = node.args[0].replace(" ", "") if isinstance(node.args[0], str) else ""
    terms, arrow, result = equation.partition("->")
    places = terms.split(",")
    if names is None or not arrow or "." in equation or any(len(set(term)) < len(term) for term in places):
        return
    sizes = {
        letter: size
        for name, term in zip(names, places, strict=True)
        for letter, size in zip(term, facts.shape(name), strict=True)
    }
    for letter, size in sizes.items():
        dims = {name: term.index(letter) if letter in term else None for name, term in zip(names, places, strict=True)}
        yield from facts.along(node, dims, result.index(letter) if letter in result else None, size)


def _embedding(facts: Facts, node: Node) -> Iterator[Strategy]:
    names = _names(*node.args[:2]) if len(node.args) >= 2 else None
    if names is None:
        return
    ids, table = names
    rank = len(facts.shape(ids))
    for dim, size in enumerate(facts.shape(ids)):
        yield from facts.along(node, {ids: dim}, dim, size)
    yield from facts.along(node, {table: 1}, rank, facts.shape(table)[1])
    plain = argument(node, 3, "max_norm") is None and not argument(node, 5, "scale_grad_by_freq", False)
    if plain and not argument(node, 6, "sparse", False) and facts.shape(table)[0] % facts.degree == 0:
        yield Strategy((BROADCAST, Layout.sharded(0)), PARTIAL)


def _attention(facts: Facts, node: Node) -> Iterator[Strategy]:
    mask = argument(node, 3, "attn_mask")
    names = _names(*(argument(node, i, name) for i, name in enumerate(("query", "key", "value"))))
    if names is None or (mask is not None and not isinstance(mask, Ref)):
        return
    query, key, value = names
    out = facts.shape(node.name)
    rank = len(out)
    # Samples, heads: of the key and value there may be fewer, or one for all.
    outer = range(rank - 2) if all(len(facts.shape(name)) == rank for name in names) else ()
    for dim in outer:
        shared = {name for name in (key, value) if facts.shape(name)[dim] == 1}
        dims: dict[str, int | None] = {name: None if name in shared else dim for name in names}
        if any(facts.shape(name)[dim] % facts.degree for name in names if name not in shared):
            continue
        if mask is not None:
            dims |= broadcast_dims(facts, (mask.name,), out, dim)
        yield from (found for found in facts.along(node, dims, dim, out[dim]) if not found.output.blocks)
    if not argument(node, 5, "is_causal", False):
        dims = {query: rank - 2}
        if mask is not None:
            own = facts.shape(mask.name)
            dims[mask.name] = len(own) - 2 if len(own) > 1 and own[-2] == out[-2] else None
        yield from facts.along(node, dims, rank - 2, out[-2])


def _normalised(facts: Facts, node: Node) -> Iterator[Strategy]:
    """layer_norm, rms_norm: the last dimensions stay whole."""
    shape = facts.shape(node.name)
    for dim in range(len(shape) - len(argument(node, 1, "normalized_shape"))):
        yield from facts.along(node, {node.inputs[0]: dim}, dim, shape[dim])


def _all_but_one(facts: Facts, node: Node) -> Iterator[Strategy]:
    """softmax and others that mix the elements along one dimension."""
    shape, mixed = facts.shape(node.name), argument(node, 1, "dim")
    if isinstance(mixed, int) and len(node.inputs) == 1 and shape:
        for dim, size in enumerate(shape):
            if dim != mixed % len(shape):
                yield from facts.along(node, {node.inputs[0]: dim}, dim, size)


def _reduction(facts: Facts, node: Node) -> Iterator[Strategy]:
    if len(node.inputs) != 1:
        return
    (name,) = node.inputs
    shape, out = facts.shape(name), facts.shape(node.name)
    dims = argument(node, 1, "dim")
    reduced = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = [dim % len(shape) for dim in reduced]
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    keeps_rank = len(out) == len(shape)
    for dim in kept:
        yield from facts.along(node, {name: dim}, dim if keeps_rank else kept.index(dim), shape[dim])
    if short_name(node.target) == "sum":
        for dim in gone:
            yield from facts.along(node, {name: dim}, None, shape[dim])
        yield Strategy((PARTIAL,), PARTIAL)


def _convolution(facts: Facts, node: Node) -> Iterator[Strategy]:
    bias = argument(node, 2, "bias")
    names = _names(argument(node, 0, "input"), argument(node, 1, "weight"), *([] if bias is None else [bias]))
    if names is None or argument(node, 6, "groups", 1) != 1 or len(facts.shape(names[0])) != len(facts.shape(names[1])):
        return
    x, weight, *rest = names
    yield from facts.along(node, {x: 0}, 0, facts.shape(x)[0])
    yield from facts.along(node, {weight: 0, **dict.fromkeys(rest, 0)}, 1, facts.shape(weight)[0])
    yield from facts.along(node, {x: 1, weight: 1}, None, facts.shape(x)[1], dict.fromkeys(rest, PARTIAL))


def _cross_entropy(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Every rank the classes that it has the logits of; the ranks sum up three numbers for each label, once they know the largest logit.

    Which classes those are must be plain: they are not sliced in blocks.
    """
    names = _names(argument(node, 0, "input"), argument(node, 1, "target"))
    given = [argument(node, i, name) for i, name in ((2, "weight"), (3, "size_average"), (5, "reduce"))]
    if names is None or any(value is not None for value in given) or facts.requires_grad(names[1]):
        return
    shape, labels = facts.shape(names[0]), facts.spec(names[1])
    if len(shape) != 2 or shape[1] % facts.degree or labels is None or labels.dtype not in ("int64", "int32"):
        return
    inputs = tuple(Layout.sharded(1) if name == names[0] else REPLICATED for name in node.inputs)
    share = 2 * 4 * shape[0] * (facts.degree - 1) // facts.degree
    yield Strategy(inputs, REPLICATED, sent=(share, 3 * share))


def _experts(facts: Facts, node: Node) -> Iterator[Strategy]:
    """A module called whole that holds fused experts, gate_up_proj [E, 2I, H] and down_proj [E, H, I]: split along I."""
    own = {s.name.removeprefix(f"{node.target}."): s for s in facts.trace.state if s.name.startswith(f"{node.target}.")}
    spec = facts.spec(node.name)
    if sorted(own) != ["down_proj", "gate_up_proj"] or spec is None or not node.inputs:
        return
    up, down = own["gate_up_proj"], own["down_proj"]
    num_experts, hidden, inner = (*down.spec.shape, 0, 0, 0)[:3]
    if up.spec.shape == (num_experts, 2 * inner, hidden) and inner and inner % facts.degree == 0:
        state = ((up.name, Layout.sharded(1, (inner, inner))), (down.name, Layout.sharded(2)))
        yield Strategy((BROADCAST,) * len(node.inputs), PARTIAL, state)


_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_POINTWISE, _pointwise),
        **dict.fromkeys(("softmax", "log_softmax", "cumsum"), _all_but_one),
        **dict.fromkeys(("sum", "mean", "var", "std", "amax", "amin", "logsumexp"), _reduction),
        **dict.fromkeys(("layer_norm", "rms_norm"), _normalised),
        **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
        **dict.fromkeys(("matmul", "bmm", "__matmul__", "__rmatmul__"), _matmul),
        **rules_shape.NAMED_RULES,
        "linear": _linear,
        "addmm": _addmm,
        "cross_entropy": _cross_entropy,
        "einsum": _einsum,
        "embedding": _embedding,
        "scaled_dot_product_attention": _attention,
    }
)
