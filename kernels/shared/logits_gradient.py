"""The backward pass of the cross-entropies as ops: `smpc::logits_gradient`, and `smpc::logits_gradient_`, which overwrites the logits.

The formula is in `smpc.kernels.shared.token_loss`. Both take the logits of a shard of the vocabulary, which may be all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smpc.kernels.shared.elements import as_rows
from smpc.kernels.shared.token_loss import LossRule, gradient


def logits_gradient(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, rule: LossRule, *, inplace: bool
) -> Tensor:
    """The gradient of `logits` [..., columns], given their losses' gradient `grad`; in the logits' own storage if `inplace`."""
    numbers = (rule.first, rule.classes, rule.ignore_index, rule.label_smoothing, rule.z_loss)
    if not inplace:
        out: Tensor = _logits_gradient(grad, logits, target, lse, *numbers)
        return out
    overwritten = logits.detach()
    _logits_gradient_(grad, overwritten, target, lse, *numbers)
    return overwritten


@torch.library.custom_op("smpc::logits_gradient", mutates_args=())
def _logits_gradient(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    first: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    rule = LossRule(classes, first, ignore_index, label_smoothing, z_loss)
    gradient(grad.reshape(-1), as_rows(logits), target.reshape(-1), lse.view(-1), rule, as_rows(out))
    return out


@torch.library.custom_op("smpc::logits_gradient_", mutates_args=("logits",))
def _logits_gradient_(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    first: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    rule = LossRule(classes, first, ignore_index, label_smoothing, z_loss)
    rows = as_rows(logits)
    gradient(grad.reshape(-1), rows, target.reshape(-1), lse.view(-1), rule, rows)
    if rows.data_ptr() != logits.data_ptr():  # the rows of these logits had to be copied
        logits.copy_(rows.view(logits.shape))


@_logits_gradient.register_fake
def _(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    first: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    return logits.new_empty(logits.shape)
