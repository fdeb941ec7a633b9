"""LayerNorm, and LayerNorm of a sum, as ops: `smpc::layer_norm`, `smpc::add_layer_norm`.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias          the formula and its gradients: `smpc.kernels.shared.norms`

    y = layer_norm(x, (1024,), weight, bias)
    y, s = add_layer_norm(x, residual, weight, bias)                s = x + residual, to be the next residual

Forward: one read and one write of a row. Backward: reads x and dy once; dweight and dbias are summed in fp32, in a fixed order.
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
from smpc.kernels.shared.tensor_checks import accumulation_dtype


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
) -> Tensor:
    """LayerNorm over the last dimensions `normalized_shape`, as `torch.nn.functional.layer_norm`.

    Statistics and sums are fp32 whatever the dtype; the result has x's. `memory_efficient` keeps the output for the
    backward pass instead of the input. Raises UsageError (a ValueError) for shapes, dtypes or devices that do not fit.
    """
    flat = flatten_normalized("layer_norm", x, normalized_shape)
    flat_weight = None if weight is None else flatten_normalized("layer_norm", weight, normalized_shape)
    flat_bias = None if bias is None else flatten_normalized("layer_norm", bias, normalized_shape)
    check_norm("layer_norm", flat, None, flat_weight, flat_bias, NormRule(True, eps))
    out, _, _ = _layer_norm(flat, flat_weight, flat_bias, eps, memory_efficient)
    shaped: Tensor = out.view(x.shape)
    return shaped


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`s = x + residual` and LayerNorm of s over its last dimension: returns (normalized, s).

    `residual` has x's shape, dtype and device; s is rounded to that dtype. Errors as for `layer_norm`.
    """
    check_norm("add_layer_norm", x, residual, weight, bias, NormRule(True, eps))
    out, summed, _, _ = _add_layer_norm(x, residual, weight, bias, eps)
    return out, summed


@torch.library.custom_op("smpc::layer_norm", mutates_args=())
def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, memory_efficient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out, _, mean, rstd = forward(x, None, weight, bias, NormRule(True, eps))
    assert mean is not None, "LayerNorm has a mean"
    return out, mean, rstd


@torch.library.custom_op("smpc::add_layer_norm", mutates_args=())
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, summed, mean, rstd = forward(x, residual, weight, bias, NormRule(True, eps))
    assert mean is not None, "LayerNorm has a mean"
    assert summed is not None, "the norm of a sum has a sum"
    return out, summed, mean, rstd


@torch.library.custom_op("smpc::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    grad: Tensor,
    grad_summed: Tensor | None,
    source: Tensor,
    from_output: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    saved = NormSaved(source, from_output, weight, bias, mean, rstd)
    return backward(grad, grad_summed, saved, NormRule(True, eps))


@_layer_norm.register_fake
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, memory_efficient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.shape[:-1], dtype=accumulation_dtype(x.dtype))
    return x.new_empty(x.shape), statistics, torch.empty_like(statistics)


@_add_layer_norm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.shape[:-1], dtype=accumulation_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(x.shape), statistics, torch.empty_like(statistics)


@_layer_norm_backward.register_fake
def _(
    grad: Tensor,
    grad_summed: Tensor | None,
    source: Tensor,
    from_output: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(grad, weight, bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, ctx.eps, ctx.from_output = inputs
    out, mean, rstd = output
    ctx.save_for_backward(out if ctx.from_output else x, weight, bias, None if ctx.from_output else mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


def _differentiate(ctx: Any, grad: Tensor, _mean: Tensor, _rstd: Tensor) -> tuple[Tensor | None, ...]:
    source, weight, bias, mean, rstd = ctx.saved_tensors
    x, dweight, dbias = _layer_norm_backward(grad, None, source, ctx.from_output, weight, bias, mean, rstd, ctx.eps)
    return x, None if weight is None else dweight, None if bias is None else dbias, None, None


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, ctx.eps = inputs
    _, summed, mean, rstd = output
    ctx.save_for_backward(summed, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


def _differentiate_sum(
    ctx: Any, grad: Tensor, grad_summed: Tensor, _mean: Tensor, _rstd: Tensor
) -> tuple[Tensor | None, ...]:
    summed, weight, bias, mean, rstd = ctx.saved_tensors
    x, dweight, dbias = _layer_norm_backward(grad, grad_summed, summed, False, weight, bias, mean, rstd, ctx.eps)
    return x, x, None if weight is None else dweight, None if bias is None else dbias, None


_layer_norm.register_autograd(_differentiate, setup_context=_save)
_add_layer_norm.register_autograd(_differentiate_sum, setup_context=_save_sum)
