"""Attention split over tensor-parallel ranks by heads: `DistributedAttentionLayer`.

    inside hidden state -> [norm] -> query, key, value by columns -> heads / tp heads of attention -> dense by rows
                        -> dropout -> + residual -> [norm]

A mask that is no floating-point tensor says 1 (true) where a key must not be attended to; a floating-point mask is added to the scores.

Source: "DistributedAttentionLayer" in the public tensor-parallelism reference of SMP v1.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from smpc.nn.attention.scores import (
    RelativePositions,
    eager_attention,
    in_window,
    rotate,
    sdpa_mask,
    with_causality,
    with_position_bias,
)
from smpc.nn.attention.variant import AttentionCall, TupleCache, Variant
from smpc.nn.layers.linear import ColumnLinear, RowLinear, column_products
from smpc.nn.layers.norms import make_norm
from smpc.nn.parallel import DistributedModule, TensorParallel, current_parallel


class DistributedAttentionLayer(DistributedModule):
    """Self- or cross-attention with its output layer, dropout, residual connection and layer normalization.

    The arguments are global quantities, as in DistributedTransformerLayer; with `cross_attention` keys and values come from the
    `cross_states`. Not in the reference: `is_inside`: inputs and output are in the layout between distributed layers; `variant`:
    differences from the reference's layer.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        is_inside: bool = False,
        variant: Variant | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(parallel or current_parallel())
        check_layer_norms("DistributedAttentionLayer", pre_layernorm, post_layernorm)
        self._check_sizes(num_attention_heads, hidden_size)
        self.variant = variant or Variant()
        self.head_size, self.cross_attention = attention_head_size, cross_attention
        self.causal_mask_size, self.is_inside = causal_mask_size, is_inside
        self.attention_dropout_prob, self.hidden_dropout_prob = attention_dropout_prob, hidden_dropout_prob
        channels = num_attention_heads * attention_head_size
        split = self.parallel

        def columns(width: int) -> ColumnLinear:
            return ColumnLinear(
                hidden_size,
                width,
                initializer_range=initializer_range,
                use_normal_initialization=use_normal_initialization,
                parallel=split,
                bias=self.variant.input_bias,
            )

        def norm(wanted: bool) -> DistributedModule | None:
            return make_norm(self.variant.norm, hidden_size, layernorm_epsilon, split) if wanted else None

        self.pre_layernorm = norm(pre_layernorm)
        if self.variant.is_fused:
            self.query_key_value = columns(3 * channels)
        else:
            self.query, self.key, self.value = columns(channels), columns(channels), columns(channels)
        self.positions = self._make_positions(num_attention_heads, initializer_range)
        self.dense = RowLinear(
            channels,
            hidden_size,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            parallel=split,
            bias=self.variant.context_bias,
        )
        self.layernorm = norm(post_layernorm)

    def _make_positions(self, num_heads: int, initializer_range: float) -> RelativePositions | None:
        """Biases of the scores by relative position, for self-attention of a variant that has them."""
        buckets = None if self.cross_attention else self.variant.position_buckets
        if buckets is None:
            return None
        return RelativePositions(buckets, num_heads, initializer_range, parallel=self.parallel)

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        """(hidden_states [N, S, H], mask [N, 1, 1, S] or None) to [N, S, H]; with cross-attention (hidden_states, cross_states, mask)."""
        hidden, cross, mask = self._arguments(inputs)
        if not self.is_inside:
            hidden, batch = self.parallel.enter(hidden), hidden.shape[0]
            cross = None if cross is None else self.parallel.enter(cross)
            mask = None if mask is None else self.parallel.enter_batch(mask, batch)
        output = self.attend(hidden, self._call(hidden, cross, mask))
        return output if self.is_inside else self.parallel.leave(output)

    def attend(self, hidden: Tensor, call: AttentionCall) -> Tensor:
        """Hidden states inside, to what this layer makes of them; the call's tensors are inside too."""
        output = hidden + self.mix(self.normed(hidden), call)
        return output if self.layernorm is None else self.layernorm(output)

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states as this layer takes them."""
        return hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)

    def mix(self, normed: Tensor, call: AttentionCall) -> Tensor:
        """The attention output, from the normalized hidden states; the caller adds it to the residual."""
        query, key, value = self._project(normed, call.cross)
        if call.rotary is not None:
            query, key = (rotate(heads, *call.rotary, self.variant.rotary) for heads in (query, key))
        if call.cache is not None:
            key, value = self._cached(call, key, value)
        context = self._context(query, key, value, call)
        return hidden_dropout(self, self.dense(context), self.hidden_dropout_prob)

    def _project(self, normed: Tensor, source: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads, [N, heads / tp, S, head size] each."""

        def heads(projected: Tensor) -> Tensor:
            return projected.view(*projected.shape[:2], -1, self.head_size).transpose(1, 2)

        if self.variant.is_fused:
            (fused,) = column_products(normed, self.query_key_value)
            query, key, value = fused.view(*fused.shape[:2], -1, 3, self.head_size).transpose(1, 2).unbind(3)
            return query, key, value
        if source is None:
            query, key, value = column_products(normed, self.query, self.key, self.value)
        else:
            (query,), (key, value) = column_products(normed, self.query), column_products(source, self.key, self.value)
        return heads(query), heads(key), heads(value)

    def _context(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Attention of this rank's heads, to [N, S, channels / tp]."""
        mask, is_causal = call.mask, self._is_causal and query.shape[-2] > 1
        is_longer = key.shape[-2] > query.shape[-2] and not isinstance(call.cache, TupleCache)
        if mask is None and is_causal and is_longer:  # the rest of a cache that is filled up
            key, value = key[:, :, : query.shape[-2]], value[:, :, : query.shape[-2]]
        if mask is not None and is_causal and mask.shape[-2] == 1 and not self.variant.unseen:  # of padding alone
            mask = with_causality(mask, query.shape[-2], key.shape[-2])
        if call.position_bias is not None:
            mask = with_position_bias(call.position_bias[..., : key.shape[-2]], mask, is_causal)
        attention = eager_attention if self.variant.is_eager else F.scaled_dot_product_attention
        if self.variant.unseen and self._is_causal:
            seen = in_window(query.shape[-2], key.shape[-2], self.variant.window or key.shape[-2], query.device)
            is_scaled = self.variant.unseen == "scale"
            attention = functools.partial(eager_attention, seen=seen, scales_unseen=is_scaled)
        if self.variant.window:
            query, key = query.float(), key.float()
        dropout = self.attention_dropout_prob if self.training else 0.0
        draws = nullcontext() if not dropout or is_fake(query) else self.parallel.streams.split(query.device)
        with draws:
            context = attention(query, key, value, mask, dropout, is_causal and mask is None, scale=self.variant.scale)
        return context.transpose(1, 2).flatten(2)

    @property
    def _is_causal(self) -> bool:
        return (self.causal_mask_size is not None or self.variant.is_causal) and not self.cross_attention

    def _cached(self, call: AttentionCall, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of earlier calls followed by these; for cross-attention, the first call's."""
        cache, index, states = call.cache, self.variant.layer_index, (key, value)
        if isinstance(cache, TupleCache):
            return cache.update(states, self.cross_attention)
        both = getattr(cache, "self_attention_cache", None)
        if both is None:
            return states if self.cross_attention else cache.update(key, value, index)
        if not self.cross_attention:
            found: tuple[Tensor, Tensor] = both.update(key, value, index)
            return found
        if cache.is_updated.get(index):
            layer = cache.cross_attention_cache.layers[index]
            return layer.keys, layer.values
        found = cache.cross_attention_cache.update(key, value, index)
        cache.is_updated[index] = True
        return found

    def _call(self, hidden: Tensor, cross: Tensor | None, mask: Tensor | None) -> AttentionCall:
        """The reference's inputs in general terms."""
        keys = (hidden if cross is None else cross).shape[1]
        if self._is_causal and self.causal_mask_size is not None and keys > self.causal_mask_size:
            raise ValueError(
                f"{type(self).__name__}: expected at most causal_mask_size = {self.causal_mask_size} positions, found {keys}"
            )
        if mask is not None and mask.shape[-1] != keys:
            raise ValueError(
                f"{type(self).__name__}: expected a mask [N, 1, 1, {keys}], found shape {tuple(mask.shape)}"
            )
        return AttentionCall(sdpa_mask(mask, hidden.dtype), cross)

    def _arguments(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        names = (
            ("hidden_states", "cross_states", "attention_mask")
            if self.cross_attention
            else ("hidden_states", "attention_mask")
        )
        found = tuple_of(self, inputs, names)
        hidden = found[0]
        cross = found[1] if self.cross_attention else None
        assert hidden is not None
        return hidden, cross, found[-1]

    def _check_sizes(self, num_attention_heads: int, hidden_size: int) -> None:
        sizes = {"num_attention_heads": num_attention_heads}
        if self.parallel.splits_hidden:
            sizes["hidden_size"] = hidden_size
        self.parallel.check_divides(type(self).__name__, **sizes)


def hidden_dropout(module: DistributedModule, hidden: Tensor, probability: float) -> Tensor:
    """Dropout of a hidden state inside: the same on all ranks where it is replicated, different where it is split."""
    if not module.training or not probability or is_fake(hidden):
        return F.dropout(hidden, probability, module.training)
    streams = module.parallel.streams
    stream = streams.split if module.parallel.splits_hidden else streams.replicated
    with stream(hidden.device):
        return F.dropout(hidden, probability, True)


def check_layer_norms(owner: str, pre_layernorm: bool, post_layernorm: bool) -> None:
    """Raises ValueError unless one of the two is set."""
    if not (pre_layernorm or post_layernorm):
        raise ValueError(f"{owner}: expected pre_layernorm or post_layernorm to be True, found both False")


def tuple_of(module: DistributedModule, inputs: object, names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    """The inputs of a module that takes one tuple; ValueError unless it has one tensor (or, after the first, None) for each name."""
    found = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    is_right = len(found) == len(names) and isinstance(found[0], Tensor)
    if not is_right or not all(value is None or isinstance(value, Tensor) for value in found):
        kinds = ", ".join(type(value).__name__ for value in found)
        raise ValueError(f"{type(module).__name__}: expected one tuple ({', '.join(names)}), found ({kinds})")
    return found
