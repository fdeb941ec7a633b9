"""Attention in fp64, written from the definition with a softmax of its own; the tests of the kernels compare with it."""

import math

import torch
from torch import Tensor


def expected_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool, causal_offset: int
) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp; differentiable; queries that see nothing get 0 and -inf."""
    shared = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(shared, 1), v.double().repeat_interleave(shared, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if bias is not None:
        scores = scores + bias.double()
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2]).triu(causal_offset + 1).bool().to(q.device)
        scores = scores.masked_fill(hidden, -math.inf)
    if k.shape[2] == 0:
        return q * 0 + k.sum() + v.sum(), torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=-1e300)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    seen = total > 0
    total = torch.where(seen, total, 1.0)
    lse = torch.where(seen, largest + torch.log(total), -math.inf)
    return torch.einsum("bhqk,bhkd->bhqd", weights / total, v), lse.squeeze(-1)


def alibi_bias(heads: int, keys: int, bias_max: int = 8) -> Tensor:
    """`[1, heads, 1, keys]`, as SMP's documentation prepares it."""
    slopes = 2.0 ** -(torch.arange(1, heads + 1) * bias_max / heads)
    return torch.arange(1 - keys, 1).view(1, 1, 1, keys) * slopes.view(1, heads, 1, 1)


def largest_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value if that is above 1."""
    if expected.numel() == 0:
        assert found.shape == expected.shape
        return 0.0
    return float(
        (found.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max().clamp(min=1.0)
    )
