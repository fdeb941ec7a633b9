"""Attention modules with the interfaces of SMP v1 and v2.

    v1   smp.nn.FlashAttentionLayer           qkv [batch, sequence, 3, heads, head size]
    v2   FlashSelfAttention                   qkv packed along the heads, or a tuple (q, k, v)
         FlashGroupedQueryAttention           q, and kv packed along the heads or a tuple (k, v); fewer key heads than heads

All return `[batch, heads, sequence, head size]`. Causal attention hides the keys after the query: the standard lower triangle,
which starts at the first key whatever the lengths are.

Two ways compute it. With `triton_flash_attention` it is `smpc.kernels.attention`, which takes masks
`[batch or 1, heads or 1, 1, sequence]` that are added to the scores (ALiBi, padding as -inf) where `use_alibi` is set, and has
no dropout. Without, it is torch's scaled_dot_product_attention: cuDNN's kernel on Hopper and later, torch's choice elsewhere.

`LlamaFlashAttention` is Llama's attention layer on it (SMP v2's `torch.sagemaker.nn.huggingface.llama_flashattn.LlamaFlashAttention`).

It has the parameters of transformers' LlamaAttention under the same names, so that a state dict fits either, and takes its place:

    for layer in model.model.layers:
        attention = LlamaFlashAttention(model.config)
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = attention

Two protocols. Called as SMP documents it, it returns one tensor `[batch, heads, sequence, head size]`: the layer's output, after the
output projection, by heads. Called by a decoder layer of transformers, which passes `position_embeddings`, it returns the pair
(`[batch, sequence, hidden size]`, None) that the decoder layer unpacks.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from smpc.errors import UsageError
from smpc.kernels.attention import flash_attention
from smpc.kernels.attention.op import check_attention
from smpc.kernels.attention.reference import visible_keys

LAYOUTS = ("b h s d", "b s h d")


class FlashAttentionLayer(nn.Module):
    """Attention of SMP v1 (`smp.nn.FlashAttentionLayer`); names, order and defaults of the arguments are SMP's.

    The scores are multiplied by `scale`, or if that is None by 1 / sqrt(attention_head_size) when `scale_attention_scores` and by
    1 / (layer_idx + 1) when `scale_attn_by_layer_idx`. Dropout acts in training mode.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        check_options(attention_dropout_prob, triton_flash_attention, use_alibi)
        self.attention_dropout_prob = attention_dropout_prob
        self.attention_head_size = attention_head_size
        self.triton_flash_attention = triton_flash_attention
        self.use_alibi = use_alibi
        self.scale = scale
        if scale is None:
            self.scale = _scale_of(attention_head_size, scale_attention_scores, scale_attn_by_layer_idx, layer_idx)

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """`qkv` is `[batch, sequence, 3, heads, head size]`; returns `[batch, heads, sequence, head size]`."""
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise UsageError(f"expected qkv as [batch, sequence, 3, heads, head size]; found {list(qkv.shape)}")
        if self.attention_head_size not in (None, qkv.shape[4]):
            raise UsageError(
                f"expected qkv with heads of size {self.attention_head_size}, the layer's attention_head_size; found {qkv.shape[4]}"
            )
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        dropout = self.attention_dropout_prob if self.training else 0.0
        return attention(q, k, v, attn_mask, self.scale, causal, dropout, self.triton_flash_attention, self.use_alibi)


class FlashSelfAttention(nn.Module):
    """Attention of SMP v2; names, order and defaults of the arguments are SMP's."""

    def __init__(
        self,
        attention_dropout_prob: float = 0.0,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        check_options(attention_dropout_prob, triton_flash_attention, use_alibi)
        self.attention_dropout_prob = attention_dropout_prob
        self.scale = scale
        self.triton_flash_attention = triton_flash_attention
        self.use_alibi = use_alibi

    def forward(
        self,
        qkv: Tensor | tuple[Tensor, Tensor, Tensor],
        attn_mask: Tensor | None = None,
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = "b h s d",
    ) -> Tensor:
        """`qkv` is q, k and v in this layout, or one tensor with all heads of q, then of k, then of v; `cast_dtype` casts them first."""
        q, k, v = (_heads_first(part, cast_dtype, layout) for part in _unpack_for_flash(qkv, 3, "qkv", layout))
        dropout = self.attention_dropout_prob if self.training else 0.0
        return attention(q, k, v, attn_mask, self.scale, causal, dropout, self.triton_flash_attention, self.use_alibi)


class FlashGroupedQueryAttention(nn.Module):
    """Attention of SMP v2 with fewer key heads than query heads; names, order and defaults of the arguments are SMP's."""

    def __init__(self, attention_dropout_prob: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        check_options(attention_dropout_prob, triton_flash_attention=False, use_alibi=False)
        self.attention_dropout_prob = attention_dropout_prob
        self.scale = scale

    def forward(
        self,
        q: Tensor,
        kv: Tensor | tuple[Tensor, Tensor],
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = "b s h d",
    ) -> Tensor:
        """`kv` is k and v in this layout, or one tensor with all heads of k, then of v; their heads divide q's."""
        k, v = (_heads_first(part, cast_dtype, layout) for part in _unpack_for_flash(kv, 2, "kv", layout))
        q = _heads_first(q, cast_dtype, layout)
        return attention(q, k, v, None, self.scale, causal, self.attention_dropout_prob if self.training else 0.0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    causal: bool,
    dropout: float,
    triton_flash_attention: bool = False,
    use_alibi: bool = False,
) -> Tensor:
    """Checks the arguments of a module's call and computes attention; all tensors `[batch, heads, sequence, head size]`."""
    if attn_mask is not None and not use_alibi:
        raise UsageError(
            f"expected no attn_mask without triton_flash_attention=True and use_alibi=True; found one {list(attn_mask.shape)}"
        )
    if attn_mask is None and use_alibi:
        raise UsageError(
            "expected attn_mask [batch or 1, heads or 1, 1, sequence], because use_alibi is set; found none"
        )
    if triton_flash_attention:
        return flash_attention(q, k, v, attn_mask, scale=scale, causal=causal)
    check_attention(q, k, v, None, scale)
    return library_attention(q, k, v, None, scale, causal, dropout)


def library_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, scale: float | None, causal: bool, dropout: float
) -> Tensor:
    """torch's scaled_dot_product_attention with the kernel that is fastest on the card."""
    with _preferred_kernels(q):
        return scaled_dot_product_attention(
            q, k, v, attn_mask, dropout, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def check_options(attention_dropout_prob: float, triton_flash_attention: bool, use_alibi: bool) -> None:
    """Raises a ValueError for options of a module that contradict each other, all of them at once."""
    faults = []
    if not 0.0 <= attention_dropout_prob < 1.0:
        faults.append(f"expected attention_dropout_prob of 0 to below 1; found {attention_dropout_prob}")
    if triton_flash_attention and attention_dropout_prob != 0.0:
        faults.append(
            "expected attention_dropout_prob=0 with triton_flash_attention, whose kernel has no dropout; "
            f"found {attention_dropout_prob}"
        )
    if use_alibi and not triton_flash_attention:
        faults.append("expected triton_flash_attention=True with use_alibi; found False")
    if faults:
        raise UsageError("\n".join(faults))


def _scale_of(head_size: int | None, by_head_size: bool, by_layer: bool, layer_idx: int | None) -> float:
    scale = 1.0
    if by_head_size:
        if head_size is None or head_size < 1:
            raise UsageError(
                f"expected attention_head_size of 1 or more with scale_attention_scores and no scale; found {head_size}"
            )
        scale /= math.sqrt(head_size)
    if by_layer:
        if layer_idx is None or layer_idx < 0:
            raise UsageError(
                f"expected layer_idx of 0 or more with scale_attn_by_layer_idx and no scale; found {layer_idx}"
            )
        scale /= layer_idx + 1
    return scale


def _unpack_for_flash(packed: Tensor | tuple[Tensor, ...], count: int, name: str, layout: str) -> tuple[Tensor, ...]:
    """The `count` tensors of `packed`."""
    if layout not in LAYOUTS:
        raise UsageError(f"expected layout {' or '.join(map(repr, LAYOUTS))}; found {layout!r}")
    if not isinstance(packed, Tensor):
        if len(packed) != count:
            raise UsageError(f"expected {name} as a tensor or {count} tensors; found {len(packed)}")
        return tuple(packed)
    heads = layout.split().index("h")
    if packed.dim() != 4 or packed.shape[heads] % count != 0:
        raise UsageError(
            f"expected {name} with 4 dimensions {layout!r} and heads that {count} divides; found {list(packed.shape)}"
        )
    return packed.chunk(count, heads)


def _heads_first(x: Tensor, cast_dtype: torch.dtype | None, layout: str) -> Tensor:
    if x.dim() != 4:
        raise UsageError(f"expected tensors with 4 dimensions {layout!r}; found {list(x.shape)}")
    if cast_dtype is not None:
        x = x.to(cast_dtype)
    return x.transpose(1, 2) if layout == "b s h d" else x


def _preferred_kernels(q: Tensor) -> contextlib.AbstractContextManager[object]:
    """torch prefers FlashAttention 2 everywhere; on Hopper and later cuDNN's kernel is 1.7 to 2.3 times as fast (docs/kernels.md)."""
    if q.device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(q.device) < (9, 0):
        return contextlib.nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


class LlamaFlashAttention(nn.Module):
    """Llama's attention with its projections; `config` is a transformers LlamaConfig.

    A cache needs `layer_idx`, which SMP's constructor does not take: set the attribute.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config = config
        self.layer_idx: int | None = None
        self.num_heads = config.num_attention_heads
        self.num_key_heads = config.num_key_value_heads
        self.head_size = config.head_dim or config.hidden_size // config.num_attention_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_heads * self.head_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_heads * self.head_size, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_size, config.hidden_size, bias=bias)
        self.rotary = LlamaRotaryEmbedding(config)
        self.attention = FlashGroupedQueryAttention(config.attention_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **transformers_arguments: Any,
    ) -> Tensor | tuple[Tensor, None]:
        """The attention's output; see the module for the two protocols.

        `hidden_states` is `[batch, sequence, hidden size]`, or with the last dimension split into heads. `attention_mask` is
        `[batch, keys]` with 0 for padding, or `[batch, 1 or heads, sequence, keys]`, added to the scores or bool (True sees), which then
        holds the causal mask too. `past_key_value` is a Cache, which is updated; without one `use_cache` has nothing to fill
        and changes nothing. Queries that see no key yield zeros before the output projection.
        """
        cache = past_key_value if past_key_value is not None else transformers_arguments.get("past_key_values")
        hidden = hidden_states.flatten(2) if hidden_states.dim() == 4 else hidden_states
        self._check(hidden, output_attentions, cache)
        batch, sequence, _ = hidden.shape
        q, k, v = (
            projection(hidden).unflatten(2, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        past = 0 if cache is None else int(cache.get_seq_length(self.layer_idx))
        rotation = transformers_arguments.get("position_embeddings")
        q, k = self._rotate(q, k, rotation, position_ids, past)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        result = self._attend(q, k, v, attention_mask, past)
        output: Tensor = self.o_proj(result.transpose(1, 2).reshape(batch, sequence, -1))
        if rotation is not None:
            return output, None
        by_heads: Tensor = output.view(batch, sequence, self.num_heads, -1).transpose(1, 2)
        return by_heads

    def _check(self, hidden: Tensor, output_attentions: bool, cache: Any) -> None:
        faults = []
        if hidden.dim() != 3 or hidden.shape[2] != self.config.hidden_size:
            faults.append(
                f"expected hidden states [batch, sequence, {self.config.hidden_size}]; found {list(hidden.shape)}"
            )
        if output_attentions:
            faults.append(
                "expected output_attentions=False: FlashAttention never holds the attention matrix; found True"
            )
        if cache is not None and self.layer_idx is None:
            faults.append(
                "expected the attribute layer_idx of LlamaFlashAttention to be set, because a cache is used; found None"
            )
        if faults:
            raise UsageError("\n".join(faults))

    def _rotate(
        self, q: Tensor, k: Tensor, rotation: tuple[Tensor, Tensor] | None, position_ids: Tensor | None, past: int
    ) -> tuple[Tensor, Tensor]:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        if rotation is None:
            if position_ids is None:
                position_ids = torch.arange(past, past + q.shape[2], device=q.device).unsqueeze(0)
            rotation = self.rotary(q, position_ids)
        rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(q, k, *rotation)
        return rotated

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, past: int) -> Tensor:
        if mask is None and past == 0 and q.shape[2] == k.shape[2]:
            result: Tensor = self.attention(q, (k, v), causal=True, layout="b h s d")
            return result
        if mask is None or mask.dim() == 2:
            mask = self._causal_mask(q, k, mask, past)
        elif mask.dim() != 4:
            raise UsageError(f"expected attention_mask with 2 or 4 dimensions; found {list(mask.shape)}")
        dropout = self.attention.attention_dropout_prob if self.training else 0.0
        return library_attention(q, k, v, mask, None, False, dropout)

    def _causal_mask(self, q: Tensor, k: Tensor, padding: Tensor | None, past: int) -> Tensor:
        visible = visible_keys(q.shape[2], k.shape[2], past, q.device)[None, None]
        if padding is None:
            return visible
        if padding.shape != (k.shape[0], k.shape[2]):
            raise UsageError(
                f"expected attention_mask [batch, keys], here {[k.shape[0], k.shape[2]]}; found {list(padding.shape)}"
            )
        return visible & padding.bool()[:, None, None, :]
