"""Sharding rules: for every operation of a trace, the strategies by which tensor-parallel ranks may share it.

For linear(x[B, S, K], w[N, K], b[N]) on a layout table of `smpc.codegen.rewrite.tensor_parallel.layouts`:

    x      w      b      output
    R      R      R      R         every operation has this
    B      B      B      B         ... and this, if gradients flow and it draws on no module
    S(0)   B      B      S(0)      each rank some of the samples
    S(1)   B      B      S(1)
    B      S(0)   S(0)   S(2)      column parallel
    S(2)   S(1)   P      P         row parallel

Operations that no rule knows have the first two alone: they are never wrong, only never shared. Custom autograd functions have the
first alone, as their backward need not be linear: it may clip what it gets. So have casts to a longer type, whose backward rounds, and
no cast to a shorter one takes summands: sums are rounded, as in one process. In-place operations, and whatever reads
a tensor before it is written for the last time, take and give whole values.

`MOVING_RULES`: rules of operations that only move elements: views, transpositions, slices, splits and joins.

All of them keep sums: on summands (P) they give summands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from smpc.codegen.rewrite.tensor_parallel.expert_rules import experts
from smpc.codegen.rewrite.tensor_parallel.image_rules import IMAGE_RULES, in_groups, resized
from smpc.codegen.rewrite.tensor_parallel.layouts import BROADCAST, PARTIAL, REPLICATED, Layout, LayoutKind
from smpc.codegen.rewrite.tensor_parallel.strategy import (
    Facts,
    Rule,
    Strategy,
    argument,
    carried,
    of_module,
    operands,
    short_name,
    split_sizes,
)
from smpc.tracer.constants import Ref, references
from smpc.tracer.ir import Node, NodeKind
from smpc.tracer.targets import APPLY, GETATTR, GETITEM

_SUMS = Strategy((PARTIAL,), PARTIAL)


def _permuted(facts: Facts, node: Node, order: list[int]) -> Iterator[Strategy]:
    """Output dimension i is input dimension order[i]; -1: a new one."""
    (name,) = node.inputs
    for out, dim in enumerate(order):
        if dim >= 0:
            yield from facts.along(node, {name: dim}, out, facts.shape(name)[dim])
    yield _SUMS


def _transpose(facts: Facts, node: Node) -> Iterator[Strategy]:
    order = list(range(len(facts.shape(node.name))))
    a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
    if order and isinstance(a, int) and isinstance(b, int):
        order[a], order[b] = order[b], order[a]
        yield from _permuted(facts, node, order)


def _permute(facts: Facts, node: Node) -> Iterator[Strategy]:
    dims = argument(node, 1, "dims")
    order = list(dims) if isinstance(dims, (tuple, list)) else list(node.args[1:])
    if order and all(isinstance(dim, int) for dim in order):
        yield from _permuted(facts, node, [dim % len(order) for dim in order])


def _attribute(facts: Facts, node: Node) -> Iterator[Strategy]:
    order = list(range(len(facts.shape(node.name))))
    if node.args[1] == "T":
        yield from _permuted(facts, node, order[::-1])
    elif node.args[1] == "mT":
        yield from _permuted(facts, node, [*order[:-2], order[-1], order[-2]])


def _t(facts: Facts, node: Node) -> Iterator[Strategy]:
    yield from _permuted(facts, node, list(range(len(facts.shape(node.name))))[::-1])


def _unsqueeze(facts: Facts, node: Node) -> Iterator[Strategy]:
    rank, dim = len(facts.shape(node.name)), argument(node, 1, "dim")
    order = list(range(rank - 1))
    order.insert(dim % rank, -1)
    yield from _permuted(facts, node, order)


def _squeeze(facts: Facts, node: Node) -> Iterator[Strategy]:
    shape, dim = facts.shape(node.inputs[0]), argument(node, 1, "dim")
    given = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = [d % len(shape) for d in given] if shape else []
    order = [d for d in range(len(shape)) if not (d in gone and shape[d] == 1)]
    if len(order) != len(facts.shape(node.name)):
        return
    for strategy in _permuted(facts, node, order):
        along = strategy.inputs[0].dim
        if along not in gone or shape[along] > facts.degree:  # a slice of one element would be squeezed away
            yield strategy


def _reshape(facts: Facts, node: Node) -> Iterator[Strategy]:
    given = (*node.args, *dict(node.kwargs).values())
    if len(node.inputs) != 1 or any(not isinstance(x, (int, tuple, list, Ref)) for x in given):
        return  # a view as another dtype
    (name,) = node.inputs
    source, target = facts.shape(name), facts.shape(node.name)
    for way in carried(source, target, facts.num_pieces, facts.inner):
        if way.any_blocks:
            yield from facts.along(node, {name: way.source}, way.target, source[way.source])
        else:
            layout = facts.sharded(way.source, way.source_blocks)
            yield Strategy((layout,), facts.sharded(way.target, way.target_blocks))
    yield _SUMS


def _as_other(rule: Rule) -> Rule:
    """For view_as and the like: the second operand, of which only the shape counts, has the output's layout."""

    def strategies_of(facts: Facts, node: Node) -> Iterator[Strategy]:
        names = operands(*node.args[:2]) if len(node.args) == 2 else None
        if names is None:
            return
        x, _ = names
        alone = dataclasses.replace(node, args=(Ref(x),))
        for way in rule(facts, alone):
            other = way.output if way.output.kind is LayoutKind.SHARDED else REPLICATED
            yield dataclasses.replace(way, inputs=(*way.inputs, other))

    return strategies_of


def _as_type(facts: Facts, node: Node) -> Iterator[Strategy]:
    names = operands(*node.args[:2]) if len(node.args) == 2 else None
    if names is not None:
        for dim, size in enumerate(facts.shape(node.name)):
            yield from facts.along(node, {names[0]: dim}, dim, size)


def _expand(facts: Facts, node: Node) -> Iterator[Strategy]:
    if len(node.inputs) != 1:
        return
    (name,) = node.inputs
    source, target = facts.shape(name), facts.shape(node.name)
    for dim, size in enumerate(target):
        place = dim - (len(target) - len(source))
        known = place >= 0 and source[place] == size
        yield from facts.along(node, {name: place if known else None}, dim, size)
    yield _SUMS


def _repeat_interleave(facts: Facts, node: Node) -> Iterator[Strategy]:
    dim = argument(node, 2, "dim")
    if len(node.inputs) == 1 and isinstance(argument(node, 1, "repeats"), int) and isinstance(dim, int):
        (name,) = node.inputs
        shape, has_size = facts.shape(name), argument(node, 3, "output_size") is not None
        for place, size in enumerate(shape):
            ways = facts.along(node, {name: place}, place, size)
            yield from (way for way in ways if place != dim % len(shape) or not (has_size or way.output.blocks))
        yield _SUMS


def _split(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Parts along one dimension: of each part every rank has its slice where the input is sharded in these blocks."""
    (name,) = node.inputs
    shape = facts.shape(name)
    along = argument(node, 2, "dim", 0) % len(shape)
    for dim, size in enumerate(shape):
        if dim != along:
            yield from facts.along(node, {name: dim}, dim, size)
    sizes = split_sizes(node, shape)
    if len(sizes) > 1 and all(size % facts.num_pieces == 0 for size in sizes):
        yield Strategy((facts.sharded(along, sizes),), facts.sharded(along))
    yield _SUMS


def _unbind(facts: Facts, node: Node) -> Iterator[Strategy]:
    (name,) = node.inputs
    shape = facts.shape(name)
    gone = argument(node, 1, "dim", 0) % len(shape)
    for dim, size in enumerate(shape):
        if dim != gone:
            yield from facts.along(node, {name: dim}, dim - (dim > gone), size)
    yield _SUMS


def _join(facts: Facts, node: Node) -> Iterator[Strategy]:
    """cat and stack."""
    parts = argument(node, 0, "tensors")
    if not isinstance(parts, (tuple, list)) or not all(isinstance(part, Ref) for part in parts):
        return
    shape, is_stack = facts.shape(node.name), short_name(node.target) == "stack"
    along = argument(node, 1, "dim", 0) % len(shape)
    if any(len(facts.shape(name)) != len(shape) - is_stack for name in node.inputs):
        return
    for dim, size in enumerate(shape):
        if dim != along:
            place = dim - (is_stack and dim > along)
            yield from facts.along(node, dict.fromkeys(node.inputs, place), dim, size)
    sizes = tuple(facts.shape(part.name)[along] for part in parts) if not is_stack else ()
    if len(sizes) > 1 and all(size and size % facts.num_pieces == 0 for size in sizes):
        yield Strategy((facts.sharded(along),) * len(node.inputs), facts.sharded(along, sizes))
    yield Strategy((PARTIAL,) * len(node.inputs), PARTIAL)


def _getitem(facts: Facts, node: Node) -> Iterator[Strategy]:
    name = node.inputs[0]
    if facts.is_tuple(name):
        shape = facts.shape(node.name)
        for dim, size in enumerate(shape):
            yield from facts.along(node, {name: dim}, dim, size)
        yield _SUMS
        return
    if isinstance(node.args[1], Ref):
        yield from _looked_up(facts, node, name, node.args[1].name)
    if len(node.inputs) > 1 or references(node.args[1]):
        return
    yield from _strided(facts, node)
    order = _order_of_index(node.args[1], len(facts.shape(name)))
    if order is not None:
        yield from _permuted(facts, node, order)


def _looked_up(facts: Facts, node: Node, table: str, places: str) -> Iterator[Strategy]:
    """table[places]: rows by their numbers."""
    spec, shape = facts.spec(places), facts.shape(table)
    if spec is None or spec.dtype not in ("int64", "int32") or table == places:
        return
    for dim, size in enumerate(spec.shape):
        yield from facts.along(node, {places: dim}, dim, size)
    for dim in range(1, len(shape)):
        yield from facts.along(node, {table: dim}, len(spec.shape) + dim - 1, shape[dim])
    if not spec.requires_grad:
        yield Strategy((PARTIAL, REPLICATED), PARTIAL)


def _strided(facts: Facts, node: Node) -> Iterator[Strategy]:
    """x[..., i::n] along a dimension of which every rank's slice is a multiple of n."""
    (name,) = node.inputs
    items, shape = list(node.args[1]) if isinstance(node.args[1], tuple) else [node.args[1]], facts.shape(name)
    if Ellipsis not in items:
        items.append(Ellipsis)
    if not all(item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int for item in items):
        return
    gap = len(shape) - sum(item is not None and item is not Ellipsis for item in items)
    dim = out = 0
    for item in items:
        if isinstance(item, slice):
            step, first = item.step or 1, item.start or 0
            if step > 1 and 0 <= first < step and item.stop is None and shape[dim] % (step * facts.num_pieces) == 0:
                yield Strategy((facts.sharded(dim),), facts.sharded(out))
        dim += gap if item is Ellipsis else item is not None
        out += gap if item is Ellipsis else type(item) is not int


def _order_of_index(index: Any, rank: int) -> list[int] | None:
    """For each output dimension the input dimension that it is the whole of, or -1; None: not an index of slices."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int for item in items):
        return None
    used = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    order: list[int] = []
    dim = 0
    for item in items:
        if item is Ellipsis:
            order += range(dim, dim + rank - used)
            dim += rank - used
        elif item is None:
            order.append(-1)
        else:
            if isinstance(item, slice):
                order.append(dim if (item.start or 0, item.stop, item.step or 1) == (0, None, 1) else -1)
            dim += 1
    return order


def localised(facts: Facts, node: Node, strategy: Strategy) -> Node:
    """The node with the sizes among its arguments as a rank has them."""
    name = short_name(node.target)
    if strategy.output.kind is LayoutKind.SHARDED and node.spec is not None:
        if name in ("view", "reshape", "expand"):
            local = strategy.output.local_shape(node.spec.shape, facts.degree)
            return _with_sizes(node, local)
        if name == "unflatten" or name == "flatten":
            local = strategy.output.local_shape(node.spec.shape, facts.degree)
            return _replaced(node, "torch.Tensor.reshape", (argument(node, 0, "input"), local), ())
    if name == "split" and strategy.inputs[0].kind is LayoutKind.SHARDED:
        along = argument(node, 2, "dim", 0) % len(facts.shape(node.inputs[0]))
        if strategy.inputs[0].dim == along:
            sizes = [size // facts.degree for size in split_sizes(node, facts.shape(node.inputs[0]))]
            return _replaced(node, "torch.Tensor.split", (node.args[0], sizes), (("dim", along),))
    return resized(facts, in_groups(facts, node, strategy), strategy)


def _with_sizes(node: Node, local: tuple[int, ...]) -> Node:
    """A view, reshape or expand to another shape; a size of -1 stays."""
    given = argument(node, 1, "shape", dict(node.kwargs).get("size"))
    as_list = isinstance(given, (tuple, list))
    old = tuple(given) if as_list else node.args[1:]
    sizes = tuple(-1 if before == -1 else size for before, size in zip(old, local, strict=True))
    source = argument(node, 0, "input")
    return _replaced(node, node.target, (source, sizes) if as_list else (source, *sizes), ())


def _replaced(node: Node, target: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Node:
    return dataclasses.replace(node, target=target, args=args, kwargs=kwargs)


NAMED_MOVING_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _reshape),
        **dict.fromkeys(("cat", "stack"), _join),
        **dict.fromkeys(("split", "chunk"), _split),
        **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
        "permute": _permute,
        "t": _t,
        "unsqueeze": _unsqueeze,
        "squeeze": _squeeze,
        "expand": _expand,
        "repeat_interleave": _repeat_interleave,
        "unbind": _unbind,
        **dict.fromkeys(("reshape_as", "view_as"), _as_other(_reshape)),
        "expand_as": _as_other(_expand),
        "type_as": _as_type,
    }
)  # by short name
MOVING_RULES: Mapping[str, Rule] = MappingProxyType({GETITEM: _getitem, GETATTR: _attribute})  # by target


_POINTWISE = (
    "abs", "__abs__", "add", "sub", "mul", "div", "pow", "neg", "__neg__", "__rsub__", "__rpow__", "__rdiv__", "rsub", "exp", "exp2",
    "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "relu6",
    "gelu", "silu", "mish", "elu", "selu", "leaky_relu", "softplus", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "clamp",
    "clip", "where", "masked_fill", "dropout", "minimum", "maximum", "sign", "floor", "ceil", "round", "to", "float", "half", "bfloat16",
    "double", "type", "contiguous", "clone", "detach", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__and__", "__or__", "__xor__",
    "__invert__", "logical_not", "logical_and", "logical_or", "isnan", "isinf", "zeros_like", "ones_like", "full_like", "nan_to_num",
    "addcmul", "lerp", "true_divide", "__pow__",
)  # fmt: skip
_KEEPS_SUMS = ("neg", "__neg__", "to", "float", "half", "bfloat16", "double", "contiguous", "clone")


def strategies(facts: Facts, node: Node) -> tuple[Strategy, ...]:
    """The strategies of a node that computes, the plain one first, each once."""
    whole = Strategy((REPLICATED,) * len(node.inputs), REPLICATED)
    found: dict[Strategy, None] = {whole: None}
    if node.mutates or node.kind is NodeKind.SET_ATTR:
        return (whole,)
    if node.kind is NodeKind.CALL_FUNCTION:
        if facts.requires_grad(node.name) and not node.target.endswith(APPLY) and not _rounds_gradients(facts, node):
            found[Strategy((BROADCAST,) * len(node.inputs), BROADCAST)] = None
        rule = RULES.get(short_name(node.target)) or RULES.get(node.target)
    else:
        rule = experts
    is_known = facts.spec(node.name) is not None and not any(_has_unknown_shape(facts, name) for name in node.inputs)
    found_by = rule(facts, node) if rule is not None and is_known else ()
    is_call = node.kind is NodeKind.CALL_FUNCTION
    names = (short_name(node.target), node.target) if is_call else (of_module(node.target),)
    extra = next((facts.more[name] for name in names if name in facts.more), None)
    for strategy in (*found_by, *(extra(facts, node) if extra is not None and is_known else ())):
        known = tuple(
            layout.for_gradient(facts.requires_grad(name))
            for name, layout in zip(node.inputs, strategy.inputs, strict=True)
        )
        output = strategy.output.for_gradient(facts.requires_grad(node.name))
        if not _sums_truth_values(facts, node, strategy):
            found[dataclasses.replace(strategy, inputs=known, output=output)] = None
    return tuple(found)


def _has_unknown_shape(facts: Facts, name: str) -> bool:
    """Whether the shape of a tensor depends on values, such as of what a mask selects. A group of ranks is no tensor."""
    return facts.spec(name) is None and facts.trace.node(name).kind is not NodeKind.GET_ATTR


def _rounds_gradients(facts: Facts, node: Node) -> bool:
    """Whether gradients are cast to a shorter type: their summands would be rounded separately."""
    return any(facts.requires_grad(name) and facts.is_shorter(name, node.name) for name in node.inputs)


def _sums_truth_values(facts: Facts, node: Node, strategy: Strategy) -> bool:
    """Whether booleans are to be summands."""
    layouts = zip((*node.inputs, node.name), (*strategy.inputs, strategy.output), strict=True)
    specs = [facts.spec(name) for name, layout in layouts if layout == PARTIAL]
    return any(spec is not None and spec.dtype == "bool" for spec in specs)


def _pointwise(facts: Facts, node: Node) -> Iterator[Strategy]:
    if facts.is_tuple(node.name):
        return
    shape = facts.shape(node.name)
    for dim, size in enumerate(shape):
        yield from facts.along(node, broadcast_dims(facts, node.inputs, shape, dim), dim, size)
    if _keeps_sums(facts, node):
        yield Strategy((PARTIAL,) * len(node.inputs), PARTIAL)


def broadcast_dims(facts: Facts, names: tuple[str, ...], shape: tuple[int, ...], dim: int) -> dict[str, int | None]:
    """Where operands that are broadcast to `shape` have its dimension `dim`."""
    found: dict[str, int | None] = {}
    for name in names:
        own = facts.shape(name)
        place = dim - (len(shape) - len(own))
        found[name] = place if place >= 0 and own[place] == shape[dim] else None
    return found


def _keeps_sums(facts: Facts, node: Node) -> bool:
    """Whether the operation on summands gives summands of its result: not where it rounds, to integers or to a shorter type."""
    name = short_name(node.target)
    if argument(node, 3, "rounding_mode") is not None or any(
        facts.is_shorter(node.name, given) for given in node.inputs
    ):
        return False
    if name in ("add", "sub"):
        return len(node.inputs) == 2 and len(node.args) == 2
    if name in ("mul", "div", "true_divide"):
        first, second = argument(node, 0, "input"), argument(node, 1, "other")
        return isinstance(first, Ref) and len(node.inputs) == 1 and isinstance(second, (int, float))
    if name == "dropout":
        return argument(node, 1, "p", 0.5) == 0 or not argument(node, 2, "training", True)
    return name in _KEEPS_SUMS


def _is_floating(facts: Facts, name: str) -> bool:
    spec = facts.spec(name)
    return spec is not None and spec.torch_dtype.is_floating_point


def _linear(facts: Facts, node: Node) -> Iterator[Strategy]:
    bias = argument(node, 2, "bias")
    names = operands(argument(node, 0, "input"), argument(node, 1, "weight"), *([] if bias is None else [bias]))
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
    names = operands(*node.args[:3]) if len(node.args) >= 3 else None
    if names is None:
        return
    bias, x, weight = names
    out = facts.shape(node.name)
    for dim, dims in ((0, {x: 0}), (1, {weight: 1})):
        added = broadcast_dims(facts, (bias,), out, dim)
        yield from facts.along(node, {**dims, **added}, dim, out[dim])
    yield from facts.along(node, {x: 1, weight: 0}, None, facts.shape(x)[1], {bias: PARTIAL})


def _matmul(facts: Facts, node: Node) -> Iterator[Strategy]:
    names = operands(*node.args[:2]) if len(node.args) >= 2 else None
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


def _baddbmm(facts: Facts, node: Node) -> Iterator[Strategy]:
    names = operands(*node.args[:3]) if len(node.args) >= 3 else None
    if names is None:
        return
    added, a, b = names
    out = facts.shape(node.name)
    for dim, dims in enumerate(({a: 0, b: 0}, {a: 1}, {b: 2})):
        yield from facts.along(node, {**dims, **broadcast_dims(facts, (added,), out, dim)}, dim, out[dim])
    yield from facts.along(node, {a: 2, b: 1}, None, facts.shape(a)[2], {added: PARTIAL})


def _einsum(facts: Facts, node: Node) -> Iterator[Strategy]:
    given = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
    names = operands(*given)
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
    if any(
        sizes[a] != b
        for name, term in zip(names, places, strict=True)
        for a, b in zip(term, facts.shape(name), strict=True)
    ):
        return  # a dimension of one element is broadcast
    for letter, size in sizes.items():
        dims = {name: term.index(letter) if letter in term else None for name, term in zip(names, places, strict=True)}
        yield from facts.along(node, dims, result.index(letter) if letter in result else None, size)


def _embedding(facts: Facts, node: Node) -> Iterator[Strategy]:
    names = operands(*node.args[:2]) if len(node.args) >= 2 else None
    if names is None:
        return
    ids, table = names
    rank, counts = len(facts.shape(ids)), argument(node, 5, "scale_grad_by_freq", False)
    if _is_floating(facts, ids) or len(facts.shape(table)) != 2:
        return  # torch.embedding, which has them the other way round
    for dim, size in enumerate(facts.shape(ids)) if not counts else ():
        yield from facts.along(node, {ids: dim}, dim, size)
    yield from facts.along(node, {table: 1}, rank, facts.shape(table)[1])
    plain = argument(node, 3, "max_norm") is None and not counts
    if plain and not argument(node, 6, "sparse", False) and facts.shape(table)[0] % facts.degree == 0:
        yield Strategy((BROADCAST, Layout.sharded(0)), PARTIAL)


def _attention(facts: Facts, node: Node) -> Iterator[Strategy]:
    mask = argument(node, 3, "attn_mask")
    names = operands(*(argument(node, i, name) for i, name in enumerate(("query", "key", "value"))))
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
    shape, given = facts.shape(node.name), argument(node, 0, "input")
    if not isinstance(given, Ref):
        return
    for dim in range(len(shape) - len(argument(node, 1, "normalized_shape"))):
        yield from facts.along(node, {given.name: dim}, dim, shape[dim])


def _all_but_one(facts: Facts, node: Node) -> Iterator[Strategy]:
    """softmax and others that mix the elements along one dimension."""
    place, default = _MIXED.get(short_name(node.target), (1, None))
    shape, mixed = facts.shape(node.name), argument(node, place, "dim", default)
    if isinstance(mixed, int) and len(node.inputs) == 1 and shape:
        for dim, size in enumerate(shape):
            if dim != mixed % len(shape):
                yield from facts.along(node, {node.inputs[0]: dim}, dim, size)


_MIXED = {
    "topk": (2, -1),
    "normalize": (2, 1),
    "glu": (1, -1),
    "sort": (1, -1),
}  # the argument, and what it is if not given


def _reduction(facts: Facts, node: Node) -> Iterator[Strategy]:
    if len(node.inputs) != 1:
        return
    (name,) = node.inputs
    shape, out = facts.shape(name), facts.shape(node.name)
    dims = argument(node, 1, "dim")
    reduced = range(len(shape)) if dims is None or dims in ((), []) else [dims] if isinstance(dims, int) else dims
    if isinstance(dims, bool) or not shape:
        return  # var(x, unbiased)
    gone = [dim % len(shape) for dim in reduced]
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    keeps_rank = len(out) == len(shape)
    for dim in kept:
        yield from facts.along(node, {name: dim}, dim if keeps_rank else kept.index(dim), shape[dim])
    if short_name(node.target) == "sum":
        for dim in gone:
            yield from facts.along(node, {name: dim}, None, shape[dim])
        yield Strategy((PARTIAL,), PARTIAL)


def _cross_entropy(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Every rank the classes that it has the logits of; the ranks sum up three numbers for each label, once they know the largest logit.

    Which classes those are must be plain: they are not sliced in blocks.
    """
    names = operands(argument(node, 0, "input"), argument(node, 1, "target"))
    given = [argument(node, i, name) for i, name in ((2, "weight"), (3, "size_average"), (5, "reduce"))]
    if names is None or any(value is not None for value in given) or facts.requires_grad(names[1]):
        return
    shape, labels = facts.shape(names[0]), facts.spec(names[1])
    if len(shape) != 2 or shape[1] % facts.degree or labels is None or labels.dtype not in ("int64", "int32"):
        return
    inputs = tuple(Layout.sharded(1) if name == names[0] else REPLICATED for name in node.inputs)
    share = 2 * 4 * shape[0] * (facts.degree - 1) // facts.degree
    yield Strategy(inputs, REPLICATED, sent=(share, 3 * share))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_POINTWISE, _pointwise),
        **dict.fromkeys(("softmax", "log_softmax", "cumsum", *_MIXED), _all_but_one),
        **dict.fromkeys(("sum", "mean", "var", "std", "amax", "amin", "logsumexp"), _reduction),
        **dict.fromkeys(("layer_norm", "rms_norm"), _normalised),
        **dict.fromkeys(("matmul", "bmm", "__rmatmul__"), _matmul),
        **NAMED_MOVING_RULES,
        **MOVING_RULES,
        **IMAGE_RULES,
        "linear": _linear,
        "addmm": _addmm,
        "baddbmm": _baddbmm,
        "cross_entropy": _cross_entropy,
        "einsum": _einsum,
        "embedding": _embedding,
        "scaled_dot_product_attention": _attention,
    }
)  # by short name, or by target
