"""Llama's attention layer on FlashAttention (SMP v2's `torch.sagemaker.nn.huggingface.llama_flashattn.LlamaFlashAttention`).

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

from typing import Any

import torch
from torch import Tensor, nn

from smpc.errors import UsageError
from smpc.kernels.attention.reference import visible_keys
from smpc.nn.attention.flash_attention import FlashGroupedQueryAttention, library_attention


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
