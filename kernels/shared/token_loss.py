"""The loss of a token, its gradient, and the numbers of a row they need; in torch, and the choice between it and the kernels.

    x      logits of one row (a token), V classes; t: its label; m = max(x)
    s      sum exp(x - m)                          lse = m + log(s)
    loss   (1 - a) (lse - x_t) + a (lse - mean(x)) + z lse^2           a: label_smoothing, z: z_loss
    dx     p (1 + 2 z lse) - a / V - (1 - a) [i = t],  times the loss's gradient;     p = exp(x - lse)

Computed in fp32 (fp64 for fp64 logits). Cases that torch leaves open, or answers with NaN, are defined:
- a row whose label is `ignore_index` has loss 0 and gradient 0, whatever its logits;
- a label whose logit is -inf has loss inf, also if the whole row is -inf; gradients stay finite (p = 0);
- a label that is no class raises on CPU; on CUDA, where looking would stop the device, its loss is inf.

The logits may be a shard of the vocabulary: `first` is the class of column 0, `classes` is V over all shards, and columns from
class V on are padding: no probability, gradient 0. `statistics` yields (m, s, x_t or 0, sum of x) of the shard; shards are merged
by max and sum, see `smpc.kernels.vocab_parallel_cross_entropy`.

The backward pass of the cross-entropies as ops: `smpc::logits_gradient`, and `smpc::logits_gradient_`, which overwrites the logits.

Both take the logits of a shard of the vocabulary, which may be all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.kernels.shared.tensor_checks import (
    accumulation_dtype,
    as_rows,
    kernels_compute,
    require_floating,
    require_same_device,
)

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True, slots=True)
class LossRule:
    """Everything but the tensors; see the module's docstring."""

    classes: int
    first: int = 0
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def live_columns(self, columns: int) -> int:
        """How many of a shard's columns are classes."""
        return max(0, min(columns, self.classes - self.first))


class RowStatistics(NamedTuple):
    """m, s, x_t (0 where the label is not in this shard), and the sum of the logits; one of each per row."""

    largest: Tensor
    exponentials: Tensor
    at_label: Tensor
    total: Tensor


class TokenLosses(NamedTuple):
    """The losses and lse of rows."""

    loss: Tensor
    lse: Tensor


def losses(logits: Tensor, target: Tensor, rule: LossRule) -> TokenLosses:
    """Losses of the rows of a matrix that holds every class."""
    refuse_unknown_labels(target, rule)
    if kernels_compute(logits):
        from smpc.kernels.programs.token_loss_triton import launch_losses

        return launch_losses(logits, target, rule, gradient=False)
    return combine(reference_statistics(logits, target, rule), target, rule)


def losses_then_gradient_(logits: Tensor, target: Tensor, rule: LossRule) -> Tensor:
    """Losses of rows; the logits are overwritten with the gradient of their sum."""
    refuse_unknown_labels(target, rule)
    if kernels_compute(logits):
        from smpc.kernels.programs.token_loss_triton import launch_losses

        return launch_losses(logits, target, rule, gradient=True).loss
    loss, lse = combine(reference_statistics(logits, target, rule), target, rule)
    logits.copy_(reference_gradient(torch.ones_like(loss), logits, target, lse, rule))
    return loss


def statistics(logits: Tensor, target: Tensor, rule: LossRule) -> RowStatistics:
    """The statistics of the rows of a shard."""
    refuse_unknown_labels(target, rule)
    if kernels_compute(logits):
        from smpc.kernels.programs.token_loss_triton import launch_statistics

        return launch_statistics(logits, target, rule)
    return reference_statistics(logits, target, rule)


def gradient(grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, rule: LossRule, out: Tensor) -> None:
    """Writes the gradient of rows, whose losses have gradient `grad`, to `out`, which may be `logits`."""
    if kernels_compute(logits):
        from smpc.kernels.programs.token_loss_triton import launch_gradient

        launch_gradient(grad, logits, target, lse, rule, out)
    else:
        out.copy_(reference_gradient(grad, logits, target, lse, rule))


def reference_statistics(logits: Tensor, target: Tensor, rule: LossRule) -> RowStatistics:
    """The statistics, operation by operation."""
    rows, columns = logits.shape
    live = rule.live_columns(columns)
    values = logits[:, :live].to(accumulation_dtype(logits.dtype))
    largest = values.new_full((rows,), -torch.inf) if live == 0 else values.amax(-1)
    exponentials = torch.exp(values - _finite(largest).unsqueeze(-1)).sum(-1)
    place = target - rule.first
    here = (place >= 0) & (place < live)
    picked = values.new_zeros(rows) if live == 0 else values.gather(-1, _clamped(place, live)).squeeze(-1)
    return RowStatistics(largest, exponentials, torch.where(here, picked, 0.0), values.sum(-1))


def combine(rows: RowStatistics, target: Tensor, rule: LossRule) -> TokenLosses:
    """Losses from the statistics of whole rows."""
    lse = _finite(rows.largest) + rows.exponentials.log()
    loss = torch.where(rows.at_label == -torch.inf, torch.inf, lse - rows.at_label)
    if rule.label_smoothing:
        smooth = torch.where(rows.total == -torch.inf, torch.inf, lse - rows.total / rule.classes)
        loss = (1 - rule.label_smoothing) * loss + rule.label_smoothing * smooth
    if rule.z_loss:
        loss = loss + rule.z_loss * lse.square()
    loss = torch.where((target < 0) | (target >= rule.classes), torch.inf, loss)
    return TokenLosses(torch.where(target == rule.ignore_index, 0.0, loss), lse)


def reference_gradient(grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, rule: LossRule) -> Tensor:
    """The gradient, operation by operation, in the width it is computed in."""
    live = rule.live_columns(logits.shape[-1])
    values = logits[:, :live].to(lse.dtype)
    finite = _finite(lse).unsqueeze(-1)
    result = torch.exp(values - finite) * (1 + 2 * rule.z_loss * finite) - rule.label_smoothing / rule.classes
    if live:
        place = target - rule.first
        here = ((place >= 0) & (place < live)).to(result.dtype)
        result.scatter_add_(-1, _clamped(place, live), ((rule.label_smoothing - 1) * here).unsqueeze(-1))
    result = torch.where((target == rule.ignore_index).unsqueeze(-1), 0.0, result * grad.to(result.dtype).unsqueeze(-1))
    return torch.nn.functional.pad(result, (0, logits.shape[-1] - live))


def _finite(values: Tensor) -> Tensor:
    # A row of -inf has the maximum -inf; 0 in its place makes every exponential 0 instead of NaN.
    return torch.where(values == -torch.inf, 0.0, values)


def _clamped(place: Tensor, live: int) -> Tensor:
    return place.clamp(0, live - 1).unsqueeze(-1)


def refuse_unknown_labels(target: Tensor, rule: LossRule) -> None:
    """Raises for labels on the CPU that are no class; on CUDA looking would wait for the device."""
    if target.device.type != "cpu":
        return
    wrong = target[((target < 0) | (target >= rule.classes)) & (target != rule.ignore_index)]
    if wrong.numel():
        raise UsageError(
            f"cross-entropy: expected labels from 0 to {rule.classes - 1} or ignore_index {rule.ignore_index}, "
            f"found {wrong[0].item()} ({wrong.numel()} of {target.numel()} labels are no class)"
        )


def check_loss(op: str, logits: Tensor, target: Tensor, rule: LossRule, reduction: str) -> None:
    """Refuses arguments that no loss can be computed of, with all that is wrong with them."""
    require_floating(op, logits=logits)
    require_same_device(op, logits=logits, target=target)
    faults = []
    if logits.dim() < 1 or logits.shape[-1] == 0:
        faults.append(f"expected logits with the classes in the last dimension, found shape {tuple(logits.shape)}")
    if target.shape != logits.shape[:-1]:
        faults.append(f"expected target of shape {tuple(logits.shape[:-1])}, found {tuple(target.shape)}")
    faults += check_rule(target, rule, reduction)
    if faults:
        raise UsageError(f"{op}: " + "; ".join(faults))


def check_rule(target: Tensor, rule: LossRule, reduction: str, allowed: tuple[str, ...] = REDUCTIONS) -> list[str]:
    """The violations of everything but the shapes."""
    faults = []
    if target.dtype not in (torch.int64, torch.int32):
        faults.append(f"expected target of dtype torch.int64 or torch.int32 (class labels), found {target.dtype}")
    if not 0 <= rule.label_smoothing < 1:
        faults.append(f"expected label_smoothing from 0 to below 1, found {rule.label_smoothing}")
    if not rule.z_loss >= 0:
        faults.append(f"expected z_loss of at least 0, found {rule.z_loss}")
    if reduction not in allowed:
        faults.append(f"expected reduction to be one of {', '.join(allowed)}, found {reduction!r}")
    return faults


def reduce(loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Applies `reduction`; the mean is over the labels that count, and 0 if there are none."""
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / num_labels(target, ignore_index)


def num_labels(target: Tensor, ignore_index: int) -> Tensor:
    """How many labels count, at least 1."""
    return (target != ignore_index).sum().clamp(min=1)


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
