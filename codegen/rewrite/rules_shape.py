"""Sharding rules of operations that only move elements: views, transpositions, slices, splits and joins.

All of them keep sums: on summands (P) they give summands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from smpc.codegen.rewrite.shapes import carried
from smpc.codegen.rewrite.sharding import PARTIAL, Kind, Layout
from smpc.codegen.rewrite.strategy import Facts, Strategy, argument, short_name, split_sizes
from smpc.tracer.ir import Node
from smpc.tracer.literals import Ref, references
from smpc.tracer.targets import GETATTR, GETITEM

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
    gone = range(len(shape)) if dim is None else [dim % len(shape)] if isinstance(dim, int) else []
    order = [d for d in range(len(shape)) if not (d in gone and shape[d] == 1)]
    if len(order) == len(facts.shape(node.name)):
        yield from _permuted(facts, node, order)


def _reshape(facts: Facts, node: Node) -> Iterator[Strategy]:
    if len(node.inputs) != 1 or any(not isinstance(x, (int, tuple, list, Ref)) for x in node.args):
        return  # a view as another dtype
    (name,) = node.inputs
    source, target = facts.shape(name), facts.shape(node.name)
    for way in carried(source, target, facts.degree):
        if way.any_blocks:
            yield from facts.along(node, {name: way.source}, way.target, source[way.source])
        else:
            layout = Layout.sharded(way.source, way.source_blocks)
            yield Strategy((layout,), Layout.sharded(way.target, way.target_blocks))
    yield _SUMS


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
        shape = facts.shape(name)
        for place, size in enumerate(shape):
            ways = facts.along(node, {name: place}, place, size)
            yield from (way for way in ways if place != dim % len(shape) or not way.output.blocks)
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
    if len(sizes) > 1 and all(size % facts.degree == 0 for size in sizes):
        yield Strategy((Layout.sharded(along, sizes),), Layout.sharded(along))
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
    if len(sizes) > 1 and all(size and size % facts.degree == 0 for size in sizes):
        yield Strategy((Layout.sharded(along),) * len(node.inputs), Layout.sharded(along, sizes))
    yield Strategy((PARTIAL,) * len(node.inputs), PARTIAL)


def _getitem(facts: Facts, node: Node) -> Iterator[Strategy]:
    name = node.inputs[0]
    if facts.is_tuple(name):
        shape = facts.shape(node.name)
        for dim, size in enumerate(shape):
            yield from facts.along(node, {name: dim}, dim, size)
        yield _SUMS
        return
    if len(node.inputs) > 1 or references(node.args[1]):
        return
    order = _order_of_index(node.args[1], len(facts.shape(name)))
    if order is not None:
        yield from _permuted(facts, node, order)


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
    if strategy.output.kind is Kind.SHARDED and node.spec is not None:
        if name in ("view", "reshape", "expand"):
            local = strategy.output.local_shape(node.spec.shape, facts.degree)
            return _with_sizes(node, local)
        if name == "unflatten" or name == "flatten":
            local = strategy.output.local_shape(node.spec.shape, facts.degree)
            return _replaced(node, "torch.Tensor.reshape", (node.args[0], local), ())
    if name == "split" and strategy.inputs[0].kind is Kind.SHARDED:
        along = argument(node, 2, "dim", 0) % len(facts.shape(node.inputs[0]))
        if strategy.inputs[0].dim == along:
            sizes = [size // facts.degree for size in split_sizes(node, facts.shape(node.inputs[0]))]
            return _replaced(node, "torch.Tensor.split", (node.args[0], sizes), (("dim", along),))
    return node


def _with_sizes(node: Node, local: tuple[int, ...]) -> Node:
    """A view, reshape or expand to another shape; a size of -1 stays."""
    given = argument(node, 1, "shape", dict(node.kwargs).get("size"))
    as_list = isinstance(given, (tuple, list))
    old = tuple(given) if as_list else node.args[1:]
    sizes = tuple(-1 if before == -1 else size for before, size in zip(old, local, strict=True))
    return _replaced(node, node.target, (node.args[0], sizes) if as_list else (node.args[0], *sizes), ())


def _replaced(node: Node, target: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Node:
    return dataclasses.replace(node, target=target, args=args, kwargs=kwargs)


NAMED_RULES: Mapping[str, Callable[[Facts, Node], Iterator[Strategy]]] = MappingProxyType(
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
    }
)  # by short name
RULES: Mapping[str, Callable[[Facts, Node], Iterator[Strategy]]] = MappingProxyType(
    {GETITEM: _getitem, GETATTR: _attribute}
)  # by target
