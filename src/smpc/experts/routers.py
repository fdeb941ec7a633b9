"""Routers: from logits [N, E], one for each token and expert, to the k experts of each token and their weights.

    top_k       the k largest, with their softmax: over the k chosen, or over all experts
    sinkhorn    the k largest of a plan that gives all experts the same number of tokens, found by Sinkhorn's iteration; the weights are
                the sigmoid (k = 1) or the softmax of the logits themselves. In evaluation, the k largest logits. (Clark et al. 2022, arXiv
                2202.01169.) Each rank balances its own tokens, as Megatron-LM does
    balanced    round robin: token n takes experts n k, n k + 1, .. modulo E, with its own weights for them; exactly even

All return (index [N, k] int64, weights [N, k] in the logits' dtype). Gradients go through the weights alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smpc.errors import ConfigError


def top_k(logits: Tensor, k: int, *, over_chosen: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest. `over_chosen`: their weights sum to 1; else they are those of the softmax over all experts."""
    _check(logits, k)
    values, index = logits.topk(k, dim=-1)
    return index, values.softmax(-1) if over_chosen else logits.softmax(-1).gather(-1, index)


def sinkhorn(
    logits: Tensor, k: int, *, training: bool = True, tolerance: float = 1e-4, limit: int = 100
) -> tuple[Tensor, Tensor]:
    """The k largest of the balanced plan. Iterates until the plan changes by less than `tolerance`, at most `limit` times."""
    _check(logits, k)
    with torch.no_grad():
        index = (_balanced_plan(logits, tolerance, limit) if training else logits).topk(k, dim=-1).indices
    return index, _own_weights(logits, index)


def balanced(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Round robin over the experts."""
    _check(logits, k)
    count, num_experts = logits.shape
    index = round_robin(count, k, num_experts, logits.device)
    return index, _own_weights(logits, index)


def round_robin(num_tokens: int, k: int, num_experts: int, device: torch.device) -> Tensor:
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


def _check(logits: Tensor, k: int) -> None:
    if logits.dim() != 2 or not 1 <= k <= logits.shape[-1]:
        raise ConfigError(
            f"expected logits [N, E] and 1 to E experts for each token, found shape {tuple(logits.shape)} and {k}; "
            "flatten the tokens, or take fewer experts"
        )
