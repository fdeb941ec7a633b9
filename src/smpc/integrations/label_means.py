"""A model's own loss as the whole batch's, where it is a mean over the labels that count.

Microbatches have different numbers of such labels (padding, masked tokens), so the mean of their means is another number:

    microbatch 0    10 labels, mean 2.0      the batch: (10 * 2.0 + 30 * 1.0) / 40 = 1.25, and not 1.5
    microbatch 1    30 labels, mean 1.0      weighed: 2.0 * 10 / 20, 1.0 * 30 / 20, whose mean is 1.25

That a loss is such a mean is found by computing it of the logits: over the labels as they are, or each for the position before it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import smpc.v1 as smp
from smpc.errors import StepError
from smpc.integrations.batches import IGNORED
from smpc.integrations.whole_batch_check import is_other, is_small

_FIRST = 32  # microbatches with larger logits that are looked at


class LabelMean:
    """Of one kind of step."""

    def __init__(self) -> None:
        self._shift: int | None = None  # 1: the first label counts for no position
        self._num_compared = 0
        self._taken: Tensor | None = None  # the labels of a batch of which a microbatch's loss was taken as it is

    def weighed(self, loss: Tensor, output: Any, labels: Any, batch: Any) -> Tensor | None:
        """The loss of a microbatch with these labels, weighed by their number; None where it is no mean over labels.

        `output`: what the model has returned, the logits among it. `batch`: the labels of the whole batch. Raises StepError where it has
        been such a mean so far, and is none in this microbatch.
        """
        logits = _logits_for(labels, output)
        if logits is None or not isinstance(batch, Tensor):
            return None
        if not (batch == IGNORED).any():
            return loss
        if self._shift is None or is_small(logits) or self._num_compared < _FIRST:
            self._num_compared += 1
            fitting = [shift for shift in (0, 1) if not is_other(_mean(logits, labels, shift), loss.detach())]
            if self._shift is None and len(fitting) == 1:
                self._shift = fitting[0]
            if self._shift is None and loss.isnan() and not _count(labels, 0):
                return logits.sum() * 0
            if self._shift is None or self._taken is batch:  # all microbatches of a batch alike
                self._taken = batch
                return None
            if self._shift not in fitting:
                raise StepError(
                    "compute_loss: expected the model's loss to be the mean over the labels that count, as it was in earlier microbatches, "
                    f"found {loss.item():.6g}; return a sum divided by num_items_in_batch, or set microbatches: 1"
                )
        own, total = _count(labels, self._shift), _count(batch, self._shift)
        if not own:  # a mean of nothing is no number
            return logits.sum() * 0
        return loss * (own * int(smp.state.cfg.microbatches) / total)


def _logits_for(labels: Any, output: Any) -> Tensor | None:
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return None
    tensors = (each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point())
    return next((each for each in tensors if each.shape[:-1] == labels.shape), None)


@torch.no_grad()
def _mean(logits: Tensor, labels: Tensor, shift: int) -> Tensor:
    own = logits[..., : logits.shape[-2] - shift, :].flatten(0, -2)
    found = labels[..., shift:].flatten()
    if not ((found == IGNORED) | ((found >= 0) & (found < own.shape[-1]))).all():  # no classes of these logits
        return own.new_tensor(torch.inf, dtype=torch.float64)
    return F.cross_entropy(own.float() if own.dtype in (torch.half, torch.bfloat16) else own, found).double()


def _count(labels: Tensor, shift: int) -> int:
    return int((labels[..., shift:] != IGNORED).sum())
