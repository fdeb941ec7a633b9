"""One linear layer for each expert, on rows that lie expert by expert.

torch's grouped matrix product where it has one for the dtype, the device and the sizes, which it wants in multiples of 16 bytes; a loop
of matrix products elsewhere (fp64, no rows). Both give the same bits on CPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

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
    found = _grouped(rows, right, counts) if _has_grouped(rows, right) else _looped(rows, right, counts)
    if bias is None:
        return found
    repeats = torch.tensor(counts, device=rows.device)
    return found + bias.repeat_interleave(repeats, 0, output_size=rows.shape[0])


def _grouped(rows: Tensor, right: Tensor, counts: Sequence[int]) -> Tensor:
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=rows.device)
    return F.grouped_mm(rows, right, offs=ends)


def _looped(rows: Tensor, right: Tensor, counts: Sequence[int]) -> Tensor:
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
