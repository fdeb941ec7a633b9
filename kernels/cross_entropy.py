"""Cross-entropy of logits and labels as an op: `smpc::cross_entropy`.

    loss = cross_entropy(logits, labels)                    logits [..., classes], labels [...]; the mean, in fp32
    loss.backward()                                         one write of the gradient, in the logits' dtype

The formula, ignored labels and -inf: `smpc.kernels.shared.token_loss`. No fp32 copy of the logits is made, neither forward nor
backward. With `inplace_backward` the backward pass writes the gradient over the logits, so that the second largest
tensor of a language model is never made; the logits must not be needed afterwards, by anybody: autograd raises if another
operation saved them, but nothing warns a script that prints them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smpc.kernels.shared.tensor_checks import accumulation_dtype, as_rows
from smpc.kernels.shared.token_loss import LossRule, check_loss, logits_gradient, losses, reduce


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:
    """The cross-entropy of `logits` [..., classes] and labels `target` [...], computed and returned in fp32.

    `reduction` is "mean" (over labels that are not `ignore_index`; 0 if there are none), "sum" or "none" (the shape of
    `target`). `z_loss` adds that much of logsumexp^2. Raises UsageError (a ValueError) for arguments that do not fit.
    """
    rule = LossRule(logits.shape[-1] if logits.dim() else 0, 0, ignore_index, label_smoothing, z_loss)
    check_loss("cross_entropy", logits, target, rule, reduction)
    loss, _ = _cross_entropy(logits, target, ignore_index, label_smoothing, z_loss, inplace_backward)
    return reduce(loss, target, ignore_index, reduction)


@torch.library.custom_op("smpc::cross_entropy", mutates_args=())
def _cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, inplace_backward: bool
) -> tuple[Tensor, Tensor]:
    rule = LossRule(logits.shape[-1], 0, ignore_index, label_smoothing, z_loss)
    loss, lse = losses(as_rows(logits), target.reshape(-1), rule)
    return loss.view(target.shape), lse.view(target.shape)


@_cross_entropy.register_fake
def _(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, inplace_backward: bool
) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty(target.shape, dtype=accumulation_dtype(logits.dtype))
    return loss, torch.empty_like(loss)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ignore_index, label_smoothing, z_loss, ctx.inplace = inputs
    ctx.rule = LossRule(logits.shape[-1], 0, ignore_index, label_smoothing, z_loss)
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _lse: Tensor) -> tuple[Tensor | None, ...]:
    logits, target, lse = ctx.saved_tensors
    return logits_gradient(grad, logits, target, lse, ctx.rule, inplace=ctx.inplace), None, None, None, None, None


_cross_entropy.register_autograd(_differentiate, setup_context=_save)
