"""The kernels of `smpc.kernels.optimizers`: one launch for all tensors of a bucket, by the tables of `smpc.kernels.shared.tensor_table`.

A program takes one chunk of one tensor, BLOCK elements at a time. Whole blocks are read without masks, the last block of a tensor
with one, since a mask of unknown length would keep the compiler from reading 16 bytes at once.

    adamw, novograd    read p g m (v), write p m (v)
    norms              every program writes the sum of squares (or the maximum) of its chunk; one program a tensor adds them up
    lamb               1. read p g m v, write m v, and the sums of p^2 and u^2 of the chunk     (u is not stored)
                       2. read p m v, compute u again, write p
                       without a ratio both in one

Sums are added in a fixed order, so results repeat bit by bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smpc.kernels.launch.backend import LAUNCH_OPTIONS, launching_on
from smpc.kernels.optimizers import AdamWRule, Bucket, LambRule, NovoGradRule, Reduce, split_factors, trust_ratios
from smpc.kernels.shared.tensor_table import CHUNK, COLUMNS, TableCache, TensorTable

BLOCK, WARPS = 2048, 8
SUM_BLOCK, SUM_WARPS = 1024, 4
_KINDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

# Columns of a table's row.
_PARAM, _GRAD, _FIRST, _SECOND, _MASTER, _MAXIMUM, _SIZE = (tl.constexpr(column) for column in range(COLUMNS))
_WIDTH = tl.constexpr(COLUMNS)


@triton.jit
def pointer_to(row, column: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """The tensor in this column of a row, as a pointer."""
    pointer = tl.load(row + column).to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def loaded(pointer, at, valid):
    """Elements in fp32, 0 outside; `valid` is None where all are inside."""
    if valid is None:
        values = tl.load(pointer + at)
    else:
        values = tl.load(pointer + at, mask=valid, other=0.0)
    return values.to(tl.float32)


@triton.jit
def stored(pointer, at, values, valid):
    """Writes fp32 values in the pointer's type."""
    tl.store(pointer + at, values.to(pointer.dtype.element_ty), mask=valid)


@triton.jit
def stored_param(param, master, at, values, valid, MASTER: tl.constexpr):
    """Writes a parameter, and its master where it has one."""
    stored(param, at, values, valid)
    if MASTER:
        stored(master, at, values, valid)


@triton.jit
def larger(a, b):
    """The larger number; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def whole(values, MAXIMUM: tl.constexpr):
    """The sum of a vector, or its maximum, NaN if there is one in it."""
    if MAXIMUM:
        broken = tl.sum(tl.where(values != values, 1.0, 0.0), axis=0)
        result = tl.where(broken > 0, float("nan"), tl.max(values, axis=0))
    else:
        result = tl.sum(values, axis=0)
    return result


@triton.jit
def measured(total, pointer, at, valid, MAXIMUM: tl.constexpr):
    """`total` with the squares, or the magnitudes, of a block."""
    values = loaded(pointer, at, valid)
    if MAXIMUM:
        total = larger(total, tl.abs(values))
    else:
        total += values * values
    return total


@triton.jit
def norm_parts_kernel(
    rows,
    chunks,
    parts,
    KIND: tl.constexpr,
    MAXIMUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of squares, or the largest magnitude, of each chunk of the tensors in the first column."""
    program = tl.program_id(0)
    row = rows + tl.load(chunks + 2 * program) * _WIDTH
    first = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    size = tl.load(row + _SIZE)
    values = pointer_to(row, _PARAM, KIND, ALIGNED)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, tl.minimum(first + CHUNK, size), BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= size:
            total = measured(total, values, at, None, MAXIMUM)
        else:
            total = measured(total, values, at, at < size, MAXIMUM)
    tl.store(parts + program, whole(total, MAXIMUM))


@triton.jit
def norm_sums_kernel(parts, starts, out, num_chunks, num_rows, MAXIMUM: tl.constexpr, BLOCK: tl.constexpr):
    """What the chunks of each tensor sum up to: [K, chunks] to [K, rows], square roots of the sums."""
    row = tl.program_id(0)
    kind = tl.program_id(1)
    last = tl.load(starts + row + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.load(starts + row), last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(parts + kind * num_chunks + at, mask=at < last, other=0.0)
        if MAXIMUM:
            total = larger(total, values)
        else:
            total += values
    result = whole(total, MAXIMUM)
    if not MAXIMUM:
        result = tl.sqrt_rn(result)
    tl.store(out + kind * num_rows + row, result)


@triton.jit
def scaled(pointer, at, valid, factor):
    """Multiplies one block in place."""
    stored(pointer, at, loaded(pointer, at, valid) * factor, valid)


@triton.jit
def scale_tensors_kernel(
    rows, chunks, factor, KIND: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Multiplies the tensors in the first column."""
    program = tl.program_id(0)
    row = rows + tl.load(chunks + 2 * program) * _WIDTH
    first = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    size = tl.load(row + _SIZE)
    values = pointer_to(row, _PARAM, KIND, ALIGNED)
    number = tl.load(factor)
    for start in range(first, tl.minimum(first + CHUNK, size), BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= size:
            scaled(values, at, None, number)
        else:
            scaled(values, at, at < size, number)


@triton.jit
def adamw_block(
    param, grad, first, second, master, maximum, at, valid, lr, beta1, beta2, inverse1, root2, eps, decay,
    AMSGRAD: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """Updates one block."""
    values = loaded(master, at, valid) if MASTER else loaded(param, at, valid)
    gradient = loaded(grad, at, valid)
    values -= lr * decay * values
    moment = beta1 * loaded(first, at, valid) + (gradient - beta1 * gradient)
    square = gradient * gradient
    variance = beta2 * loaded(second, at, valid) + (square - beta2 * square)
    stored(first, at, moment, valid)
    stored(second, at, variance, valid)
    if AMSGRAD:
        variance = larger(loaded(maximum, at, valid), variance)
        stored(maximum, at, variance, valid)
    values -= lr * inverse1 * moment / (tl.sqrt(variance) / root2 + eps)
    stored_param(param, master, at, values, valid, MASTER)


@triton.jit
def adamw_kernel(
    rows,
    chunks,
    lr,
    lr_pointer,
    beta1,
    beta2,
    inverse1,
    root2,
    eps,
    decay,
    AMSGRAD: tl.constexpr,
    MASTER: tl.constexpr,
    PARAM_KIND: tl.constexpr,
    GRAD_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW; inverse1 = 1 / c1, root2 = sqrt(c2)."""
    program = tl.program_id(0)
    row = rows + tl.load(chunks + 2 * program) * _WIDTH
    begin = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    size = tl.load(row + _SIZE)
    param = pointer_to(row, _PARAM, PARAM_KIND, ALIGNED)
    grad = pointer_to(row, _GRAD, GRAD_KIND, ALIGNED)
    first = pointer_to(row, _FIRST, tl.float32, ALIGNED)
    second = pointer_to(row, _SECOND, tl.float32, ALIGNED)
    master = pointer_to(row, _MASTER, tl.float32, ALIGNED)
    maximum = pointer_to(row, _MAXIMUM, tl.float32, ALIGNED)
    if lr_pointer is not None:
        lr = tl.load(lr_pointer)
    for start in range(begin, tl.minimum(begin + CHUNK, size), BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= size:
            adamw_block(
                param, grad, first, second, master, maximum, at, None, lr, beta1, beta2, inverse1, root2, eps, decay,
                AMSGRAD, MASTER,
            )  # fmt: skip
        else:
            adamw_block(
                param, grad, first, second, master, maximum, at, at < size, lr, beta1, beta2, inverse1, root2, eps, decay,
                AMSGRAD, MASTER,
            )  # fmt: skip


@triton.jit
def lamb_update(values, moment, variance, inverse1, inverse2, eps, added_decay):
    """u; added_decay is 0 for coupled decay."""
    return moment * inverse1 / (tl.sqrt(variance * inverse2) + eps) + added_decay * values


@triton.jit
def lamb_moments_block(
    squares, update_squares, param, grad, first, second, master, at, valid, factor, lr, beta1, beta2, beta3, rest2,
    inverse1, inverse2, eps, decay, added_decay, RATIO: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """Moments of one block, with the sums of p^2 and u^2, or the whole update where there is no ratio."""
    values = loaded(master, at, valid) if MASTER else loaded(param, at, valid)
    gradient = loaded(grad, at, valid) / factor + decay * values
    moment = beta1 * loaded(first, at, valid) + beta3 * gradient
    variance = beta2 * loaded(second, at, valid) + rest2 * gradient * gradient
    stored(first, at, moment, valid)
    stored(second, at, variance, valid)
    update = lamb_update(values, moment, variance, inverse1, inverse2, eps, added_decay)
    if RATIO:
        squares += values * values
        if valid is None:
            update_squares += update * update
        else:
            update_squares += tl.where(valid, update * update, 0.0)  # 0 / 0 outside, where eps is 0
    else:
        stored_param(param, master, at, values - lr * update, valid, MASTER)
    return squares, update_squares


@triton.jit
def lamb_moments_kernel(
    rows,
    chunks,
    parts,
    clip,
    lr,
    lr_pointer,
    num_chunks,
    beta1,
    beta2,
    beta3,
    rest2,
    inverse1,
    inverse2,
    eps,
    decay,
    added_decay,
    RATIO: tl.constexpr,
    MASTER: tl.constexpr,
    PARAM_KIND: tl.constexpr,
    GRAD_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moments, and sums for the ratio or, without one, the whole update; rest2 = 1 - b2, inverse_i = 1 / c_i."""
    program = tl.program_id(0)
    row = rows + tl.load(chunks + 2 * program) * _WIDTH
    begin = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    size = tl.load(row + _SIZE)
    param = pointer_to(row, _PARAM, PARAM_KIND, ALIGNED)
    grad = pointer_to(row, _GRAD, GRAD_KIND, ALIGNED)
    first = pointer_to(row, _FIRST, tl.float32, ALIGNED)
    second = pointer_to(row, _SECOND, tl.float32, ALIGNED)
    master = pointer_to(row, _MASTER, tl.float32, ALIGNED)
    factor = 1.0
    if clip is not None:
        factor = tl.load(clip)
    if lr_pointer is not None:
        lr = tl.load(lr_pointer)
    squares = tl.zeros((BLOCK,), tl.float32)
    update_squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(begin, tl.minimum(begin + CHUNK, size), BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= size:
            squares, update_squares = lamb_moments_block(
                squares, update_squares, param, grad, first, second, master, at, None, factor, lr, beta1, beta2, beta3,
                rest2, inverse1, inverse2, eps, decay, added_decay, RATIO, MASTER,
            )  # fmt: skip
        else:
            squares, update_squares = lamb_moments_block(
                squares, update_squares, param, grad, first, second, master, at, at < size, factor, lr, beta1, beta2,
                beta3, rest2, inverse1, inverse2, eps, decay, added_decay, RATIO, MASTER,
            )  # fmt: skip
    if RATIO:
        tl.store(parts + program, tl.sum(squares, axis=0))
        tl.store(parts + num_chunks + program, tl.sum(update_squares, axis=0))


@triton.jit
def lamb_params_block(
    param, first, second, master, at, valid, ratio, inverse1, inverse2, eps, added_decay, MASTER: tl.constexpr
):
    """Updates the parameters of one block from its moments."""
    values = loaded(master, at, valid) if MASTER else loaded(param, at, valid)
    update = lamb_update(
        values, loaded(first, at, valid), loaded(second, at, valid), inverse1, inverse2, eps, added_decay
    )
    stored_param(param, master, at, values - ratio * update, valid, MASTER)


@triton.jit
def lamb_params_kernel(
    rows,
    chunks,
    ratios,
    inverse1,
    inverse2,
    eps,
    added_decay,
    MASTER: tl.constexpr,
    PARAM_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """p -= ratio u, with u from the moments again."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    row = rows + tensor * _WIDTH
    begin = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    size = tl.load(row + _SIZE)
    param = pointer_to(row, _PARAM, PARAM_KIND, ALIGNED)
    first = pointer_to(row, _FIRST, tl.float32, ALIGNED)
    second = pointer_to(row, _SECOND, tl.float32, ALIGNED)
    master = pointer_to(row, _MASTER, tl.float32, ALIGNED)
    ratio = tl.load(ratios + tensor)
    for start in range(begin, tl.minimum(begin + CHUNK, size), BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= size:
            lamb_params_block(
                param, first, second, master, at, None, ratio, inverse1, inverse2, eps, added_decay, MASTER
            )
        else:
            lamb_params_block(
                param, first, second, master, at, at < size, ratio, inverse1, inverse2, eps, added_decay, MASTER
            )


@triton.jit
def novograd_block(
    param, grad, first, master, at, valid, gradient_high, gradient_low, update_high, update_low, outer, inner, rest1,
    MASTER: tl.constexpr,
):  # fmt: skip
    """Updates one block."""
    values = loaded(master, at, valid) if MASTER else loaded(param, at, valid)
    gradient = loaded(grad, at, valid)
    moment = loaded(first, at, valid)
    moment += gradient * gradient_low + gradient * gradient_high + inner * values - rest1 * moment
    stored(first, at, moment, valid)
    update = moment * update_low + moment * update_high + outer * values
    stored_param(param, master, at, values - update, valid, MASTER)


@triton.jit
def novograd_kernel(
    rows,
    chunks,
    factors,
    inner,
    rest1,
    MASTER: tl.constexpr,
    PARAM_KIND: tl.constexpr,
    GRAD_KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """NovoGrad, with five factors for each tensor: two addends of G, two of U, and O."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    row = rows + tensor * _WIDTH
    begin = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    size = tl.load(row + _SIZE)
    param = pointer_to(row, _PARAM, PARAM_KIND, ALIGNED)
    grad = pointer_to(row, _GRAD, GRAD_KIND, ALIGNED)
    first = pointer_to(row, _FIRST, tl.float32, ALIGNED)
    master = pointer_to(row, _MASTER, tl.float32, ALIGNED)
    gradient_high = tl.load(factors + 5 * tensor)
    gradient_low = tl.load(factors + 5 * tensor + 1)
    update_high = tl.load(factors + 5 * tensor + 2)
    update_low = tl.load(factors + 5 * tensor + 3)
    outer = tl.load(factors + 5 * tensor + 4)
    for start in range(begin, tl.minimum(begin + CHUNK, size), BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= size:
            novograd_block(
                param, grad, first, master, at, None, gradient_high, gradient_low, update_high, update_low, outer,
                inner, rest1, MASTER,
            )  # fmt: skip
        else:
            novograd_block(
                param, grad, first, master, at, at < size, gradient_high, gradient_low, update_high, update_low, outer,
                inner, rest1, MASTER,
            )  # fmt: skip


def launch_norms(tensors: Sequence[Tensor], order: float, tables: TableCache) -> Tensor:
    """`smpc.kernels.optimizers.tensor_norms` by kernel, for order 2 or infinity."""
    first = tensors[0]
    # Tensors without a compact layout are copied; the others have a norm in whatever order their elements are.
    dense = [tensor if _is_dense(tensor) else tensor.contiguous() for tensor in tensors]
    table = tables.table([dense])
    parts = torch.empty(1, table.num_chunks, dtype=torch.float32, device=first.device)
    with launching_on(first.device):
        if table.num_chunks:
            norm_parts_kernel[(table.num_chunks,)](
                table.rows,
                table.chunks,
                parts,
                KIND=_KINDS[first.dtype],
                MAXIMUM=order == math.inf,
                **_tiling(table),
            )
    return _summed(parts, table, order == math.inf)[0]


def launch_scale_(tensors: Sequence[Tensor], factor: Tensor, tables: TableCache) -> None:
    """`smpc.kernels.optimizers.scale_tensors_` by kernel."""
    loose = [tensor for tensor in tensors if not _is_dense(tensor)]
    dense = [tensor for tensor in tensors if _is_dense(tensor)]
    for tensor in loose:
        tensor.mul_(factor)
    table = tables.table([dense]) if dense else None
    if table is not None and table.num_chunks:
        with launching_on(factor.device):
            scale_tensors_kernel[(table.num_chunks,)](
                table.rows, table.chunks, factor.to(torch.float32), KIND=_KINDS[dense[0].dtype], **_tiling(table)
            )


def launch_adamw_(bucket: Bucket, rule: AdamWRule, lr: float | Tensor, tables: TableCache) -> None:
    """`smpc.kernels.optimizers.adamw_` by kernel."""
    table = tables.table(bucket.columns())
    if table.num_chunks:
        with launching_on(bucket.params[0].device):
            adamw_kernel[(table.num_chunks,)](
                table.rows,
                table.chunks,
                *_rate(lr),
                rule.beta1,
                rule.beta2,
                1.0 / rule.correction1,
                math.sqrt(rule.correction2),
                float(rule.eps),
                float(rule.weight_decay),
                AMSGRAD=rule.amsgrad,
                **_kinds(bucket),
                **_tiling(table),
            )


def launch_lamb_(
    bucket: Bucket, rule: LambRule, lr: float | Tensor, clip: Tensor | None, reduce: Reduce, tables: TableCache
) -> None:
    """`smpc.kernels.optimizers.lamb_` by kernel."""
    device = bucket.params[0].device
    table = tables.table(bucket.columns())
    parts = torch.empty(2, table.num_chunks, dtype=torch.float32, device=device) if rule.ratio else None
    decay = float(rule.weight_decay)
    corrections = (1.0 / rule.correction1, 1.0 / rule.correction2, float(rule.eps))
    added_decay = decay if rule.decoupled else 0.0
    kinds = _kinds(bucket)
    if table.num_chunks:
        with launching_on(device):
            lamb_moments_kernel[(table.num_chunks,)](
                table.rows,
                table.chunks,
                parts,
                None if clip is None else clip.to(torch.float32),
                *_rate(lr),
                table.num_chunks,
                rule.beta1,
                rule.beta2,
                rule.beta3,
                1.0 - rule.beta2,
                *corrections,
                0.0 if rule.decoupled else decay,
                added_decay,
                RATIO=rule.ratio,
                **kinds,
                **_tiling(table),
            )
    if parts is None:
        return
    ratios = trust_ratios(
        reduce(_summed(parts, table, False)), lr
    )  # every rank of a group comes here, with chunks or not
    if table.num_chunks:
        with launching_on(device):
            del kinds["GRAD_KIND"]
            lamb_params_kernel[(table.num_chunks,)](
                table.rows, table.chunks, ratios, *corrections, added_decay, **kinds, **_tiling(table)
            )


def launch_novograd_(bucket: Bucket, rule: NovoGradRule, tables: TableCache) -> None:
    """`smpc.kernels.optimizers.novograd_` by kernel."""
    table = tables.table(bucket.columns())
    outer = torch.zeros_like(rule.update) if rule.outer is None else rule.outer
    columns = (*split_factors(rule.gradient), *split_factors(rule.update), outer.to(torch.float32))
    if table.num_chunks:
        with launching_on(bucket.params[0].device):
            novograd_kernel[(table.num_chunks,)](
                table.rows,
                table.chunks,
                torch.stack(columns, 1),
                rule.inner,
                rule.rest1,
                **_kinds(bucket),
                **_tiling(table),
            )


def _summed(parts: Tensor, table: TensorTable, maximum: bool) -> Tensor:
    """Norms [K, rows] from parts [K, chunks]."""
    out = torch.empty(len(parts), table.num_rows, dtype=torch.float32, device=parts.device)
    with launching_on(parts.device):
        norm_sums_kernel[(table.num_rows, len(parts))](
            parts,
            table.starts,
            out,
            table.num_chunks,
            table.num_rows,
            MAXIMUM=maximum,
            BLOCK=SUM_BLOCK,
            num_warps=SUM_WARPS,
            **LAUNCH_OPTIONS,
        )
    return out


def _is_dense(tensor: Tensor) -> bool:
    # torch keeps the strides of exactly those tensors that have neither gaps nor overlaps.
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _rate(lr: float | Tensor) -> tuple[float, Tensor | None]:
    return (0.0, lr.to(torch.float32)) if isinstance(lr, Tensor) else (float(lr), None)


def _kinds(bucket: Bucket) -> dict[str, Any]:
    return {
        "MASTER": bool(bucket.masters),
        "PARAM_KIND": _KINDS[bucket.params[0].dtype],
        "GRAD_KIND": _KINDS[bucket.grads[0].dtype],
    }


def _tiling(table: TensorTable) -> dict[str, Any]:
    return {"ALIGNED": table.aligned, "CHUNK": CHUNK, "BLOCK": BLOCK, "num_warps": WARPS, **LAUNCH_OPTIONS}
