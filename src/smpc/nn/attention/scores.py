"""Terms of attention scores beside queries and keys: rotary positions, biases by relative position, masks.

    rotate                [N, heads, S, d] turned by its positions, in the first r channels of each head
    angles                cosines and sines for that
    RelativePositions     biases [1, heads / tp, queries, keys] from a table [buckets, heads] that is split by heads
    eager_attention       attention without a fused kernel
    with_causality        a mask of keys, for a causal layer
    in_window             which keys are seen where queries see the last ones alone
    with_position_bias    one mask for `scaled_dot_product_attention` from a mask, causality and biases

Sources: Su et al. 2021, arXiv 2104.09864; Raffel et al. 2019, arXiv 1910.10683.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from smpc.nn.attention.variant import PositionBuckets
from smpc.nn.parallel import DistributedModule, TensorParallel


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, kind: str) -> Tensor:
    """Queries or keys [N, heads, S, d], turned by the angles whose cosines and sines are [N, S, r]."""
    turned, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    if kind == "halves":
        first, second = turned.chunk(2, -1)
        across = torch.cat((-second, first), -1)
    else:
        across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    turned = turned * cos[:, None] + across * sin[:, None]
    return torch.cat((turned, rest), -1)


def angles(positions: Tensor, size: int, base: float, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, S, size] of positions [N, S], each twice: side by side for turning by "pairs", else by halves."""
    steps = torch.arange(0, size, 2, device=positions.device) / size
    each = positions[..., None].float() * (1.0 / base**steps)
    both = each.repeat_interleave(2, -1) if kind == "pairs" else torch.cat((each, each), -1)
    return both.cos().to(dtype), both.sin().to(dtype)


class RelativePositions(DistributedModule):
    """Biases of this rank's heads by relative position."""

    def __init__(
        self, buckets: PositionBuckets, num_attention_heads: int, initializer_range: float, *, parallel: TensorParallel
    ) -> None:
        super().__init__(parallel)
        self.buckets = buckets
        self.declare(
            "weight",
            (buckets.num_buckets, num_attention_heads),
            lambda block: block.normal_(0.0, initializer_range),
            1,
        )
        self.reset_parameters()

    def forward(self, queries: int, keys: int, first: int) -> Tensor:
        """Biases [1, heads / tp, queries, keys]; the first query is at position `first`."""
        weight = self.get_parameter("weight")
        places = torch.arange(first, first + queries, device=weight.device)
        distance = torch.arange(keys, device=weight.device)[None, :] - places[:, None]
        return F.embedding(bucket(distance, self.buckets), weight).permute(2, 0, 1)[None]


def bucket(distance: Tensor, buckets: PositionBuckets) -> Tensor:
    """The bucket of each distance from query to key: one for each of the near half, then logarithmically wider ones."""
    number, later = buckets.num_buckets, torch.zeros_like(distance)
    if buckets.is_bidirectional:
        number //= 2
        later = (distance > 0).long() * number
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = number // 2
    wide = torch.log(distance.float() / exact) / math.log(buckets.max_distance / exact) * (number - exact)
    far = (exact + wide.clamp(min=0).long()).clamp(max=number - 1)
    return later + torch.where(distance < exact, distance, far)


def with_position_bias(bias: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Biases of the scores and the mask of attended keys, as one tensor to be added."""
    lowest = torch.finfo(bias.dtype).min
    if mask is None and is_causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, lowest) if mask.dtype is torch.bool else bias + mask


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    *,
    scale: float | None,
    seen: Tensor | None = None,
    scales_unseen: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`, step by step; a query all of whose keys are masked by numbers attends to all alike.

    Keys that are not `seen` have the least score, or that times the scale, to which the mask is added.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(-1, -2)) * factor
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min * (factor if scales_unseen else 1.0))
    elif is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        is_bool = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if is_bool else scores + mask
    weights = F.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(F.dropout(weights, dropout, dropout > 0), value)


def with_causality(mask: Tensor, queries: int, keys: int) -> Tensor:
    """A mask of keys, true where they are attended to or added, as one in which queries, the last of as many keys, see no later ones."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
    if mask.dtype is torch.bool:
        return mask & seen
    return mask.expand(-1, -1, queries, keys).masked_fill(~seen, torch.finfo(mask.dtype).min)


def in_window(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Which keys are seen by queries, the last of as many keys: their own and the `window` - 1 before it."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return every.tril(keys - queries).triu(keys - queries - window + 1)


def sdpa_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The reference's mask, 1 where a key is masked or added where it is floating point, as `scaled_dot_product_attention` takes it."""
    if mask is None:
        return None
    return mask.to(dtype) if mask.is_floating_point() else ~mask.bool()
