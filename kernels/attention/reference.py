"""Attention by its formula in torch: what the op computes on a machine without Triton's kernels.

Sums are kept in fp32, or in fp64 for fp64 inputs. The whole matrix of scores is held; query heads that share a
key head are rows of one product, so keys and values are not repeated. Letters as in `smpc.kernels.attention.op`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    shift: Tensor | None,
    scale: float,
    causal: bool,
    causal_offset: int,
) -> tuple[Tensor, Tensor]:
    """The result, and lse in fp32 (fp64 for fp64 inputs)."""
    scores = _scores(q, k, bias, shift, scale, causal, causal_offset)
    lse = torch.logsumexp(scores, dim=-1)
    weights = _weights(scores, lse)
    out = _fold(weights, k) @ v.to(weights.dtype)
    return _laid_out(out.reshape(q.shape), q), lse


def reference_backward(
    grad: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    shift: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    causal_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    weights = _weights(_scores(q, k, bias, shift, scale, causal, causal_offset), lse)
    wide = weights.dtype
    delta = (out.to(wide) * grad.to(wide)).sum(-1, keepdim=True) - grad_lse.to(wide).unsqueeze(-1)
    folded_grad = _fold(grad.to(wide), k)
    grad_weights = (folded_grad @ v.to(wide).transpose(-1, -2)).reshape(weights.shape)
    grad_scores = _fold(weights * (grad_weights - delta) * scale, k)
    dq = (grad_scores @ k.to(wide)).reshape(q.shape)
    dk = grad_scores.transpose(-1, -2) @ _fold(q.to(wide), k)
    dv = _fold(weights, k).transpose(-1, -2) @ folded_grad
    return _laid_out(dq, q), _laid_out(dk, k), _laid_out(dv, v)


def visible_keys(num_queries: int, num_keys: int, causal_offset: int, device: torch.device) -> Tensor:
    """Which keys a query sees in causal attention: `[queries, keys]`, query i sees key j if j <= i + offset."""
    rows = torch.arange(num_queries, device=device).unsqueeze(1)
    return torch.arange(num_keys, device=device).unsqueeze(0) <= rows + causal_offset


def _scores(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    shift: Tensor | None,
    scale: float,
    causal: bool,
    causal_offset: int,
) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (_fold(q.to(wide), k) @ k.to(wide).transpose(-1, -2)).reshape(*q.shape[:3], k.shape[2]) * scale
    if bias is not None:
        scores = scores + bias.to(wide)
    if shift is not None:
        scores = scores - shift.to(wide).unsqueeze(-1)
    if causal:
        hidden = ~visible_keys(q.shape[2], k.shape[2], causal_offset, q.device)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(score - lse), and 0 for queries that see nothing, where both are -inf."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), float("inf")).unsqueeze(-1))


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """`[batch, heads, queries, n]` to `[batch, key heads, heads that share a key head * queries, n]`."""
    batch, heads, queries, last = x.shape
    return x.reshape(batch, k.shape[1], heads // k.shape[1] * queries, last)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """In the type of `like` and in the memory order that the kernels write: batch, sequence, heads, head size."""
    return x.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)
