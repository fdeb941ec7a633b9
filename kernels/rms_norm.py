"""RMSNorm, and RMSNorm of a sum, as ops: `smpc::rms_norm`, `smpc::add_rms_norm`.

    y = x / sqrt(mean(x^2) + eps) * (weight + offset)               the formula and its gradients: `smpc.kernels.shared.norms`

    y = rms_norm(x, (1024,), weight, eps=1e-6)
    y, s = add_rms_norm(x, residual, weight, eps=1e-6)              s = x + residual, to be the next residual
    y = rms_norm(x, (1024,), weight, eps=1e-6, offset=1.0)          Gemma: weights are stored as differences from one

Forward: one read and one write of a row. Backward: reads x and dy once; dweight is summed in fp32, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smpc.kernels.shared.norms import (
    NormRule,
    NormSaved,
    backward,
    check_norm,
    fake_gradients,
    flatten_normalized,
    forward,
)
from smpc.kernels.shared.tensor_checks import accumulation_dtype, require_floating


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    memory_efficient: bool = False,
) -> Tensor:
    """RMSNorm over the last dimensions `normalized_shape`, as `torch.nn.functional.rms_norm`.

    Statistics and sums are fp32 whatever the dtype; the result has x's. `eps` None is the spacing of x's dtype at one.
    `memory_efficient` keeps the output for the backward pass instead of the input. Raises UsageError (a ValueError) for
    shapes, dtypes or devices that do not fit.
    """
    flat = flatten_normalized("rms_norm", x, normalized_shape)
    flat_weight = None if weight is None else flatten_normalized("rms_norm", weight, normalized_shape)
    require_floating("rms_norm", x=x)
    spacing = torch.finfo(x.dtype).eps if eps is None else eps
    check_norm("rms_norm", flat, None, flat_weight, None, NormRule(False, spacing, offset))
    out, _ = _rms_norm(flat, flat_weight, spacing, offset, memory_efficient)
    shaped: Tensor = out.view(x.shape)
    return shaped


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`s = x + residual` and RMSNorm of s over its last dimension: returns (normalized, s).

    `residual` has x's shape, dtype and device; s is rounded to that dtype. `eps` and errors as for `rms_norm`.
    """
    require_floating("add_rms_norm", x=x)
    spacing = torch.finfo(x.dtype).eps if eps is None else eps
    check_norm("add_rms_norm", x, residual, weight, None, NormRule(False, spacing, offset))
    out, summed, _ = _add_rms_norm(x, residual, weight, spacing, offset)
    return out, summed


@torch.library.custom_op("smpc::rms_norm", mutates_args=())
def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, memory_efficient: bool
) -> tuple[Tensor, Tensor]:
    out, _, _, rstd = forward(x, None, weight, None, NormRule(False, eps, offset))
    return out, rstd


@torch.library.custom_op("smpc::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    out, summed, _, rstd = forward(x, residual, weight, None, NormRule(False, eps, offset))
    assert summed is not None, "RMSNorm of a sum has a sum"
    return out, summed, rstd


@torch.library.custom_op("smpc::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad: Tensor,
    grad_summed: Tensor | None,
    source: Tensor,
    from_output: bool,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    saved = NormSaved(source, from_output, weight, None, None, rstd)
    return backward(grad, grad_summed, saved, NormRule(False, eps, offset))[:2]


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, offset: float, memory_efficient: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=accumulation_dtype(x.dtype))


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=accumulation_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(x.shape), rstd


@_rms_norm_backward.register_fake
def _(
    grad: Tensor,
    grad_summed: Tensor | None,
    source: Tensor,
    from_output: bool,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    return fake_gradients(grad, weight, None)[:2]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps, ctx.offset, ctx.from_output = inputs
    out, rstd = output
    ctx.save_for_backward(out if ctx.from_output else x, weight, rstd)
    ctx.mark_non_differentiable(rstd)


def _differentiate(ctx: Any, grad: Tensor, _rstd: Tensor) -> tuple[Tensor | None, ...]:
    source, weight, rstd = ctx.saved_tensors
    x, dweight = _rms_norm_backward(grad, None, source, ctx.from_output, weight, rstd, ctx.eps, ctx.offset)
    return x, None if weight is None else dweight, None, None, None


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight, ctx.eps, ctx.offset = inputs
    _, summed, rstd = output
    ctx.save_for_backward(summed, weight, rstd)
    ctx.mark_non_differentiable(rstd)


def _differentiate_sum(ctx: Any, grad: Tensor, grad_summed: Tensor, _rstd: Tensor) -> tuple[Tensor | None, ...]:
    summed, weight, rstd = ctx.saved_tensors
    x, dweight = _rms_norm_backward(grad, grad_summed, summed, False, weight, rstd, ctx.eps, ctx.offset)
    return x, x, None if weight is None else dweight, None, None


_rms_norm.register_autograd(_differentiate, setup_context=_save)
_add_rms_norm.register_autograd(_differentiate_sum, setup_context=_save_sum)
