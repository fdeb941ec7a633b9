"""The kernels of bias-dropout-add; the formula and the mask are in `smpc.kernels.bias_dropout_add`.

A program holds GROUPS groups of four rows, COLUMNS wide: one call of the generator yields a word for each of a group's rows. The
backward kernel strides over the groups of its columns and keeps its part of the bias's gradient in fp32 registers; the parts are
summed afterwards, in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smpc.kernels.bias_dropout_add import WORDS
from smpc.kernels.launch.backend import LAUNCH_OPTIONS, launching_on, num_programs
from smpc.kernels.launch.variants import KernelVariant, variant

_LANES = 1024  # groups times columns
_WARPS = 4  # of 32 threads with 8 elements of each row: 16 bytes of a half-precision type


@triton.jit
def kept_words(words, threshold):
    """Whether the places of these words are kept."""
    return (words.to(tl.uint32, bitcast=True) >> 8).to(tl.int32, bitcast=True) >= threshold


@triton.jit
def dropped_add(
    x, shift, residual, out, row, column, rows, columns, x_stride, residual_stride, words, threshold, scale
):
    """One row of each group: mask * (x + bias) * scale + residual."""
    valid = (row < rows) & (column < columns)
    values = tl.load(x + row * x_stride + column, mask=valid, other=0.0).to(tl.float32) + shift
    result = tl.where(kept_words(words, threshold), values * scale, 0.0)
    result += tl.load(residual + row * residual_stride + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def bias_dropout_add_forward_kernel(
    x,
    bias,
    residual,
    out,
    seed,
    rows,
    columns,
    x_stride,
    residual_stride,
    threshold,
    scale,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """residual + mask * (x + bias) * scale of a tile."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    shift = tl.zeros((1, COLUMNS), tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    w0, w1, w2, w3 = tl.randint4x(tl.load(seed), group * columns + column)
    row = group.to(tl.int64) * 4
    dropped_add(x, shift, residual, out, row, column, rows, columns, x_stride, residual_stride, w0, threshold, scale)
    dropped_add(
        x, shift, residual, out, row + 1, column, rows, columns, x_stride, residual_stride, w1, threshold, scale
    )
    dropped_add(
        x, shift, residual, out, row + 2, column, rows, columns, x_stride, residual_stride, w2, threshold, scale
    )
    dropped_add(
        x, shift, residual, out, row + 3, column, rows, columns, x_stride, residual_stride, w3, threshold, scale
    )


@triton.jit
def dropped(grad, grad_x, row, column, rows, columns, grad_stride, words, threshold, scale):
    """One row of each group: mask * grad * scale, written and returned."""
    valid = (row < rows) & (column < columns)
    incoming = tl.load(grad + row * grad_stride + column, mask=valid, other=0.0).to(tl.float32)
    result = tl.where(kept_words(words, threshold), incoming * scale, 0.0)
    tl.store(grad_x + row * columns + column, result.to(grad_x.dtype.element_ty), mask=valid)
    return result


@triton.jit
def bias_dropout_add_backward_kernel(
    grad,
    grad_x,
    bias_parts,
    seed,
    rows,
    columns,
    grad_stride,
    threshold,
    scale,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dx of COLUMNS columns (axis 0 of the grid), every P-th tile of groups (axis 1), and its part of db."""
    program = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    key = tl.load(seed)
    total = tl.zeros((GROUPS, COLUMNS), tl.float32)
    for tile in range(program, tl.cdiv(rows, 4 * GROUPS), tl.num_programs(1)):
        group = tile * GROUPS + tl.arange(0, GROUPS)[:, None]
        w0, w1, w2, w3 = tl.randint4x(key, group * columns + column)
        row = group.to(tl.int64) * 4
        total += dropped(grad, grad_x, row, column, rows, columns, grad_stride, w0, threshold, scale)
        total += dropped(grad, grad_x, row + 1, column, rows, columns, grad_stride, w1, threshold, scale)
        total += dropped(grad, grad_x, row + 2, column, rows, columns, grad_stride, w2, threshold, scale)
        total += dropped(grad, grad_x, row + 3, column, rows, columns, grad_stride, w3, threshold, scale)
    if bias_parts is not None:
        parts = tl.sum(total, axis=0)[None, :]
        tl.store(bias_parts + program * columns + column, parts, mask=column < columns)


def launch_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor, threshold: int, scale: float, seed: Tensor
) -> Tensor:
    """residual + dropout(x + bias) of matrices with contiguous rows."""
    rows, columns = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = _tile(columns)
        grid = (triton.cdiv(rows, WORDS * tile["GROUPS"]), triton.cdiv(columns, tile["COLUMNS"]))
        with launching_on(x.device):
            bias_dropout_add_forward_kernel[grid](
                x,
                None if bias is None else bias.contiguous(),
                residual,
                out,
                seed,
                rows,
                columns,
                x.stride(0),
                residual.stride(0),
                threshold,
                scale,
                **tile,
                num_warps=_WARPS,
                **LAUNCH_OPTIONS,
            )
    return out


def launch_backward(grad: Tensor, threshold: int, scale: float, seed: Tensor, of_bias: bool) -> tuple[Tensor, Tensor]:
    """mask * grad * scale of a matrix with contiguous rows, and its sum over rows in fp32 (empty unless wanted)."""
    rows, columns = grad.shape
    grad_x = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    tile = _tile(columns)
    across = triton.cdiv(columns, tile["COLUMNS"])
    tiles = triton.cdiv(rows, WORDS * tile["GROUPS"])
    down = max(1, min(4 * num_programs(grad.device) // max(1, across), tiles))
    parts = torch.zeros(down, columns, dtype=torch.float32, device=grad.device) if of_bias else None
    if grad.numel():
        with launching_on(grad.device):
            bias_dropout_add_backward_kernel[(across, down)](
                grad,
                grad_x,
                parts,
                seed,
                rows,
                columns,
                grad.stride(0),
                threshold,
                scale,
                **tile,
                num_warps=_WARPS,
                **LAUNCH_OPTIONS,
            )
    return grad_x, grad.new_empty(0, dtype=torch.float32) if parts is None else parts.sum(0)


def _tile(columns: int) -> dict[str, int]:
    """As wide as the matrix, up to the lanes of a program; the narrower, the more groups."""
    width = min(_LANES, triton.next_power_of_2(max(1, columns)))
    return {"GROUPS": _LANES // width, "COLUMNS": width}


def _variants(kind: str, columns: int) -> tuple[KernelVariant, KernelVariant]:
    data = f"*{kind}:16"
    shape = {"seed": "*i64:16", "rows": "i32:16", "columns": "i32:16", "threshold": "i32", "scale": "fp32"}
    return (
        variant(
            f"bias_dropout_add forward {kind} n{columns}",
            bias_dropout_add_forward_kernel,
            {
                **dict.fromkeys(("x", "bias", "residual", "out"), data),
                **shape,
                **dict.fromkeys(("x_stride", "residual_stride"), "i32:16"),
            },
            _tile(columns),
            num_warps=_WARPS,
        ),
        variant(
            f"bias_dropout_add backward {kind} n{columns}",
            bias_dropout_add_backward_kernel,
            {
                **dict.fromkeys(("grad", "grad_x"), data),
                "bias_parts": "*fp32:16",
                **shape,
                "grad_stride": "i32:16",
            },
            _tile(columns),
            num_warps=_WARPS,
        ),
    )


VARIANTS = (
    *(one for kind in ("bf16", "fp16", "fp32") for one in _variants(kind, 4096)),
    *_variants("bf16", 128),
)
