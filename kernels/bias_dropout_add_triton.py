"""The kernels of bias-dropout-add; the formula and the mask are in `smpc.kernels.bias_dropout_add`.

A program holds one tile of the mask's definition, 4 x 1024 elements: one call of the generator yields a word for each of the four.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smpc.kernels.bias_dropout_add import TILE, WORDS
from smpc.kernels.runtime import LAUNCH_OPTIONS, launching_on
from smpc.kernels.variants import KernelVariant, variant

_LANES = TILE // WORDS
_WARPS = 4  # of 32 threads with 8 elements of each quarter: 16 bytes of a half-precision type


@triton.jit
def dropped_add(x, bias, residual, out, at, size, column, columns, words, threshold, scale):
    """One quarter of a tile: mask * (x + bias) * scale + residual."""
    valid = at < size
    values = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    if bias is not None:
        values += tl.load(bias + column % columns, mask=valid, other=0.0).to(tl.float32)
    keep = (words >> 8).to(tl.int32, bitcast=True) >= threshold
    result = tl.where(keep, values * scale, 0.0)
    if residual is not None:
        result += tl.load(residual + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def bias_dropout_add_kernel(x, bias, residual, out, seed, size, columns, threshold, scale, LANES: tl.constexpr):
    """Forward; and backward, where x is the gradient and there is neither bias nor residual."""
    tile = tl.program_id(0)
    lane = tl.arange(0, LANES)
    w0, w1, w2, w3 = tl.randint4x(tl.load(seed), tile * LANES + lane)
    start = tile.to(tl.int64) * (4 * LANES)
    at = start + lane
    column = (start % columns).to(tl.int32) + lane  # one long division for the tile, short ones for its elements
    dropped_add(x, bias, residual, out, at, size, column, columns, w0.to(tl.uint32, bitcast=True), threshold, scale)
    at += LANES
    column += LANES
    dropped_add(x, bias, residual, out, at, size, column, columns, w1.to(tl.uint32, bitcast=True), threshold, scale)
    at += LANES
    column += LANES
    dropped_add(x, bias, residual, out, at, size, column, columns, w2.to(tl.uint32, bitcast=True), threshold, scale)
    at += LANES
    column += LANES
    dropped_add(x, bias, residual, out, at, size, column, columns, w3.to(tl.uint32, bitcast=True), threshold, scale)


def launch_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor, threshold: int, scale: float, seed: Tensor
) -> Tensor:
    """residual + dropout(x + bias)."""
    return _launch(x, None if bias is None else bias.contiguous(), residual.contiguous(), threshold, scale, seed)


def launch_backward(grad: Tensor, threshold: int, scale: float, seed: Tensor) -> Tensor:
    """mask * grad * scale."""
    return _launch(grad, None, None, threshold, scale, seed)


def _launch(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, threshold: int, scale: float, seed: Tensor
) -> Tensor:
    values = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        with launching_on(x.device):
            bias_dropout_add_kernel[(triton.cdiv(out.numel(), TILE),)](
                values,
                bias,
                residual,
                out,
                seed,
                out.numel(),
                x.shape[-1],
                threshold,
                scale,
                LANES=_LANES,
                num_warps=_WARPS,
                **LAUNCH_OPTIONS,
            )
    return out


def _variant(kind: str, backward: bool) -> KernelVariant:
    data = f"*{kind}:16"
    present = {"x": data, "out": data} | ({} if backward else {"bias": data, "residual": data})
    return variant(
        f"bias_dropout_add {'backward' if backward else 'forward'} {kind}",
        bias_dropout_add_kernel,
        {**present, "seed": "*i64:16", "size": "i32:16", "columns": "i32:16", "threshold": "i32", "scale": "fp32"},
        {**(dict.fromkeys(("bias", "residual")) if backward else {}), "LANES": _LANES},
        num_warps=_WARPS,
    )


VARIANTS = tuple(_variant(kind, backward) for kind in ("bf16", "fp16", "fp32") for backward in (False, True))
