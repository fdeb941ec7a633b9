"""The kernels of LayerNorm and RMSNorm; the formula and its letters are in `smpc.kernels.shared.norms`.

A program of the forward kernel holds ROWS whole rows, BLOCK >= columns wide: one read of the input, one write of the output.

The backward kernel runs as a fixed number of programs, two for each multiprocessor. Program p takes the tiles p, p + P, p + 2P, ...
and keeps its part of dw and db in fp32 registers; the parts are summed afterwards, in a fixed order, so that gradients repeat bit by bit:

    tile   0 1 2 3 4 5 6 7         p0: 0 4   p1: 1 5   p2: 2 6   p3: 3 7    ->  partials [P, columns]  ->  sum over P

Beyond MAX_FUSED_COLUMNS registers no longer hold a row and its parts (half as many when h is computed from the output): the row is
then taken in blocks, and the weights' gradients have a kernel of their own, which reads the inputs again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smpc.kernels.launch.backend import LAUNCH_OPTIONS, launching_on, num_programs, warps_for
from smpc.kernels.launch.variants import KernelVariant, variant
from smpc.kernels.shared.norms import Normed, NormGradients, NormRule, NormSaved
from smpc.kernels.shared.tensor_checks import as_rows

MAX_FUSED_COLUMNS = 8192
_TILE = 4096  # elements of a forward tile, where rows are shorter than that
_BACKWARD_TILE = 2048
_WIDE_BLOCK = 4096
_GRADIENT_ROWS, _GRADIENT_COLUMNS, _GRADIENT_WARPS = 32, 128, 8


@triton.jit
def normalized_tile(source, weight, bias, mean, rstd, valid, eps, CENTER: tl.constexpr, FROM_OUTPUT: tl.constexpr):
    """h of one tile, from the input or from the output; 0 outside."""
    if FROM_OUTPUT:
        least = tl.where(weight >= 0, tl.maximum(weight, eps), tl.minimum(weight, -eps))
        normalized = (source - bias) / least
    elif CENTER:
        normalized = (source - mean) * rstd
    else:
        normalized = source * rstd
    return tl.where(valid, normalized, 0.0)


@triton.jit
def norm_forward_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    summed,
    mean,
    rstd,
    rows,
    columns,
    x_stride,
    residual_stride,
    eps,
    offset,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y, s, m and k of ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    valid = (row < rows)[:, None] & inside[None, :]
    at = row[:, None] * columns + column[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=valid, other=0.0).to(
            tl.float32
        )
        rounded = values.to(summed.dtype.element_ty)
        tl.store(summed + at, rounded, mask=valid)
        values = rounded.to(tl.float32)
    if CENTER:
        average = tl.sum(values, axis=1) / columns
        tl.store(mean + row, average, mask=row < rows)
        values = tl.where(valid, values - average[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / columns + eps)
    tl.store(rstd + row, scale, mask=row < rows)
    result = values * scale[:, None]
    if weight is not None:
        result *= (tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset)[None, :]
    if bias is not None:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def norm_backward_kernel(
    grad,
    source,
    weight,
    bias,
    mean,
    rstd,
    grad_summed,
    grad_x,
    weight_parts,
    bias_parts,
    rows,
    columns,
    grad_stride,
    source_stride,
    summed_stride,
    eps,
    offset,
    CENTER: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ds of every row, and this program's parts of dw and db where there is room for them."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    factor = tl.full((1, BLOCK), 1.0, tl.float32)
    shift = tl.zeros((1, BLOCK), tl.float32)
    if weight is not None:
        factor = (tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset)[None, :]
    if FROM_OUTPUT and bias is not None:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live = row < rows
        valid = live[:, None] & inside[None, :]
        incoming = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        values = tl.load(source + row[:, None] * source_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=live, other=0.0)[:, None]
        average = scale
        if CENTER and not FROM_OUTPUT:
            average = tl.load(mean + row, mask=live, other=0.0)[:, None]
        normalized = normalized_tile(values, factor, shift, average, scale, valid, eps, CENTER, FROM_OUTPUT)
        if weight_parts is not None:
            weight_sum += incoming * normalized
        if bias_parts is not None:
            bias_sum += incoming
        scaled = incoming * factor
        result = scaled - normalized * (tl.sum(scaled * normalized, axis=1) / columns)[:, None]
        if CENTER:
            result -= (tl.sum(scaled, axis=1) / columns)[:, None]
        result *= scale
        if grad_summed is not None:
            result += tl.load(grad_summed + row[:, None] * summed_stride + column[None, :], mask=valid, other=0.0).to(
                tl.float32
            )
        tl.store(grad_x + row[:, None] * columns + column[None, :], result.to(grad_x.dtype.element_ty), mask=valid)
    if weight_parts is not None:
        tl.store(weight_parts + program * columns + column, tl.sum(weight_sum, axis=0), mask=inside)
    if bias_parts is not None:
        tl.store(bias_parts + program * columns + column, tl.sum(bias_sum, axis=0), mask=inside)


@triton.jit
def norm_wide_backward_kernel(
    grad,
    source,
    weight,
    bias,
    mean,
    rstd,
    grad_summed,
    grad_x,
    columns,
    grad_stride,
    source_stride,
    summed_stride,
    eps,
    offset,
    CENTER: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ds of one row, BLOCK columns at a time: once for the sums, once more (from the cache) for the result."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(rstd + row)
    average = scale
    if CENTER and not FROM_OUTPUT:
        average = tl.load(mean + row)
    projection = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(2):
        if turn == 1:
            along = tl.sum(projection, axis=0) / columns
            shared = tl.sum(total, axis=0) / columns
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            incoming = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
            values = tl.load(source + row * source_stride + column, mask=inside, other=0.0).to(tl.float32)
            factor = tl.full((BLOCK,), 1.0, tl.float32)
            shift = tl.zeros((BLOCK,), tl.float32)
            if weight is not None:
                factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
            if FROM_OUTPUT and bias is not None:
                shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            normalized = normalized_tile(values, factor, shift, average, scale, inside, eps, CENTER, FROM_OUTPUT)
            scaled = incoming * factor
            if turn == 0:
                projection += scaled * normalized
                total += scaled
            else:
                result = scaled - normalized * along
                if CENTER:
                    result -= shared
                result *= scale
                if grad_summed is not None:
                    result += tl.load(grad_summed + row * summed_stride + column, mask=inside, other=0.0).to(tl.float32)
                tl.store(grad_x + row * columns + column, result.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def norm_weight_gradient_kernel(
    grad,
    source,
    weight,
    bias,
    mean,
    rstd,
    weight_parts,
    bias_parts,
    rows,
    columns,
    grad_stride,
    source_stride,
    eps,
    offset,
    CENTER: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Parts of dw and db for BLOCK columns (axis 0 of the grid) and every P-th tile of ROWS rows (axis 1)."""
    program = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    factor = tl.full((1, BLOCK), 1.0, tl.float32)
    shift = tl.zeros((1, BLOCK), tl.float32)
    if FROM_OUTPUT:
        factor = (tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset)[None, :]
    if FROM_OUTPUT and bias is not None:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live = row < rows
        valid = live[:, None] & inside[None, :]
        incoming = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        values = tl.load(source + row[:, None] * source_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=live, other=0.0)[:, None]
        average = scale
        if CENTER and not FROM_OUTPUT:
            average = tl.load(mean + row, mask=live, other=0.0)[:, None]
        normalized = normalized_tile(values, factor, shift, average, scale, valid, eps, CENTER, FROM_OUTPUT)
        weight_sum += incoming * normalized
        if bias_parts is not None:
            bias_sum += incoming
    tl.store(weight_parts + program * columns + column, tl.sum(weight_sum, axis=0), mask=inside)
    if bias_parts is not None:
        tl.store(bias_parts + program * columns + column, tl.sum(bias_sum, axis=0), mask=inside)


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, rule: NormRule
) -> Normed:
    """`smpc.kernels.shared.norms.forward` by kernel."""
    matrix = as_rows(x)
    rows, columns = matrix.shape
    block = triton.next_power_of_2(columns)
    tile = max(1, min(16, _TILE // block))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = None if residual is None else torch.empty_like(out)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if rule.center else None
    addend = None if residual is None else as_rows(residual)
    if rows:
        with launching_on(x.device):
            norm_forward_kernel[(triton.cdiv(rows, tile),)](
                matrix,
                addend,
                None if weight is None else weight.contiguous(),
                None if bias is None else bias.contiguous(),
                out,
                summed,
                mean,
                rstd,
                rows,
                columns,
                matrix.stride(0),
                0 if addend is None else addend.stride(0),
                rule.eps,
                rule.offset,
                CENTER=rule.center,
                ROWS=tile,
                BLOCK=block,
                num_warps=warps_for(tile * block),
                **LAUNCH_OPTIONS,
            )
    return Normed(out, summed, mean, rstd)


def launch_backward(grad: Tensor, grad_summed: Tensor | None, saved: NormSaved, rule: NormRule) -> NormGradients:
    """`smpc.kernels.shared.norms.backward` by kernel."""
    incoming, source = as_rows(grad), as_rows(saved.source)
    rows, columns = incoming.shape
    block = triton.next_power_of_2(columns)
    tile = max(1, min(16, _BACKWARD_TILE // block))
    programs = max(1, min(num_programs(grad.device), triton.cdiv(rows, tile)))
    weight_parts = _parts(saved.weight, programs, columns)
    bias_parts = _parts(saved.bias, programs, columns)
    grad_x = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    addend = None if grad_summed is None else as_rows(grad_summed)
    weight = None if saved.weight is None else saved.weight.contiguous()
    bias = None if saved.bias is None else saved.bias.contiguous()
    inputs = (incoming, source, weight, bias, saved.mean, saved.rstd)
    strides = (incoming.stride(0), source.stride(0))
    summed_stride = 0 if addend is None else addend.stride(0)
    rules = {"eps": rule.eps, "offset": rule.offset, "CENTER": rule.center, "FROM_OUTPUT": saved.from_output}
    with launching_on(grad.device):
        if rows and columns <= _max_fused_columns(saved.from_output):
            norm_backward_kernel[(programs,)](
                *inputs,
                addend,
                grad_x,
                weight_parts,
                bias_parts,
                rows,
                columns,
                *strides,
                summed_stride,
                **rules,
                ROWS=tile,
                BLOCK=block,
                num_warps=warps_for(tile * block),
                **LAUNCH_OPTIONS,
            )
        elif rows:
            norm_wide_backward_kernel[(rows,)](
                *inputs,
                addend,
                grad_x,
                columns,
                *strides,
                summed_stride,
                **rules,
                BLOCK=_WIDE_BLOCK,
                num_warps=warps_for(_WIDE_BLOCK),
                **LAUNCH_OPTIONS,
            )
            if weight_parts is not None:
                norm_weight_gradient_kernel[(triton.cdiv(columns, _GRADIENT_COLUMNS), programs)](
                    *inputs,
                    weight_parts,
                    bias_parts,
                    rows,
                    columns,
                    *strides,
                    **rules,
                    ROWS=_GRADIENT_ROWS,
                    BLOCK=_GRADIENT_COLUMNS,
                    num_warps=_GRADIENT_WARPS,
                    **LAUNCH_OPTIONS,
                )
    return NormGradients(grad_x, _reduced(weight_parts, weight, grad), _reduced(bias_parts, bias, grad))


def _max_fused_columns(from_output: bool) -> int:
    return MAX_FUSED_COLUMNS // 2 if from_output else MAX_FUSED_COLUMNS


def _parts(parameter: Tensor | None, programs: int, columns: int) -> Tensor | None:
    # Zeros only where a program may not come to write its part: with no rows there is no launch.
    if parameter is None:
        return None
    return torch.zeros(programs, columns, dtype=torch.float32, device=parameter.device)


def _reduced(parts: Tensor | None, parameter: Tensor | None, like: Tensor) -> Tensor:
    if parts is None or parameter is None:
        return like.new_empty(0)
    return parts.sum(0).to(parameter.dtype)


def _forward_variant(kind: str, columns: int, *, center: bool, residual: bool, rows: int = 1) -> KernelVariant:
    block = triton.next_power_of_2(columns)
    data = f"*{kind}:16"
    present = {"x": data, "weight": data, "out": data, "rstd": "*fp32:16", "eps": "fp32", "offset": "fp32"}
    present |= {"residual": data, "summed": data} if residual else {}
    present |= {"bias": data, "mean": "*fp32:16"} if center else {}
    present |= dict.fromkeys(("rows", "columns", "x_stride", "residual_stride"), "i32:16")
    return variant(
        f"{'add_' if residual else ''}{'layer' if center else 'rms'}_norm forward {kind} n{columns}",
        norm_forward_kernel,
        present,
        {**_left_out(norm_forward_kernel, present), "CENTER": center, "ROWS": rows, "BLOCK": block},
        num_warps=warps_for(rows * block),
    )


def _backward_variant(
    kind: str, columns: int, *, center: bool, summed: bool, from_output: bool = False, rows: int = 1
) -> KernelVariant:
    fused = columns <= _max_fused_columns(from_output)
    block = triton.next_power_of_2(columns) if fused else _WIDE_BLOCK
    kernel = norm_backward_kernel if fused else norm_wide_backward_kernel
    data = f"*{kind}:16"
    present = _backward_signature(kind, center) | {"grad_x": data, "summed_stride": "i32:16"}
    present |= {"grad_summed": data} if summed else {}
    if fused:
        present |= {"rows": "i32:16", "weight_parts": "*fp32:16"} | ({"bias_parts": "*fp32:16"} if center else {})
    constants = {"CENTER": center, "FROM_OUTPUT": from_output, "BLOCK": block} | ({"ROWS": rows} if fused else {})
    return variant(
        f"{'add_' if summed else ''}{'layer' if center else 'rms'}_norm backward {kind} n{columns}"
        + (" from output" if from_output else ""),
        kernel,
        present,
        {**_left_out(kernel, present), **constants},
        num_warps=warps_for(rows * block),
    )


def _weight_gradient_variant(kind: str, *, center: bool) -> KernelVariant:
    present = _backward_signature(kind, center) | {"weight_parts": "*fp32:16", "rows": "i32:16"}
    present |= {"bias_parts": "*fp32:16"} if center else {}
    constants = {"CENTER": center, "FROM_OUTPUT": False, "ROWS": _GRADIENT_ROWS, "BLOCK": _GRADIENT_COLUMNS}
    return variant(
        f"{'layer' if center else 'rms'}_norm weight gradient {kind}",
        norm_weight_gradient_kernel,
        present,
        {**_left_out(norm_weight_gradient_kernel, present), **constants},
        num_warps=_GRADIENT_WARPS,
    )


def _backward_signature(kind: str, center: bool) -> dict[str, str]:
    data = f"*{kind}:16"
    present = {"grad": data, "source": data, "weight": data, "rstd": "*fp32:16", "eps": "fp32", "offset": "fp32"}
    present |= {"bias": data, "mean": "*fp32:16"} if center else {}
    return present | dict.fromkeys(("columns", "grad_stride", "source_stride"), "i32:16")


def _left_out(kernel: Any, present: dict[str, str]) -> dict[str, object]:
    return dict.fromkeys(name for name in kernel.arg_names if name not in present and not name.isupper())


VARIANTS = (
    *(_forward_variant(kind, 4096, center=False, residual=True) for kind in ("bf16", "fp16", "fp32")),
    _forward_variant("bf16", 128, center=False, residual=False, rows=16),
    _forward_variant("bf16", 12288, center=True, residual=True),
    _forward_variant("fp32", 32768, center=True, residual=True),
    *(_backward_variant(kind, 4096, center=True, summed=True) for kind in ("bf16", "fp16", "fp32")),
    _backward_variant("bf16", 128, center=False, summed=False, rows=16),
    _backward_variant("bf16", 8192, center=True, summed=True),
    _backward_variant("fp32", 4096, center=True, summed=True, from_output=True),
    _backward_variant("bf16", 12288, center=True, summed=True),
    _backward_variant("fp32", 12288, center=True, summed=True, from_output=True),
    *(_weight_gradient_variant(kind, center=True) for kind in ("bf16", "fp32")),
)
