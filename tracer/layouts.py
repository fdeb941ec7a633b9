"""Which strides a value keeps when it goes to another rank.

Kernels choose how they walk over a tensor, and with it the order of their sums, by its layout: a slice of a larger tensor, whose rows lie
apart, gives other last bits than a contiguous copy. The order of dimensions, which of them are adjacent in memory, and their alignment
matter; the size of gaps does not. So the layout on arrival has the gaps of the original, but not their size.

    dense       no gaps: the strides are a permutation of contiguous ones. Arrives as it is
    gaps        in the same order and with the same alignment (64 bytes), as close as that allows. Slices along the innermost dimension
                have every second element
    others      expanded and overlapping tensors: contiguous

Example: rows of 64 floats that lie 768 apart, strides (768, 1), arrive with strides (80, 1).

`as_strided` is the one operation whose values depend on strides. Programs call `strided_view`, which knows those of the recording: a tensor
that has others, because it was gathered or has come from another rank, is copied into the recorded layout first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from smpc.errors import UsageError

STRIDED_VIEW = f"{__name__}.strided_view"

_ALIGNMENT = 64  # bytes: a cache line, and the longest vector of a processor


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def dense_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions by falling stride if the layout is dense, else None. Dimensions of size 1 stay where they are."""
    order = falling_order(shape, stride)
    return order if _packed(shape, stride, order) else None


def falling_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions by falling stride. Dimensions of size 1 stay where they are."""
    if 0 in shape or tuple(stride) == contiguous_stride(shape):
        return tuple(range(len(shape)))
    falling = iter(sorted((dim for dim, size in enumerate(shape) if size != 1), key=lambda dim: -stride[dim]))
    return tuple(dim if size == 1 else next(falling) for dim, size in enumerate(shape))


def _packed(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the dimensions, in this order, have no gaps between them."""
    if 0 in shape or tuple(stride) == contiguous_stride(shape):
        return True
    step = 1
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride[dim] != step:
            return False
        step *= shape[dim]
    return True


def arrival_stride(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides on arrival of a tensor of this shape and these strides."""
    order = falling_order(shape, stride)
    if _packed(shape, stride, order):
        return tuple(stride)
    found = list(stride)
    own = step = 1  # where the next dimension would begin without a gap: in the original, and on arrival
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride[dim] < own or not stride[dim]:
            return contiguous_stride(shape)
        if stride[dim] == own:
            found[dim] = step
        elif own == 1:
            found[dim] = 2
        else:
            multiple = max(_ALIGNMENT // itemsize, 1)
            found[dim] = step + 1 + (stride[dim] - step - 1) % multiple
        own, step = stride[dim] * shape[dim], found[dim] * shape[dim]
    return tuple(found)


def arrival_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes that the memory of such a tensor has on arrival."""
    if 0 in shape:
        return 0
    found = arrival_stride(shape, stride, itemsize)
    return itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, found, strict=True)))


def strided_view(
    tensor: Tensor, size: Any, stride: Any, offset: int, recorded: Sequence[int], memory: Sequence[int], may_copy: bool
) -> Tensor:
    """`tensor.as_strided(size, stride)`, `offset` elements behind the tensor's first one, as if the tensor had the recorded strides.

    `memory`: (offset, elements) of the tensor's storage when it was recorded, if the view goes beyond the tensor; else (). `may_copy`:
    whether nobody writes into this memory. Raises UsageError if the view would have other values than it was recorded with.
    """
    own = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    same = own == [step for step, size in zip(recorded, tensor.shape, strict=True) if size != 1]
    found = (tensor.storage_offset(), tensor.untyped_storage().nbytes() // tensor.element_size())
    if (memory and found != tuple(memory)) or not (same or may_copy):
        raise UsageError(
            f"as_strided: expected a tensor of shape {tuple(tensor.shape)} with strides {tuple(recorded)}"
            + (f" in a memory of {memory[1]} elements, at {memory[0]}" if memory else "")
            + f", as it was recorded, found strides {tuple(tensor.stride())} in a memory of {found[1]}, at {found[0]}: between "
            "ranks a tensor travels without what lies around it; what to do: take the view of x.contiguous(), or use x.unfold"
        )
    if not same:
        tensor = tensor.new_empty_strided(tuple(tensor.shape), tuple(recorded)).copy_(tensor)
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def strided_view_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], view: Tensor) -> tuple[Any, ...]:
    """The arguments with which `strided_view` gives a view that `as_strided` has given for these."""
    tensor, *rest = args
    size, stride = (rest[i] if len(rest) > i else kwargs[name] for i, name in enumerate(("size", "stride")))
    offset = view.storage_offset() - tensor.storage_offset()
    last = offset + sum((extent - 1) * step for extent, step in zip(view.shape, view.stride(), strict=True))
    is_inside = offset >= 0 and last < tensor.numel() and dense_order(tensor.shape, tensor.stride()) is not None
    memory = (tensor.storage_offset(), tensor.untyped_storage().nbytes() // tensor.element_size())
    return tensor, size, stride, offset, tuple(tensor.stride()), () if is_inside else memory, True
