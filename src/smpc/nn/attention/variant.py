"""Features of other models' transformer layers that the SMP reference's layers lack: per kind of layer, per call, and their caches.

    Variant   how a layer is built: norms, biases, rotary position embeddings, parallel residual, ...; the default is the reference's layer
    Call      what one call of a layer is given beside its hidden states, in the terms of `scaled_dot_product_attention`

Neither is in the reference. `smpc.nn.huggingface` describes the layers of Hugging Face's models by them.

`TupleCache` has keys and values of earlier calls as tuples: how releases of transformers without `Cache` objects hand them to a layer and
get them back.

cache = TupleCache(past)                       # (key, value), then cross-attention's if there is one; () before the first call
keys, values = cache.update(states, False)     # keys and values of earlier calls, then these
cache.present                                  # what the layer returns, in the same order
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PositionBuckets:
    """Learned biases of the scores by relative position, as of T5: buckets that grow with the distance, up to `max_distance`."""

    num_buckets: int
    max_distance: int
    is_bidirectional: bool


@dataclass(frozen=True, slots=True)
class Variant:
    """How a layer differs from the reference's.

    `norm`: "layer" or "rms". `is_fused`: query, key and value are one weight, [heads, 3, head size] by rows. `scale`: of the scores;
    None for 1 / sqrt(head size). `rotary`: positions turn query and key channels by "halves" (x, x + r / 2) or by "pairs" (2x, 2x + 1);
    "" for not at all. `rotary_size`, `rotary_base`: r, and the base of its angles, where the layer is given positions rather than cosines
    and sines. `position_buckets`: this layer computes the biases, which later ones are given. `residual`: "sequential", or "parallel",
    where attention and output layer are both given the layer's input; "shared" is parallel with one norm for both. `is_gated`: the output
    layer multiplies its activation with a second linear layer. `has_wide_dropout`: dropout between its linear layers. `is_eager`: attention
    is not left to a fused kernel. `window`: of an eager, causal layer, whose scores are computed in float32, and whose queries see as many
    last keys, their own included; 0: not so. `unseen`: the scores of keys that a query of an eager, causal layer does not see are the
    "least" value even before a mask is added, or that value times the "scale"; "" for not so. `clamps_half`: hidden states that overflow
    float16 are clamped to what it holds.
    """

    norm: str = "layer"
    is_eager: bool = False
    is_fused: bool = False
    is_causal: bool = False
    scale: float | None = None
    rotary: str = ""
    rotary_size: int = 0
    rotary_base: float = 10000.0
    position_buckets: PositionBuckets | None = None
    residual: str = "sequential"
    is_gated: bool = False
    has_wide_dropout: bool = False
    clamps_half: bool = False
    window: int = 0
    unseen: str = ""
    input_bias: bool = True  # of query, key and value
    context_bias: bool = True  # of the linear layer after attention
    output_bias: bool = True  # of the output layer's linear layers
    layer_index: int = 0  # among those that share a cache


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The inputs of one call: tensors in the outer layout, with the batch as first dimension, or 1 for all samples.

    Masks are true where a key is attended to, or are added to the scores. `rotary`: cosines and sines [N, S, r]; or `positions`: integers
    [N, S] that they are computed from. `position_bias`: an earlier layer's, for this rank's heads. `cache`: keys and values of earlier
    calls, in Hugging Face's form or a `TupleCache`; `returns_cache`: it is returned.
    """

    mask: Tensor | None = None
    cross: Tensor | None = None
    cross_mask: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    positions: Tensor | None = None
    position_bias: Tensor | None = None
    cache: Any = field(default=None, repr=False)
    returns_cache: bool = False


States = tuple[Tensor, Tensor]


class TupleCache:
    """Keys and values [N, heads / tp, S, head size] of one layer in one call. `has_crossed`: of cross-attention, too."""

    def __init__(self, past: tuple[Tensor, ...], has_crossed: bool) -> None:
        self._past, self._has_crossed = tuple(past), has_crossed
        self.present: tuple[Tensor, ...] = ()

    def update(self, states: States, is_crossed: bool) -> States:
        """These keys and values after the earlier ones; of cross-attention, the earlier ones, if there are any."""
        if is_crossed and not self._has_crossed:
            return states
        past = self._past[2:4] if is_crossed else self._past[:2]
        if past and is_crossed:
            states = (past[0], past[1])
        elif past:
            states = (torch.cat((past[0], states[0]), -2), torch.cat((past[1], states[1]), -2))
        self.present = (*self.present, *states)
        return states

    def get_seq_length(self, index: int) -> int:
        """How many positions there were before; as `Cache` objects say it, of any layer."""
        return self._past[0].shape[-2] if self._past else 0


def returned(cache: Any) -> Any:
    """A layer's result for a cache: its keys and values, or a `Cache` object itself."""
    return cache.present if isinstance(cache, TupleCache) else cache
