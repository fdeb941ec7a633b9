"""The kernel that multiplies a tensor by a number on the device, in fp32."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smpc.kernels.launch.backend import LAUNCH_OPTIONS, launching_on, warps_for
from smpc.kernels.launch.variants import variant

_BLOCK = 4096


@triton.jit
def scale_kernel(values, factor, out, size, BLOCK: tl.constexpr):
    """out = values * factor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=at < size)


def launch_scale(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` times `factor` (fp32, no dimension), rounded to `dtype`."""
    flat = values.contiguous()
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    if flat.numel():
        with launching_on(values.device):
            scale_kernel[(triton.cdiv(flat.numel(), _BLOCK),)](
                flat, factor, out, flat.numel(), BLOCK=_BLOCK, num_warps=warps_for(_BLOCK), **LAUNCH_OPTIONS
            )
    return out


VARIANTS = tuple(
    variant(
        f"scale {kind} to {to}",
        scale_kernel,
        {"values": f"*{kind}:16", "factor": "*fp32:16", "out": f"*{to}:16", "size": "i32:16"},
        {"BLOCK": _BLOCK},
        num_warps=warps_for(_BLOCK),
    )
    for kind, to in (("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp16"))
)
