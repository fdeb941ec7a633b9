"""Linear maps of mixtures of experts: rows spread and collected, and one linear layer for each expert.

`spread_rows` and `collected` have their adjoints as backward.

Terms
    slot      place j of token n among its k experts, numbered n k + j
    source    [M] for each of M rows: the slot that it is a copy of. N k, one more than the last, for a row that is none's: it is zero
    places    [N k] for each slot its row, where every slot has one: to gather is much quicker than to put (torch's `index_put_`); else None

    spread     tokens [N, H] -> rows [M, H]        row m is token source[m] // k
    collected  rows [M, H]   -> slots [N k, H]     slot source[m] is row m; slots without a row are zero

The backward of `spread_rows` collects and sums over the k slots of a token by a view and a sum. So nothing is added by index, and sums are
made in one order, on GPUs too.

`grouped_linear` is one linear layer for each expert, on rows in the order of the experts. It is torch's grouped matrix product where it has
one for the dtype, the device and the sizes, which it wants in multiples of 16 bytes; a loop of matrix products elsewhere (fp64, no rows).
Both give the same bits on CPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from smpc.executor.collectives import linear_map


def inverse(permutation: Tensor) -> Tensor:
    """Where each place went: `inverse(p)[p[i]]` is i."""
    found = torch.empty_like(permutation)
    found[permutation] = torch.arange(len(permutation), device=permutation.device)
    return found


def spread_rows(
    tokens: Tensor, source: Tensor, num_slots: int, is_padded: bool, places: Tensor | None = None
) -> Tensor:
    """Row m is token source[m] // k of [N, H], for k = `num_slots`. `is_padded`: some rows are none's."""
    count, width = tokens.shape
    token = source if num_slots == 1 else source.div(num_slots, rounding_mode="floor")

    def back(grad: Tensor) -> Tensor:
        slots = _placed_rows(grad, source, count * num_slots, is_padded, places)
        return slots if num_slots == 1 else slots.view(count, num_slots, width).sum(1)

    return linear_map(tokens, lambda x: _taken_rows(x, token, is_padded), back)


def collected(rows: Tensor, source: Tensor, num_slots: int, is_padded: bool, places: Tensor | None = None) -> Tensor:
    """[`num_slots`, H]: slot source[m] is row m of [M, H]. Rows that are none's are dropped."""
    return linear_map(
        rows,
        lambda x: _placed_rows(x, source, num_slots, is_padded, places),
        lambda grad: _taken_rows(grad, source, is_padded),
    )


def permuted(rows: Tensor, order: Tensor, places: Tensor | None = None) -> Tensor:
    """Row r is row order[r] of [R, ...]; `order` is a permutation, and `places` its inverse, where it is known."""
    back = inverse(order) if places is None else places
    return linear_map(rows, lambda x: x.index_select(0, order), lambda grad: grad.index_select(0, back))


def unpermuted(rows: Tensor, order: Tensor) -> Tensor:
    """The inverse of `permuted`."""
    return permuted(rows, inverse(order), order)


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """The tensor itself; its gradient is multiplied by `factor` on the way back. It may be written into."""
    if factor == 1 or not tensor.requires_grad:
        return tensor
    found = tensor.view_as(tensor)
    # None where nothing but `touched` has used it: an expert without rows.
    found.register_hook(lambda grad: None if grad is None else grad * factor)  # type: ignore[no-untyped-call]
    return found


def touched(tensor: Tensor, other: Tensor) -> Tensor:
    """A copy of `tensor`, whose backward reaches `other` too, with a gradient of zero."""
    found: Tensor = _Touch.apply(tensor, other)  # type: ignore[no-untyped-call]
    return found


def _placed_rows(rows: Tensor, source: Tensor, num_slots: int, is_padded: bool, places: Tensor | None) -> Tensor:
    """Row m at place source[m]. One place more takes the rows that are none's."""
    if places is not None:
        return rows.index_select(0, places)
    slots = rows.new_zeros(num_slots + 1, *rows.shape[1:])
    slots[source] = rows
    return slots[:num_slots]


def _taken_rows(slots: Tensor, source: Tensor, is_padded: bool) -> Tensor:
    """The row at place source[m]; zero for the place after the last."""
    if is_padded:
        slots = torch.cat((slots, slots.new_zeros(1, *slots.shape[1:])))
    return slots.index_select(0, source)


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # what made `other` runs nevertheless


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes
_FIRST_CUDA = (8, 0)  # the compute capability


def grouped_linear(
    rows: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None = None, *, is_transposed: bool = False
) -> Tensor:
    """[R, out]: the first `counts[0]` rows of [R, in] by the first expert's layer, the next by the second's.

    `weight` is [E, out, in], or [E, in, out] if `is_transposed`; `bias` is [E, out].
    """
    right = weight if is_transposed else weight.transpose(-2, -1)
    found = (
        _grouped_products(rows, right, counts) if _has_grouped(rows, right) else _looped_products(rows, right, counts)
    )
    if bias is None:
        return found
    repeats = torch.tensor(counts, device=rows.device)
    return found + bias.repeat_interleave(repeats, 0, output_size=rows.shape[0])


def _grouped_products(rows: Tensor, right: Tensor, counts: Sequence[int]) -> Tensor:
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=rows.device)
    return F.grouped_mm(rows, right, offs=ends)


def _looped_products(rows: Tensor, right: Tensor, counts: Sequence[int]) -> Tensor:
    parts = torch.split(rows, list(counts))
    return torch.cat([part @ own for part, own in zip(parts, right.unbind(), strict=True)])


def _has_grouped(rows: Tensor, right: Tensor) -> bool:
    if not rows.shape[0] or rows.dtype != right.dtype or rows.dtype not in _DTYPES:
        return False
    if any(size * rows.element_size() % _ALIGNMENT for size in right.shape[1:]):
        return False
    if rows.is_cuda:
        return rows.dtype is torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= _FIRST_CUDA
    return rows.is_cpu
