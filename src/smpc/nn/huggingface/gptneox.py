"""GPT-NeoX: rotary positions by halves, attention and output layer side by side or one after the other, query, key and value in one.

The one weight has its rows head by head, each head's query, key and value together, and so has ours: its slices are whole heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from smpc.errors import ConfigError
from smpc.nn.attention.variant import AttentionCall, Variant
from smpc.nn.huggingface.family import (
    Family,
    Given,
    activation,
    attended,
    hidden_only,
    is_eager,
    layer_index,
    required_layer_argument,
    unseen,
    until_keywords,
)
from smpc.nn.state_format import StateFormat, renamed

_FORMAT = StateFormat(
    "GPT-NeoX",
    "layers",
    renamed(
        {
            "input_layernorm": "attention.pre_layernorm",
            "attention.query_key_value": "attention.query_key_value",
            "attention.dense": "attention.dense",
            "post_attention_layernorm": "output.pre_layernorm",
            "mlp.dense_h_to_4h": "output.dense1",
            "mlp.dense_4h_to_h": "output.dense2",
        }
    ),
    forgotten=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    in_files=((r"^embed_out\.", "lm_head."),),
)


def _gptneox_arguments(layer: Any, config: Any) -> dict[str, Any]:
    attention = layer.attention
    has_bias = attention.dense.bias is not None
    variant = Variant(
        is_fused=True,
        is_eager=is_eager(config),
        is_causal=True,
        rotary="halves",
        **_own_rotary(attention, config),
        unseen=unseen(attention, config),
        residual="parallel" if layer.use_parallel_residual else "sequential",
        input_bias=has_bias,
        context_bias=has_bias,
        layer_index=layer_index(attention),
    )
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": attention.head_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        # The layers of old releases have no dropout, whatever the configuration says.
        "attention_dropout_prob": config.attention_dropout if hasattr(attention, "attention_dropout") else 0.0,
        "hidden_dropout_prob": config.hidden_dropout if hasattr(layer, "post_mlp_dropout") else 0.0,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "pre_layernorm": True,
        "post_layernorm": False,
        "variant": variant,
    }


def _own_rotary(attention: nn.Module, config: Any) -> dict[str, Any]:
    """For old releases, where layers rotate queries and keys by positions and get no angles."""
    if "rotary_emb" not in attention._modules:
        return {}
    if getattr(config, "rope_scaling", None) is not None:
        raise ConfigError(f"expected no rope_scaling in this release of transformers, found {config.rope_scaling}")
    size = int(config.hidden_size // config.num_attention_heads * config.rotary_pct)
    if size % 2:
        raise ConfigError(f"expected rotary_pct to give an even number of channels of a head, found {size}")
    return {"rotary_size": size, "rotary_base": float(config.rotary_emb_base)}


def _gptneox_call(given: Given) -> AttentionCall:
    mask = attended(given.get("attention_mask"))
    if "position_embeddings" in given:
        return AttentionCall(mask, rotary=required_layer_argument(given, "position_embeddings"))
    return AttentionCall(mask, positions=required_layer_argument(given, "position_ids"))


FAMILY = Family(
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer",
    _FORMAT,
    _gptneox_arguments,
    _gptneox_call,
    hidden_only,
    until_keywords,
    older=replace(_FORMAT, in_files=()),
)

# See Format. The public API has these names with and without the family's name.
translate_hf_state_dict_to_smdistributed_gptneox = translate_hf_state_dict_to_smdistributed = FAMILY.to_smdistributed
translate_state_dict_to_hf_gptneox = translate_state_dict_to_hf = FAMILY.to_hf
