"""The kernels of bias-GELU and SwiGLU; the formulas are in `smpc.kernels.activations`.

A program holds ROWS x COLUMNS elements. The backward kernel of bias-GELU strides over the rows of its columns and keeps its part of
the bias's gradient in fp32 registers; the parts are summed afterwards, in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smpc.kernels.launch.backend import LAUNCH_OPTIONS, launching_on, num_programs, warps_for
from smpc.kernels.launch.variants import KernelVariant, variant

_ROWS, _COLUMNS = 4, 1024
_BACKWARD_ROWS, _BACKWARD_COLUMNS = 4, 512


@triton.jit
def gelu_parts(values, TANH: tl.constexpr):
    """Phi(values) or its approximation, and its derivative."""
    if TANH:
        # (1 + tanh(a)) / 2 is sigmoid(2 a); 1.5957691216 is 2 sqrt(2 / pi).
        share = tl.sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))
        slope = share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * values * values)
    else:
        share = 0.5 * (1.0 + tl.erf(values * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * values * values)
    return share, slope


@triton.jit
def bias_gelu_forward_kernel(
    x, bias, out, rows, columns, x_stride, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """gelu(x + b) of a tile."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    valid = (row < rows) & (column < columns)
    values = tl.load(x + row * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    if bias is not None:
        values += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    share, _ = gelu_parts(values, TANH)
    tl.store(out + row * columns + column, (values * share).to(out.dtype.element_ty), mask=valid)


@triton.jit
def bias_gelu_backward_kernel(
    grad,
    x,
    bias,
    grad_x,
    bias_parts,
    rows,
    columns,
    grad_stride,
    x_stride,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dx of COLUMNS columns (axis 0 of the grid), every P-th tile of ROWS rows (axis 1), and its part of db."""
    program = tl.program_id(1)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    shift = tl.zeros((1, COLUMNS), tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        valid = (row < rows) & (column < columns)
        values = tl.load(x + row * x_stride + column, mask=valid, other=0.0).to(tl.float32) + shift
        incoming = tl.load(grad + row * grad_stride + column, mask=valid, other=0.0).to(tl.float32)
        share, slope = gelu_parts(values, TANH)
        result = incoming * (share + values * slope)
        if bias_parts is not None:
            total += result
        tl.store(grad_x + row * columns + column, result.to(grad_x.dtype.element_ty), mask=valid)
    if bias_parts is not None:
        parts = tl.sum(total, axis=0)[None, :]
        tl.store(bias_parts + program * columns + column, parts, mask=column < columns)


@triton.jit
def swiglu_forward_kernel(
    gate, up, out, rows, columns, gate_stride, up_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """silu(g) u of a tile."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    valid = (row < rows) & (column < columns)
    values = tl.load(gate + row * gate_stride + column, mask=valid, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=valid, other=0.0).to(tl.float32)
    result = values * tl.sigmoid(values) * factor
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def swiglu_backward_kernel(
    grad,
    gate,
    up,
    grad_gate,
    grad_up,
    rows,
    columns,
    grad_stride,
    gate_stride,
    up_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dg and du of a tile."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    valid = (row < rows) & (column < columns)
    at = row * columns + column
    incoming = tl.load(grad + row * grad_stride + column, mask=valid, other=0.0).to(tl.float32)
    values = tl.load(gate + row * gate_stride + column, mask=valid, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=valid, other=0.0).to(tl.float32)
    share = tl.sigmoid(values)
    slope = incoming * factor * share * (1.0 + values * (1.0 - share))
    tl.store(grad_gate + at, slope.to(grad_gate.dtype.element_ty), mask=valid)
    tl.store(grad_up + at, (incoming * values * share).to(grad_up.dtype.element_ty), mask=valid)


def launch_bias_gelu(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """gelu(x + bias) of a matrix with contiguous rows."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with launching_on(x.device):
            bias_gelu_forward_kernel[_grid(x)](
                x,
                None if bias is None else bias.contiguous(),
                out,
                *x.shape,
                x.stride(0),
                TANH=tanh,
                **_FORWARD_TILE,
                **LAUNCH_OPTIONS,
            )
    return out


def launch_bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias (empty without one)."""
    rows, columns = x.shape
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    across = triton.cdiv(columns, _BACKWARD_COLUMNS)
    down = max(1, min(4 * num_programs(x.device) // max(1, across), triton.cdiv(rows, _BACKWARD_ROWS)))
    parts = None if bias is None else torch.zeros(down, columns, dtype=torch.float32, device=x.device)
    if x.numel():
        with launching_on(x.device):
            bias_gelu_backward_kernel[(across, down)](
                grad,
                x,
                None if bias is None else bias.contiguous(),
                grad_x,
                parts,
                rows,
                columns,
                grad.stride(0),
                x.stride(0),
                TANH=tanh,
                **_BACKWARD_TILE,
                **LAUNCH_OPTIONS,
            )
    return grad_x, x.new_empty(0) if parts is None or bias is None else parts.sum(0).to(bias.dtype)


def launch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of matrices with contiguous rows."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if gate.numel():
        with launching_on(gate.device):
            swiglu_forward_kernel[_grid(gate)](
                gate, up, out, *gate.shape, gate.stride(0), up.stride(0), **_FORWARD_TILE, **LAUNCH_OPTIONS
            )
    return out


def launch_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty_like(grad_gate)
    if gate.numel():
        with launching_on(gate.device):
            swiglu_backward_kernel[_grid(gate)](
                grad,
                gate,
                up,
                grad_gate,
                grad_up,
                *gate.shape,
                grad.stride(0),
                gate.stride(0),
                up.stride(0),
                **_FORWARD_TILE,
                **LAUNCH_OPTIONS,
            )
    return grad_gate, grad_up


_FORWARD_TILE = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": warps_for(_ROWS * _COLUMNS)}
_BACKWARD_TILE = {
    "ROWS": _BACKWARD_ROWS,
    "COLUMNS": _BACKWARD_COLUMNS,
    "num_warps": warps_for(_BACKWARD_ROWS * _BACKWARD_COLUMNS),
}


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], _ROWS), triton.cdiv(x.shape[1], _COLUMNS)


def _variants(kind: str) -> tuple[KernelVariant, ...]:
    data = f"*{kind}:16"
    shape = {"rows": "i32:16", "columns": "i32:16"}
    forward = {"ROWS": _ROWS, "COLUMNS": _COLUMNS}
    backward = {"ROWS": _BACKWARD_ROWS, "COLUMNS": _BACKWARD_COLUMNS}
    warps = warps_for(_ROWS * _COLUMNS)
    pointers = dict.fromkeys(("grad", "gate", "up", "grad_gate", "grad_up"), data)
    strides = dict.fromkeys(("grad_stride", "gate_stride", "up_stride"), "i32:16")
    gelus = tuple(
        one
        for tanh in (False, True)
        for one in (
            variant(
                f"bias_gelu{'_tanh' if tanh else ''} forward {kind}",
                bias_gelu_forward_kernel,
                {"x": data, "bias": data, "out": data, **shape, "x_stride": "i32:16"},
                {"TANH": tanh, **forward},
                num_warps=warps,
            ),
            variant(
                f"bias_gelu{'_tanh' if tanh else ''} backward {kind}",
                bias_gelu_backward_kernel,
                {
                    **dict.fromkeys(("grad", "x", "bias", "grad_x"), data),
                    "bias_parts": "*fp32:16",
                    **shape,
                    **dict.fromkeys(("grad_stride", "x_stride"), "i32:16"),
                },
                {"TANH": tanh, **backward},
                num_warps=warps_for(_BACKWARD_ROWS * _BACKWARD_COLUMNS),
            ),
        )
    )
    return (
        *gelus,
        variant(
            f"swiglu forward {kind}",
            swiglu_forward_kernel,
            {**dict.fromkeys(("gate", "up", "out"), data), **shape, "gate_stride": "i32:16", "up_stride": "i32:16"},
            forward,
            num_warps=warps,
        ),
        variant(
            f"swiglu backward {kind}",
            swiglu_backward_kernel,
            {**pointers, **shape, **strides},
            forward,
            num_warps=warps,
        ),
    )


VARIANTS = tuple(one for kind in ("bf16", "fp16", "fp32") for one in _variants(kind))
