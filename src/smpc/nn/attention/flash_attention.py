"""Attention modules with the interfaces of SMP v1 and v2.

    v1   smp.nn.FlashAttentionLayer           qkv [batch, sequence, 3, heads, head size]
    v2   FlashSelfAttention                   qkv packed along the heads, or a tuple (q, k, v)
         FlashGroupedQueryAttention           q, and kv packed along the heads or a tuple (k, v); fewer key heads than heads
         LlamaFlashAttention                  `smpc.nn.attention.llama_flash_attention`

All return `[batch, heads, sequence, head size]`. Causal attention hides the keys after the query: the standard lower triangle,
which starts at the first key whatever the lengths are.

Two ways compute it. With `triton_flash_attention` it is `smpc.kernels.attention`, which takes masks
`[batch or 1, heads or 1, 1, sequence]` that are added to the scores (ALiBi, padding as -inf) where `use_alibi` is set, and has
no dropout. Without, it is torch's scaled_dot_product_attention: cuDNN's kernel on Hopper and later, torch's choice elsewhere.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from smpc.errors import UsageError
from smpc.kernels.attention import flash_attention
from smpc.kernels.attention.check import check_attention

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
