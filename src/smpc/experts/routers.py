"""Routers and their losses.

A router takes logits [N, E], one for each token and expert, to the k experts of each token and their weights:

    top_k       the k largest, with their softmax: over the k chosen, or over all experts
    sinkhorn    the k largest of a plan that gives all experts the same number of tokens, found by Sinkhorn's iteration; the weights are
                the sigmoid (k = 1) or the softmax of the logits themselves. In evaluation, the k largest logits. (Clark et al. 2022, arXiv
                2202.01169.) Each rank balances its own tokens, as Megatron-LM does
    balanced    round robin: token n takes experts n k, n k + 1, .. modulo E, with its own weights for them; exactly even

All return (index [N, k] int64, weights [N, k] in the logits' dtype). Gradients go through the weights alone.

Losses of a router, and how they join a loss that is computed elsewhere:

    aux_loss    coefficient E sum_e f_e P_e: f_e is the share of slots that went to expert e, P_e the mean probability of e. It is 1 times
                the coefficient if both are even (Fedus et al. 2021, arXiv 2101.03961)
    z_loss      coefficient times the mean over tokens of (log sum_e exp(logit_e))^2 (Zoph et al. 2022, arXiv 2202.08906)

    hidden = join_loss(hidden, aux_loss(logits, index, 1e-2))     # the backward of whatever uses hidden adds the loss's gradient

All are 0, and connected, for no tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from smpc.errors import ConfigError


def top_k(logits: Tensor, k: int, *, over_chosen: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest. `over_chosen`: their weights sum to 1; else they are taken from the softmax over all experts."""
    _check_logits(logits, k)
    values, index = logits.topk(k, dim=-1)
    return index, values.softmax(-1) if over_chosen else logits.softmax(-1).gather(-1, index)


def sinkhorn(
    logits: Tensor, k: int, *, training: bool = True, tolerance: float = 1e-4, limit: int = 100
) -> tuple[Tensor, Tensor]:
    """The k largest of the balanced plan. Iterates until the plan changes by less than `tolerance`, at most `limit` times."""
    _check_logits(logits, k)
    with torch.no_grad():
        index = (_balanced_plan(logits, tolerance, limit) if training else logits).topk(k, dim=-1).indices
    return index, _own_weights(logits, index)


def balanced(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Round robin over the experts."""
    _check_logits(logits, k)
    count, num_experts = logits.shape
    index = round_robin_route(count, k, num_experts, logits.device)
    return index, _own_weights(logits, index)


def round_robin_route(num_tokens: int, k: int, num_experts: int, device: torch.device) -> Tensor:
    """[N, k]: 0, 1, .. modulo E, line by line. The k experts of a token are different ones if k <= E."""
    return (torch.arange(num_tokens * k, device=device) % num_experts).view(num_tokens, k)


def _own_weights(logits: Tensor, index: Tensor) -> Tensor:
    weights = logits.sigmoid() if index.shape[1] == 1 else logits.softmax(-1)
    return weights.gather(-1, index)


def _balanced_plan(logits: Tensor, tolerance: float, limit: int) -> Tensor:
    """exp(logits) with rows and columns scaled so that rows sum to 1 / N and columns to 1 / E."""
    count, num_experts = logits.shape
    if not count:
        return logits
    wide = logits.float() if logits.dtype is not torch.float64 else logits
    plan = (wide - wide.amax(-1, keepdim=True)).exp()  # rows are scaled anyway
    tokens, experts = plan.new_ones(count, 1), plan.new_ones(1, num_experts)
    tiny = torch.finfo(plan.dtype).tiny
    for _ in range(limit):
        tokens = 1 / (count * (plan * experts).sum(1, keepdim=True).clamp_min(tiny))
        before, experts = experts, 1 / (num_experts * (plan * tokens).sum(0, keepdim=True).clamp_min(tiny))
        if (experts - before).abs().mean() <= tolerance * before.abs().mean():
            break
    return plan * tokens * experts


def _check_logits(logits: Tensor, k: int) -> None:
    """Raises ConfigError for logits and numbers of experts that cannot be routed."""
    if logits.dim() != 2 or not 1 <= k <= logits.shape[-1]:
        raise ConfigError(
            f"expected logits [N, E] and 1 to E experts for each token, found shape {tuple(logits.shape)} and {k}; "
            "flatten the tokens, or take fewer experts"
        )


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


@contextlib.contextmanager
def joined_losses_scaled(factor: float) -> Iterator[None]:
    """In this context the backwards of joined losses multiply their gradients by `factor`, as other code does for the final loss."""
    outer, _Join.factor = _Join.factor, factor
    try:
        yield
    finally:
        _Join.factor = outer


class _Join(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.shape, loss.dtype, loss.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, dtype, device = ctx.like
        return grad, torch.full(shape, ctx.scale * _Join.factor, dtype=dtype, device=device), None
