"""How dimensions survive a change of shape: `view`, `reshape`, `flatten` and the like.

A change of shape falls into groups of neighbouring dimensions whose products agree: [2, 8, 32] -> [16, 4, 8] has the groups (2, 8) -> (16)
and (32) -> (4, 8). A slice along a dimension is one along another where the group keeps its elements in one run, or in equal runs:

    32 -> 4, 8     S of the 32 is S of the 4
    96 -> 3, 4, 8  S of the 4 is S of the 96 in three blocks of 32
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]
Group = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Carried:
    """A slice along `source` (in blocks) of the input is one along `target` (in blocks) of the output.

    `any_blocks`: the dimension itself is unchanged, so its blocks are kept, whatever they are.
    """

    source: int
    target: int
    source_blocks: Shape = ()
    target_blocks: Shape = ()
    any_blocks: bool = False


def dimension_groups(source: Shape, target: Shape) -> tuple[Group, ...]:
    """The groups of dimensions, those of size 1 left out; empty if the shapes hold no elements."""
    if 0 in source or math.prod(source) != math.prod(target):
        return ()
    groups: list[Group] = []
    ins, outs = [d for d, n in enumerate(source) if n != 1], [d for d, n in enumerate(target) if n != 1]
    i = o = 0
    while i < len(ins):
        first_i, first_o = i, o
        size_i, size_o = source[ins[i]], target[outs[o]]
        i, o = i + 1, o + 1
        while size_i != size_o:
            if size_i < size_o:
                size_i, i = size_i * source[ins[i]], i + 1
            else:
                size_o, o = size_o * target[outs[o]], o + 1
        groups.append((tuple(ins[first_i:i]), tuple(outs[first_o:o])))
    return tuple(groups)


def carried(source: Shape, target: Shape, degree: int) -> Iterator[Carried]:
    """Every slicing that survives, for this number of slices."""
    for ins, outs in dimension_groups(source, target):
        if source[ins[0]] % degree == 0 and target[outs[0]] % degree == 0:
            yield Carried(ins[0], outs[0], any_blocks=len(ins) == len(outs) == 1)
        elif len(ins) == len(outs) == 1:
            continue
        elif len(ins) == 1:
            for dim, blocks in _in_blocks(outs, target, degree):
                yield Carried(ins[0], dim, source_blocks=blocks)
        elif len(outs) == 1:
            for dim, blocks in _in_blocks(ins, source, degree):
                yield Carried(dim, outs[0], target_blocks=blocks)


def _in_blocks(dims: tuple[int, ...], shape: Shape, degree: int) -> Iterator[tuple[int, Shape]]:
    """The first of the inner dimensions that can be sliced, and the blocks of the product that this means."""
    total = math.prod(shape[dim] for dim in dims)
    count = shape[dims[0]]
    for dim in dims[1:]:
        if shape[dim] % degree == 0:
            yield dim, (total // count,) * count
            return
        count *= shape[dim]
