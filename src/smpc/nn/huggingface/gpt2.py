"""GPT-2: norms first, causal; weights transposed, query, key and value in one. With cross-attention it has its own norm and weights."""

from __future__ import annotations

import math
from typing import Any

from smpc.nn.attention.variant import AttentionCall, Variant
from smpc.nn.huggingface.family import (
    Family,
    Given,
    activation,
    attended,
    hidden_only,
    is_eager,
    layer_index,
    normal,
    unseen,
    until_positions,
)
from smpc.nn.registration import Fill
from smpc.nn.state_format import FormatRule, StateFormat, renamed


def _gpt2_transposed(theirs: str, *ours: str) -> tuple[FormatRule, ...]:
    return (
        FormatRule(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed=True),
        FormatRule(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours)),
    )


_FORMAT = StateFormat(
    "GPT-2",
    "h",
    (
        *renamed({"ln_1": "attention.pre_layernorm"}),
        *_gpt2_transposed("attn.c_attn", "attention.query", "attention.key", "attention.value"),
        *_gpt2_transposed("attn.c_proj", "attention.dense"),
        *renamed({"ln_2": "output.pre_layernorm"}),
        *renamed({"ln_cross_attn": "cross_attention.pre_layernorm"}),
        *_gpt2_transposed("crossattention.q_attn", "cross_attention.query"),
        *_gpt2_transposed("crossattention.c_attn", "cross_attention.key", "cross_attention.value"),
        *_gpt2_transposed("crossattention.c_proj", "cross_attention.dense"),
        *_gpt2_transposed("mlp.c_fc", "output.dense1"),
        *_gpt2_transposed("mlp.c_proj", "output.dense2"),
    ),
    forgotten=("attn.bias", "attn.masked_bias", "crossattention.bias", "crossattention.masked_bias"),
)


def _gpt2_arguments(layer: Any, config: Any) -> dict[str, Any]:
    attention = layer.attn
    return {
        "num_attention_heads": attention.num_heads,
        "attention_head_size": attention.head_dim,
        "hidden_size": attention.embed_dim,
        "intermediate_size": layer.mlp.c_fc.nf,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "add_cross_attention": config.add_cross_attention,
        "pre_layernorm": True,
        "post_layernorm": False,
        "variant": Variant(
            is_eager=is_eager(config),
            is_causal=True,
            unseen=unseen(attention, config),
            scale=_gpt2_scale(layer, config),
            layer_index=layer_index(attention),
        ),
    }


def _gpt2_scale(layer: Any, config: Any) -> float | None:
    if not is_eager(config) and not hasattr(layer.attn, "scaling"):
        return None  # before 5, fused kernels were not told of a scale
    scale = 1 / math.sqrt(layer.attn.head_dim) if config.scale_attn_weights else 1.0
    return scale / (layer.attn.layer_idx + 1) if config.scale_attn_by_inverse_layer_idx else scale


def _gpt2_call(given: Given) -> AttentionCall:
    return AttentionCall(
        attended(given.get("attention_mask")),
        given.get("encoder_hidden_states"),
        attended(given.get("encoder_attention_mask")),
    )


def _gpt2_fills(layer: Any, config: Any) -> dict[str, Fill]:
    """Layers that add to the residual start smaller."""
    small = normal(config.initializer_range / math.sqrt(2 * config.n_layer))
    return {"attention.dense.weight": small, "cross_attention.dense.weight": small, "output.dense2.weight": small}


FAMILY = Family(
    "transformers.models.gpt2.modeling_gpt2.GPT2Block",
    _FORMAT,
    _gpt2_arguments,
    _gpt2_call,
    hidden_only,
    until_positions,
    _gpt2_fills,
)

# See Format. The public API has these names with and without the family's name.
translate_hf_state_dict_to_smdistributed_gpt2 = translate_hf_state_dict_to_smdistributed = FAMILY.to_smdistributed
translate_state_dict_to_hf_gpt2 = translate_state_dict_to_hf = FAMILY.to_hf
