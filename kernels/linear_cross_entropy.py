"""A linear layer and cross-entropy in one op that never holds the logits: `smpc::linear_cross_entropy`.

    loss = linear_cross_entropy(hidden, lm_head.weight, labels)           = cross_entropy(hidden @ weight.T, labels)

The rows are taken in chunks. The logits of a chunk [chunk_rows, classes] become losses, are overwritten with their gradient, and
are multiplied away into the gradients of the inputs, all in the forward pass; the backward pass only scales:

    for each chunk      x  = h_c W^T + b            logits of the chunk
                        loss_c;  x <- dx            in place (smpc.kernels.shared.token_loss)
                        dh_c = dx W;    dW += dx^T h_c;    db += sum of dx
    backward            dh, dW, db times (gradient of the loss) / (number of labels)

so the three GEMMs are the ordinary layer's work, and the memory is one chunk's logits, and dW one pass early. The factor is applied
at the end, in fp32: gradients of single tokens divided by the number of labels would vanish in fp16. dW is summed over chunks in the
weight's dtype, as other fused losses do, or in fp32 with `accumulate_fp32` and always for fp16.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from smpc.errors import UsageError
from smpc.kernels.shared.tensor_checks import (
    accumulation_dtype,
    as_rows,
    kernels_compute,
    require_floating,
    require_same_device,
)
from smpc.kernels.shared.token_loss import LossRule, check_rule, losses, losses_then_gradient_, num_labels

# Fewer rows than this make the GEMMs inefficient, and rewrite dW more often than the logits of a chunk are worth.
_LEAST_CHUNK = 1024


class _Gradients(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    accumulate_fp32: bool = False,
) -> Tensor:
    """The cross-entropy of `hidden` [..., features] @ `weight` [classes, features].T (+ `bias`) and labels `target` [...].

    `reduction` is "mean" (over labels that are not `ignore_index`; 0 if there are none) or "sum": the gradients are
    computed before the loss of any one token could be weighed. `chunk_rows` is the number of rows whose logits exist at
    a time; by default as many as take about the memory of `hidden`, or 1024 rows. Returns an fp32 scalar (fp64 for
    fp64). Raises UsageError (a ValueError) for arguments that do not fit.
    """
    rule = LossRule(weight.shape[0] if weight.dim() else 0, 0, ignore_index, label_smoothing, z_loss)
    _check(hidden, weight, target, bias, rule, reduction, chunk_rows)
    rows = target.numel()
    if chunk_rows is None:
        chunk_rows = max(_LEAST_CHUNK, -(-rows * hidden.shape[-1] // rule.classes))
    tensors = (hidden, weight, bias)
    wanted = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    numbers = (ignore_index, label_smoothing, z_loss, reduction == "mean", chunk_rows, accumulate_fp32)
    loss: Tensor = _linear_cross_entropy(hidden, weight, target, bias, *numbers, *wanted)[0]
    return loss


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    rule: LossRule,
    reduction: str,
    chunk_rows: int | None,
) -> None:
    op = "linear_cross_entropy"
    require_floating(op, hidden=hidden, weight=weight, bias=bias)
    require_same_device(op, hidden=hidden, target=target)
    faults = check_rule(target, rule, reduction, ("mean", "sum"))
    if weight.dim() != 2 or hidden.dim() < 1 or weight.shape[-1:] != hidden.shape[-1:] or 0 in weight.shape:
        faults.append(
            f"expected hidden [..., features] and weight [classes, features], found {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if target.shape != hidden.shape[:-1]:
        faults.append(f"expected target of shape {tuple(hidden.shape[:-1])}, found {tuple(target.shape)}")
    if bias is not None and tuple(bias.shape) != (rule.classes,):
        faults.append(f"expected bias of shape ({rule.classes},), found {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            faults.append(f"expected {name} of hidden's dtype {hidden.dtype}, found {tensor.dtype}")
    if chunk_rows is not None and chunk_rows < 1:
        faults.append(f"expected chunk_rows of at least 1, found {chunk_rows}")
    if faults:
        raise UsageError(f"{op}: " + "; ".join(faults))


@torch.library.custom_op("smpc::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    mean: bool,
    chunk_rows: int,
    accumulate_fp32: bool,
    hidden_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rule = LossRule(weight.shape[0], 0, ignore_index, label_smoothing, z_loss)
    rows, labels = as_rows(hidden), target.reshape(-1)
    sums = _sum_dtype(weight.dtype, accumulate_fp32)
    gradients = _Gradients(
        torch.empty_like(rows, memory_format=torch.contiguous_format) if hidden_wanted else None,
        torch.zeros(weight.shape, dtype=sums, device=weight.device) if weight_wanted else None,
        torch.zeros(rule.classes, dtype=accumulation_dtype(weight.dtype), device=weight.device)
        if bias_wanted
        else None,
    )
    total = torch.zeros((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    for start in range(0, labels.numel(), chunk_rows):
        piece = slice(start, start + chunk_rows)
        total += _chunk(rows[piece], weight, labels[piece], bias, rule, gradients, piece)
    factor = total.new_ones(()) / num_labels(labels, ignore_index) if mean else total.new_ones(())
    none = hidden.new_empty(0)
    return (
        total * factor,
        factor,
        none if gradients.hidden is None else gradients.hidden.view(hidden.shape),
        none.clone() if gradients.weight is None else gradients.weight,
        none.clone() if gradients.bias is None else gradients.bias,
    )


def _chunk(
    rows: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    rule: LossRule,
    gradients: _Gradients,
    piece: slice,
) -> Tensor:
    """The sum of a chunk's losses; adds its share to `gradients`."""
    logits = _product(rows, weight.t(), rows.dtype)
    if bias is not None:
        logits += bias
    if all(gradient is None for gradient in gradients):
        return losses(logits, labels, rule).loss.sum()
    loss = losses_then_gradient_(logits, labels, rule)
    if gradients.hidden is not None:
        gradients.hidden[piece] = _product(logits, weight, rows.dtype)
    if gradients.weight is not None:
        if gradients.weight.dtype == logits.dtype == rows.dtype:
            gradients.weight.addmm_(logits.t(), rows)
        else:
            gradients.weight.add_(_product(logits.t(), rows, gradients.weight.dtype))
    if gradients.bias is not None:
        gradients.bias.add_(logits.sum(0, dtype=gradients.bias.dtype))
    return loss.sum()


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`left @ right`, summed in fp32, in `dtype` on CUDA; wide on the CPU, whose half-precision products round on the way."""
    if left.device.type != "cuda":
        wide = accumulation_dtype(left.dtype)
        return left.to(wide) @ right.to(wide)
    return left @ right if dtype == left.dtype else torch.mm(left, right, out_dtype=dtype)


def _sum_dtype(dtype: torch.dtype, accumulate_fp32: bool) -> torch.dtype:
    return accumulation_dtype(dtype) if accumulate_fp32 or dtype == torch.float16 else dtype


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    mean: bool,
    chunk_rows: int,
    accumulate_fp32: bool,
    hidden_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=accumulation_dtype(hidden.dtype))
    return (
        loss,
        torch.empty_like(loss),
        hidden.new_empty(hidden.shape if hidden_wanted else 0),
        weight.new_empty(weight.shape, dtype=_sum_dtype(weight.dtype, accumulate_fp32))
        if weight_wanted
        else hidden.new_empty(0),
        weight.new_empty(weight.shape[0], dtype=accumulation_dtype(weight.dtype))
        if bias_wanted
        else hidden.new_empty(0),
    )


@torch.library.custom_op("smpc::scaled", mutates_args=())
def _scaled(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` times the number `factor`, multiplied in fp32 and rounded once."""
    if kernels_compute(values):
        from smpc.kernels.programs.scale_triton import launch_scale

        return launch_scale(values, factor, dtype)
    return torch.mul(values.to(factor.dtype), factor).to(dtype)


@_scaled.register_fake
def _(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return values.new_empty(values.shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.wanted = inputs[-3:]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    factor, *gradients = ctx.saved_tensors
    factor = factor * grad
    hidden, weight, bias = (
        _scaled(gradient, factor, ctx.dtype) if wanted else None
        for gradient, wanted in zip(gradients, ctx.wanted, strict=True)
    )
    return hidden, weight, None, bias, *(None,) * 9


_linear_cross_entropy.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.smpc.linear_cross_entropy)
def _flops(hidden: torch.Size, weight: torch.Size, *rest: Any, **_: Any) -> int:
    """FLOPs of the GEMMs: the logits, and the requested gradients of the two factors."""
    hidden_wanted, weight_wanted, _bias_wanted = rest[-3:]
    return 2 * math.prod(hidden) * int(weight[0]) * (1 + int(hidden_wanted) + int(weight_wanted))
