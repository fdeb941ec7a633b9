"""GPT-Neo: norms first, causal; every other layer attends to a window of positions alone; scores in float32, and not scaled."""

from __future__ import annotations

from typing import Any

from smpc.nn.attention.variant import AttentionCall, Variant
from smpc.nn.huggingface.family import Family, Given, activation, attended, until_objects, without_weights
from smpc.nn.state_format import StateFormat, renamed

_FORMAT = StateFormat(
    "GPT-Neo",
    "h",
    (
        *renamed({"ln_1": "attention.pre_layernorm"}),
        *renamed(
            {f"attn.attention.{name[0]}_proj": f"attention.{name}" for name in ("query", "key", "value")}, ("weight",)
        ),
        *renamed({"attn.attention.out_proj": "attention.dense"}),
        *renamed({"ln_2": "output.pre_layernorm"}),
        *renamed({"mlp.c_fc": "output.dense1", "mlp.c_proj": "output.dense2"}),
    ),
    forgotten=("attn.attention.bias", "attn.attention.masked_bias"),
)


def _gptneo_arguments(layer: Any, config: Any) -> dict[str, Any]:
    attention = layer.attn.attention
    variant = Variant(
        is_eager=True,
        is_causal=True,
        unseen="least",
        scale=1.0,
        window=config.window_size if layer.attn.attention_type == "local" else config.max_position_embeddings,
        input_bias=False,
        layer_index=getattr(attention, "layer_id", None) or 0,
    )
    return {
        "num_attention_heads": attention.num_heads,
        "attention_head_size": attention.head_dim,
        "hidden_size": attention.embed_dim,
        "intermediate_size": layer.mlp.c_fc.out_features,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.resid_dropout,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "pre_layernorm": True,
        "post_layernorm": False,
        "variant": variant,
    }


def _gptneo_call(given: Given) -> AttentionCall:
    return AttentionCall(attended(given.get("attention_mask")))


FAMILY = Family(
    "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoBlock",
    _FORMAT,
    _gptneo_arguments,
    _gptneo_call,
    without_weights,
    until_objects,
)

# See Format. The public API has these names with and without the family's name.
translate_hf_state_dict_to_smdistributed_gptneo = translate_hf_state_dict_to_smdistributed = FAMILY.to_smdistributed
translate_state_dict_to_hf_gptneo = translate_state_dict_to_hf = FAMILY.to_hf
