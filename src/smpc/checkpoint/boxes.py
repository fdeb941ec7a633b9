"""Boxes: axis-aligned parts of a tensor, in whole elements.

Box((4, 0), (2, 8))         rows 4 and 5 of a tensor with 8 columns
a & b                       what two boxes share, or None
find_gap(shape, boxes)      why boxes do not tile a tensor, or None: they neither overlap nor leave anything out
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
    """What is wrong with boxes that should tile a tensor of `shape`."""
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offsets) != len(shape):
            return f"a shard has {len(box.shape)} dimensions, the tensor {len(shape)}"
        if any(o + s > n for o, s, n in zip(box.offsets, box.shape, shape, strict=True)):
            return (
                f"the shard of shape {list(box.shape)} at {list(box.offsets)} sticks out of the tensor, {list(shape)}"
            )
    ordered = sorted(box for box in boxes if box.volume)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if shape and other.offsets[0] >= box.offsets[0] + box.shape[0]:
                break  # in order of the first offset: none of the rest can reach back
            if box & other is not None:
                return f"the shards at {list(box.offsets)} and {list(other.offsets)} overlap"
    missing = math.prod(shape) - sum(box.volume for box in ordered)
    if missing:
        return f"{missing} of {math.prod(shape)} elements belong to no shard"
    return None
