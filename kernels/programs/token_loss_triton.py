"""The kernels of the loss of tokens; the formula and its letters are in `smpc.kernels.shared.token_loss`.

A program of `token_loss_kernel` walks one row, BLOCK columns at a time, with a running maximum and sum; ignored rows are not read.
With GRADIENT it walks the row again and writes the gradient over the logits. `token_loss_gradient_kernel` does that alone, a program
for every block of columns. Every element is read and written by one program, and each program reads the label's logit before it
writes, so input and output may be the same tensor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smpc.kernels.launch.backend import LAUNCH_OPTIONS, launching_on, warps_for
from smpc.kernels.launch.variants import KernelVariant, variant
from smpc.kernels.shared.token_loss import LossRule, RowStatistics, TokenLosses

_MAX_BLOCK = 8192
_GRADIENT_BLOCK = 4096


@triton.jit
def gradient_tile(values, column, place, log_sum, label_smoothing, z_loss, classes):
    """dx of a tile of one row, for a loss with gradient 1."""
    finite = tl.where(log_sum == float("-inf"), 0.0, log_sum)
    result = tl.exp(values - finite) * (1.0 + 2.0 * z_loss * finite) - label_smoothing / classes
    return tl.where(column == place, result - (1.0 - label_smoothing), result)


@triton.jit
def token_loss_kernel(
    logits,
    target,
    loss,
    lse,
    statistics,
    rows,
    columns,
    live,
    stride,
    first,
    classes,
    ignore_index,
    label_smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    PENALTY: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss and lse of a row, or its four statistics if `statistics` [4, rows] is given."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(target + row).to(tl.int64)
    logits += row * stride
    place = label - first
    here = (place >= 0) & (place < live) & (label != ignore_index)
    largest = float("-inf")
    exponentials = 0.0
    total = 0.0
    end = tl.where(label == ignore_index, 0, live)  # an ignored row has nothing to read
    chosen = tl.load(logits + place, mask=here, other=0.0).to(tl.float32)
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(logits + column, mask=column < live, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(values, axis=0))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        exponentials = exponentials * tl.exp(largest - finite) + tl.sum(tl.exp(values - finite), axis=0)
        if SMOOTH:
            total += tl.sum(tl.where(column < live, values, 0.0), axis=0)
        largest = larger
    if statistics is not None:
        tl.store(statistics + row, largest)
        tl.store(statistics + rows + row, exponentials)
        tl.store(statistics + 2 * rows + row, chosen)
        tl.store(statistics + 3 * rows + row, total)
    else:
        nothing = exponentials == 0.0  # an ignored row, or one of -inf
        finite = tl.where(nothing, 0.0, largest) + tl.log(tl.where(nothing, 1.0, exponentials))
        log_sum = tl.where(nothing, tl.where(label == ignore_index, 0.0, float("-inf")), finite)
        result = tl.where(here & (chosen != float("-inf")), log_sum - chosen, float("inf"))
        if SMOOTH:
            smooth = tl.where(total == float("-inf"), float("inf"), log_sum - total / classes)
            result = (1.0 - label_smoothing) * result + label_smoothing * smooth
        if PENALTY:
            result += z_loss * log_sum * log_sum
        tl.store(loss + row, tl.where(label == ignore_index, 0.0, result))
        tl.store(lse + row, log_sum)
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                counts = column < end
                values = tl.load(logits + column, mask=counts, other=0.0).to(tl.float32)
                slope = gradient_tile(values, column, place, log_sum, label_smoothing, z_loss, classes)
                slope = tl.where(counts, slope, 0.0)
                tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=column < columns)


@triton.jit
def token_loss_gradient_kernel(
    grad,
    logits,
    target,
    lse,
    out,
    columns,
    live,
    stride,
    out_stride,
    first,
    classes,
    ignore_index,
    label_smoothing,
    z_loss,
    BLOCK: tl.constexpr,
):
    """dx of BLOCK columns (axis 1 of the grid) of a row (axis 0)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(target + row).to(tl.int64)
    counts = column < tl.where(label == ignore_index, 0, live)
    values = tl.load(logits + row * stride + column, mask=counts, other=0.0).to(tl.float32)
    slope = gradient_tile(values, column, label - first, tl.load(lse + row), label_smoothing, z_loss, classes)
    slope = tl.where(counts, slope * tl.load(grad + row), 0.0)
    tl.store(out + row * out_stride + column, slope.to(out.dtype.element_ty), mask=column < columns)


def launch_losses(logits: Tensor, target: Tensor, rule: LossRule, *, gradient: bool) -> TokenLosses:
    """`smpc.kernels.shared.token_loss.losses` by kernel, and `losses_then_gradient_` if `gradient`."""
    rows = logits.shape[0]
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    _launch(logits, target, rule, loss, lse, None, gradient)
    return TokenLosses(loss, lse)


def launch_statistics(logits: Tensor, target: Tensor, rule: LossRule) -> RowStatistics:
    """`smpc.kernels.shared.token_loss.statistics` by kernel."""
    statistics = torch.empty(4, logits.shape[0], dtype=torch.float32, device=logits.device)
    _launch(logits, target, rule, None, None, statistics, False)
    return RowStatistics(*statistics)


def launch_gradient(grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, rule: LossRule, out: Tensor) -> None:
    """`smpc.kernels.shared.token_loss.gradient` by kernel; `logits` and `out` have contiguous rows."""
    rows, columns = logits.shape
    if rows == 0:
        return
    block = min(_GRADIENT_BLOCK, triton.next_power_of_2(columns))
    with launching_on(logits.device):
        token_loss_gradient_kernel[(rows, triton.cdiv(columns, block))](
            grad.contiguous(),
            logits,
            target.contiguous(),
            lse,
            out,
            columns,
            rule.live_columns(columns),
            logits.stride(0),
            out.stride(0),
            rule.first,
            rule.classes,
            rule.ignore_index,
            rule.label_smoothing,
            rule.z_loss,
            BLOCK=block,
            num_warps=warps_for(block),
            **LAUNCH_OPTIONS,
        )


def _launch(
    logits: Tensor,
    target: Tensor,
    rule: LossRule,
    loss: Tensor | None,
    lse: Tensor | None,
    statistics: Tensor | None,
    gradient: bool,
) -> None:
    rows, columns = logits.shape
    if rows == 0:
        return
    block = min(_MAX_BLOCK, triton.next_power_of_2(columns))
    with launching_on(logits.device):
        token_loss_kernel[(rows,)](
            logits,
            target.contiguous(),
            loss,
            lse,
            statistics,
            rows,
            columns,
            rule.live_columns(columns),
            logits.stride(0),
            rule.first,
            rule.classes,
            rule.ignore_index,
            rule.label_smoothing,
            rule.z_loss,
            SMOOTH=rule.label_smoothing > 0,
            PENALTY=rule.z_loss > 0,
            GRADIENT=gradient,
            BLOCK=block,
            num_warps=warps_for(block),
            **LAUNCH_OPTIONS,
        )


_NUMBERS = {
    **dict.fromkeys(("columns", "live", "stride", "classes"), "i32:16"),
    **dict.fromkeys(("first", "ignore_index"), "i32"),
    **dict.fromkeys(("label_smoothing", "z_loss"), "fp32"),
}


def _loss_variant(kind: str, *, statistics: bool = False, gradient: bool = False) -> KernelVariant:
    results = ("statistics",) if statistics else ("loss", "lse")
    absent = ("loss", "lse") if statistics else ("statistics",)
    what = "statistics" if statistics else "losses then gradient" if gradient else "losses"
    return variant(
        f"token loss {what} {kind}",
        token_loss_kernel,
        {
            "logits": f"*{kind}:16",
            "target": "*i64:16",
            "rows": "i32:16",
            **_NUMBERS,
            **dict.fromkeys(results, "*fp32:16"),
        },
        {**dict.fromkeys(absent), "SMOOTH": True, "PENALTY": True, "GRADIENT": gradient, "BLOCK": _MAX_BLOCK},
        num_warps=warps_for(_MAX_BLOCK),
    )


def _gradient_variant(kind: str) -> KernelVariant:
    return variant(
        f"token loss gradient {kind}",
        token_loss_gradient_kernel,
        {
            "grad": "*fp32:16",
            "logits": f"*{kind}:16",
            "target": "*i64:16",
            "lse": "*fp32:16",
            "out": f"*{kind}:16",
            **_NUMBERS,
            "out_stride": "i32:16",
        },
        {"BLOCK": _GRADIENT_BLOCK},
        num_warps=warps_for(_GRADIENT_BLOCK),
    )


VARIANTS = (
    *(_loss_variant(kind) for kind in ("bf16", "fp16", "fp32")),
    *(_loss_variant(kind, gradient=True) for kind in ("bf16", "fp16", "fp32")),
    *(_loss_variant(kind, statistics=True) for kind in ("bf16", "fp32")),
    *(_gradient_variant(kind) for kind in ("bf16", "fp16", "fp32")),
)
