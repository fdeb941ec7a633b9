"""Sharding rules of operations on images and signals, [N, C, ...]: convolutions, norms over channels, pooling, resizing, padding.

For conv2d(x[N, C, H, W], w[O, C / g, h, w], b[O]) in g groups:

    x      w      b      output
    S(0)   B      B      S(0)      each rank some of the samples
    B      S(0)   S(0)   S(1)      g = 1: each rank some of the filters
    S(1)   S(1)   P      P         g = 1: ... some of the channels that they look at
    S(1)   S(0)   S(0)   S(1)      the ranks divide g: each rank some of the groups (not one, if kernels are longer than the input)
    B      S(0|)  S(0|)  S(1|)     they do not: each rank some of the filters of every group, a block of O / g for each
    S(1|)  S(1)   P      P         ... some of the channels of every group, blocks of C / g

Filters of transposed convolutions have the other order: [C, O / g, h, w]. Filters that are normalised (`torch._weight_norm`) are sliced
along the dimension whose slices have norms of their own, and exchanged for slices of filters where that is another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from smpc.codegen.rewrite.tensor_parallel.layouts import BROADCAST, PARTIAL, Layout, LayoutKind
from smpc.codegen.rewrite.tensor_parallel.strategy import (
    CONVOLUTIONS,
    Facts,
    Rule,
    Strategy,
    argument,
    num_groups,
    operands,
    short_name,
)
from smpc.tracer.constants import Ref
from smpc.tracer.ir import Node

_GROUPS = {
    **dict.fromkeys(CONVOLUTIONS, (6, "groups")),
    "group_norm": (1, "num_groups"),
}  # by short name, the argument that counts groups of channels
_AVERAGES = tuple(f"{kind}_pool{n}d" for kind in ("avg", "adaptive_avg") for n in (1, 2, 3))
_MAXIMA = tuple(f"max_pool{n}d" for n in (1, 2, 3))


def in_groups(facts: Facts, node: Node, strategy: Strategy) -> Node:
    """The node with as many groups as a rank has."""
    if short_name(node.target) not in _GROUPS:
        return node
    place, name = _GROUPS[short_name(node.target)]
    groups = argument(node, place, name, 1)
    if groups % facts.degree or strategy.output.kind is not LayoutKind.SHARDED or strategy.output.dim != 1:
        return node
    if len(node.args) > place:
        args = (*node.args[:place], groups // facts.degree, *node.args[place + 1 :])
        return dataclasses.replace(node, args=args)
    kwargs = {**dict(node.kwargs), name: groups // facts.degree}
    return dataclasses.replace(node, kwargs=tuple(kwargs.items()))


def _convolution(facts: Facts, node: Node) -> Iterator[Strategy]:
    bias = argument(node, 2, "bias")
    names = operands(argument(node, 0, "input"), argument(node, 1, "weight"), *([] if bias is None else [bias]))
    if names is None or len(facts.shape(names[0])) != len(facts.shape(names[1])):
        return
    x, weight, *rest = names
    out, own = (1, 0) if short_name(node.target).startswith("conv_transpose") else (0, 1)
    channels, groups = facts.shape(x)[1], num_groups(node)
    yield from facts.along(node, {x: 0}, 0, facts.shape(x)[0])
    if groups == 1:
        yield from facts.along(node, {weight: out, **dict.fromkeys(rest, 0)}, 1, facts.shape(weight)[out])
        yield from facts.along(node, {x: 1, weight: own}, None, channels, dict.fromkeys(rest, PARTIAL))
    elif groups % facts.num_pieces == 0 and not _is_unsafe_alone(facts, x, weight, groups):
        is_by_channel = groups == channels == facts.shape(node.name)[1]
        ways = facts.along(node, {x: 1, weight: 0, **dict.fromkeys(rest, 0)}, 1, channels)
        yield from (way for way in ways if is_by_channel or not way.output.blocks)
    elif groups % facts.degree:
        yield from _inside_groups(facts, node, groups, out, names)


def _is_unsafe_alone(facts: Facts, x: str, weight: str, groups: int) -> bool:
    """Whether a rank would have one group, whose kernel is longer than the input: without groups, oneDNN's backward of such a convolution
    writes beyond its memory (torch 2.13, fp32 on CPUs: gradients of inf, or the end of the process)."""
    sizes = zip(facts.shape(weight)[2:], facts.shape(x)[2:], strict=True)
    return groups == facts.degree and any(kernel > size for kernel, size in sizes)


def _inside_groups(facts: Facts, node: Node, groups: int, out: int, names: tuple[str, ...]) -> Iterator[Strategy]:
    """Slices of every group. `out`: the dimension of the weight that has filters."""
    x, weight, *bias = names
    taken, given = (facts.shape(name)[1] // groups for name in (x, node.name))

    def blocks(dim: int, size: int) -> Layout:
        return facts.sharded(dim, (size,) * groups)

    if given % facts.num_pieces == 0:
        filters = blocks(0, given) if out == 0 else facts.sharded(1)
        layouts = {x: BROADCAST, weight: filters, **dict.fromkeys(bias, blocks(0, given))}
        yield Strategy(tuple(layouts[name] for name in node.inputs), blocks(1, given))
    if taken % facts.num_pieces == 0:
        seen = facts.sharded(1) if out == 0 else blocks(0, taken)
        layouts = {x: blocks(1, taken), weight: seen, **dict.fromkeys(bias, PARTIAL)}
        yield Strategy(tuple(layouts[name] for name in node.inputs), PARTIAL)


def _batch_norm(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Functions of torch.nn.functional: without `training` their statistics come from buffers."""
    (x, *rest), shape = node.inputs, facts.shape(node.name)
    if not node.target.startswith("torch.nn.functional.") or len(shape) < 2 or argument(node, 0, "input") != Ref(x):
        return
    yield from facts.along(node, {x: 1, **dict.fromkeys(rest, 0)}, 1, shape[1])
    for dim, size in enumerate(shape):
        if dim != 1 and not argument(node, 5, "training", False):
            yield from facts.along(node, {x: dim}, dim, size)


def _group_norm(facts: Facts, node: Node) -> Iterator[Strategy]:
    (x, *rest), shape = node.inputs, facts.shape(node.name)
    if argument(node, 0, "input") != Ref(x):
        return
    yield from facts.along(node, {x: 0}, 0, shape[0])
    if argument(node, 1, "num_groups") % facts.num_pieces == 0:
        ways = facts.along(node, {x: 1, **dict.fromkeys(rest, 0)}, 1, shape[1])
        yield from (way for way in ways if not way.output.blocks)


def _leading_image_dims(facts: Facts, node: Node, mixed: int) -> Iterator[Strategy]:
    """All dimensions but the last ones, which are mixed."""
    if len(node.inputs) != 1 or facts.is_tuple(node.name):
        return
    (x,) = node.inputs
    shape = facts.shape(x)
    for dim in range(len(shape) - mixed):
        yield from facts.along(node, {x: dim}, dim, shape[dim])


def _pooling(facts: Facts, node: Node) -> Iterator[Strategy]:
    name = short_name(node.target)
    yield from _leading_image_dims(facts, node, int(name[-2]))
    if name in _AVERAGES and len(node.inputs) == 1:
        yield Strategy((PARTIAL,), PARTIAL)


def _interpolate(facts: Facts, node: Node) -> Iterator[Strategy]:
    """Where a size stays as it is, every element along that dimension comes from the one at its place."""
    yield from _leading_image_dims(facts, node, len(facts.shape(node.inputs[0])) - 2)
    sizes = argument(node, 1, "size")
    if len(node.inputs) == 1 and isinstance(sizes, (tuple, list)) and all(type(size) is int for size in sizes):
        (x,) = node.inputs
        for dim, (size, before) in enumerate(zip(sizes, facts.shape(x)[2:], strict=True), 2):
            if size == before:
                yield from facts.along(node, {x: dim}, dim, size)


def resized(facts: Facts, node: Node, strategy: Strategy) -> Node:
    """An interpolation to the size that a rank has."""
    dim, sizes = strategy.output.dim - 2, argument(node, 1, "size")
    if short_name(node.target) != "interpolate" or dim < 0:
        return node
    local = (*sizes[:dim], sizes[dim] // facts.degree, *sizes[dim + 1 :])
    kwargs = {name: value for name, value in node.kwargs if name != "size"}
    return dataclasses.replace(node, args=(node.args[0], local, *node.args[2:]), kwargs=tuple(kwargs.items()))


def _padded_image(facts: Facts, node: Node) -> Iterator[Strategy]:
    widths = argument(node, 1, "pad")
    if isinstance(widths, (tuple, list)) and all(isinstance(width, int) for width in widths):
        yield from _leading_image_dims(facts, node, len(widths) // 2)
        is_filled = argument(node, 2, "mode", "constant") == "constant" and argument(node, 3, "value")
        if not is_filled and len(node.inputs) == 1:
            yield Strategy((PARTIAL,), PARTIAL)


def _weight_norm(facts: Facts, node: Node) -> Iterator[Strategy]:
    """torch._weight_norm(v, g, dim): every slice along `dim` has a norm of its own."""
    names, dim = operands(*node.args[:2]) if len(node.args) >= 2 else None, argument(node, 2, "dim", 0)
    if names is None or not 0 <= dim < len(facts.shape(node.name)):
        return  # one norm of all
    yield from facts.along(node, dict.fromkeys(names, dim), dim, facts.shape(node.name)[dim])


IMAGE_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(CONVOLUTIONS, _convolution),
        **dict.fromkeys((*_AVERAGES, *_MAXIMA), _pooling),
        "batch_norm": _batch_norm,
        "group_norm": _group_norm,
        "interpolate": _interpolate,
        "pad": _padded_image,
        "_weight_norm": _weight_norm,
    }
)  # by short name
