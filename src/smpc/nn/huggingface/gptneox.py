"""GPT-NeoX: rotary positions by halves, attention and output layer side by side or one after the other, query, key and value in one.

The one weight has its rows head by head, each head's query, key and value together, and so has ours: its slices are whole heads.
"""

from __future__ import annotations

from typing import Any

from smpc.nn.huggingface.family import Family, Given, activation, attended, hidden_only, is_eager, needed
from smpc.nn.state_format import Format, renamed
from smpc.nn.variant import Call, Variant

_FORMAT = Format(
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


def _arguments(layer: Any) -> dict[str, Any]:
    config, attention = layer.attention.config, layer.attention
    has_bias = attention.dense.bias is not None
    variant = Variant(
        is_fused=True,
        is_eager=is_eager(config),
        is_causal=True,
        rotary="halves",
        residual="parallel" if layer.use_parallel_residual else "sequential",
        input_bias=has_bias,
        context_bias=has_bias,
        layer_index=attention.layer_idx or 0,
    )
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": attention.head_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "pre_layernorm": True,
        "post_layernorm": False,
        "variant": variant,
    }


def _call(given: Given) -> Call:
    return Call(
        attended(given.get("attention_mask")),
        rotary=needed(given, "position_embeddings"),
        cache=given.get("layer_past"),
    )


FAMILY = Family("transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer", _FORMAT, _arguments, _call, hidden_only)

# See Format; by the names of the public API, which exist with and without that of the family.
translate_hf_state_dict_to_smdistributed_gptneox = translate_hf_state_dict_to_smdistributed = (
    FAMILY.format.to_smdistributed
)
translate_state_dict_to_hf_gptneox = translate_state_dict_to_hf = FAMILY.format.to_hf
