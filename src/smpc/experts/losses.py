"""Losses of the router, and how they join a loss that is computed elsewhere.

    aux_loss    coefficient E sum_e f_e P_e: f_e is the share of slots that went to expert e, P_e the mean probability of e. It is 1 times
                the coefficient if both are even (Fedus et al. 2021, arXiv 2101.03961)
    z_loss      coefficient times the mean over tokens of (log sum_e exp(logit_e))^2 (Zoph et al. 2022, arXiv 2202.08906)

    hidden = join_loss(hidden, aux_loss(logits, index, 1e-2))     # the backward of whatever uses hidden adds the loss's gradient

All are 0, and connected, for no tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def aux_loss(logits: Tensor, index: Tensor, coefficient: float = 1.0) -> Tensor:
    """The load-balancing loss of logits [N, E] and the experts [N, k] that were chosen; a scalar, at least in fp32."""
    num_experts = logits.shape[-1]
    wide = logits if logits.dtype is torch.float64 else logits.float()
    bounds = torch.arange(num_experts + 1, device=index.device)
    chosen = torch.searchsorted(index.reshape(-1).sort().values, bounds).diff()
    shares = chosen.to(wide.dtype) / max(index.numel(), 1)
    means = wide.softmax(-1).sum(0) / max(logits.shape[0], 1)
    return coefficient * num_experts * (shares * means).sum()


def z_loss(logits: Tensor, coefficient: float = 1.0) -> Tensor:
    """The loss that keeps logits [N, E] small; a scalar, at least in fp32."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return coefficient * wide.logsumexp(-1).square().sum() / max(logits.shape[0], 1)


def join_loss(tensor: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """The tensor itself. When its gradient is computed, `loss` gets the gradient `scale`, as if it had been added to the final loss.

    `scale` is what the final loss is multiplied by before its backward: the scale of fp16 training, 1 / microbatches, or both.
    """
    found: Tensor = _Join.apply(tensor, loss, scale)  # type: ignore[no-untyped-call]
    return found


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.shape, loss.dtype, loss.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, dtype, device = ctx.like
        return grad, torch.full(shape, ctx.scale, dtype=dtype, device=device), None
