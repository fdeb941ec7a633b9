"""GPT-J: attention and output layer side by side after one norm, rotary positions by pairs, no biases in attention."""

from __future__ import annotations

from typing import Any

from smpc.nn.attention.variant import AttentionCall, Variant
from smpc.nn.huggingface.family import (
    Family,
    Given,
    activation,
    attended,
    layer_index,
    required_layer_argument,
    unseen,
    until_objects,
    without_weights,
)
from smpc.nn.state_format import StateFormat, renamed

_FORMAT = StateFormat(
    "GPT-J",
    "h",
    (
        *renamed({"ln_1": "attention.pre_layernorm"}),
        *renamed({f"attn.{name[0]}_proj": f"attention.{name}" for name in ("query", "key", "value")}, ("weight",)),
        *renamed({"attn.out_proj": "attention.dense"}, ("weight",)),
        *renamed({"mlp.fc_in": "output.dense1", "mlp.fc_out": "output.dense2"}),
    ),
    forgotten=("attn.bias", "attn.masked_bias", "attn.embed_positions"),
)


def _gptj_arguments(layer: Any, config: Any) -> dict[str, Any]:
    variant = Variant(
        is_causal=True,
        rotary="pairs",
        rotary_size=config.rotary_dim,
        is_eager=True,
        unseen="scale" if unseen(layer.attn, config) else "",
        residual="shared",
        input_bias=False,
        context_bias=False,
        layer_index=layer_index(layer.attn),
    )
    return {
        "num_attention_heads": layer.attn.num_attention_heads,
        "attention_head_size": layer.attn.head_dim,
        "hidden_size": layer.attn.embed_dim,
        "intermediate_size": layer.mlp.fc_in.out_features,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "pre_layernorm": True,
        "post_layernorm": False,
        "variant": variant,
    }


def _gptj_call(given: Given) -> AttentionCall:
    return AttentionCall(
        attended(given.get("attention_mask")), positions=required_layer_argument(given, "position_ids")
    )


FAMILY = Family(
    "transformers.models.gptj.modeling_gptj.GPTJBlock",
    _FORMAT,
    _gptj_arguments,
    _gptj_call,
    without_weights,
    until_objects,
)

# See Format. The public API has these names with and without the family's name.
translate_hf_state_dict_to_smdistributed_gptj = translate_hf_state_dict_to_smdistributed = FAMILY.to_smdistributed
translate_state_dict_to_hf_gptj = translate_state_dict_to_hf = FAMILY.to_hf
