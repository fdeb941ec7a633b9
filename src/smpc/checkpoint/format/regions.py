"""Boxes: axis-aligned parts of a tensor, in whole elements.

Box((4, 0), (2, 8))         rows 4 and 5 of a tensor with 8 columns
a & b                       what two boxes share, or None
find_gap(shape, boxes)      why boxes do not tile a tensor, or None: they neither overlap nor leave anything out
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_CORNERS = 1 << 24  # shards cut along many dimensions have many
_MOST_COMPARED = 500


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A box of `shape` at `offsets`."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __and__(self, other: Box) -> Box | None:
        if len(self.shape) != len(other.shape):
            return None
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )
        if any(start >= end for start, end in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(end - start for start, end in zip(low, high, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that take this box out of a tensor that holds `outer`."""
        return tuple(
            slice(start - origin, start - origin + size)
            for start, size, origin in zip(self.offsets, self.shape, outer.offsets, strict=True)
        )


def find_gap(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """The error of boxes that should tile a tensor of `shape`."""
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offsets) != len(shape):
            return f"a shard has {len(box.shape)} dimensions, the tensor {len(shape)}"
        if any(o + s > n for o, s, n in zip(box.offsets, box.shape, shape, strict=True)):
            return (
                f"the shard of shape {list(box.shape)} at {list(box.offsets)} sticks out of the tensor, {list(shape)}"
            )
    filled = [box for box in boxes if box.volume]
    cut = [dim for dim, size in enumerate(shape) if any(box.shape[dim] != size for box in filled)]
    if len(filled) << len(cut) > _MOST_CORNERS:
        return f"{len(filled)} shards cut along {len(cut)} dimensions are more than can be checked"
    if _regions_tile(shape, filled, cut):
        return None
    missing = math.prod(shape) - sum(box.volume for box in filled)
    return _overlapping_regions(filled) or (
        f"{missing} of {math.prod(shape)} elements belong to no shard" if missing > 0 else "the shards overlap"
    )


def _regions_tile(shape: Sequence[int], boxes: Sequence[Box], cut: Sequence[int]) -> bool:
    """Whether boxes inside a tensor cover every element once; in a time that grows with their number, not its square. `cut`: the
    dimensions along which they are smaller.

    Each box gives its corners signs, alternating from corner to neighbouring corner. The sums of signs determine how often each element
    is covered, so it is once exactly if only the corners of the whole are left, with the signs of one box.
    """
    if not math.prod(shape):
        return not boxes
    if not cut:
        return len(boxes) == 1
    signs: dict[tuple[int, ...], int] = {}
    whole = Box((0,) * len(shape), tuple(shape))
    for box, weight in [*((box, 1) for box in boxes), (whole, -1)]:
        ends = [(box.offsets[dim], box.offsets[dim] + box.shape[dim]) for dim in cut]
        for upper in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(pair[which] for pair, which in zip(ends, upper, strict=True))
            signs[corner] = signs.get(corner, 0) + (-weight if sum(upper) % 2 else weight)
    return not any(signs.values())


def _overlapping_regions(boxes: Sequence[Box]) -> str | None:
    """Two of the boxes that overlap; None if they are too many to look for them."""
    for index, box in enumerate(ordered := sorted(boxes)[:_MOST_COMPARED]):
        for other in ordered[index + 1 :]:
            if box.shape and other.offsets[0] >= box.offsets[0] + box.shape[0]:
                break  # in order of the first offset: none of the rest can reach back
            if box & other is not None:
                return f"the shards at {list(box.offsets)} and {list(other.offsets)} overlap"
    return None
