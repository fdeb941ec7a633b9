"""BERT: norms last; as a decoder it is causal, and may have cross-attention."""

from __future__ import annotations

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
    until_positions,
)
from smpc.nn.state_format import StateFormat, renamed

PARTS = ("query", "key", "value")
RULES = renamed(
    {
        **{f"attention.self.{name}": f"attention.{name}" for name in PARTS},
        "attention.output.dense": "attention.dense",
        "attention.output.LayerNorm": "attention.layernorm",
        **{f"crossattention.self.{name}": f"cross_attention.{name}" for name in PARTS},
        "crossattention.output.dense": "cross_attention.dense",
        "crossattention.output.LayerNorm": "cross_attention.layernorm",
        "intermediate.dense": "output.dense1",
        "output.dense": "output.dense2",
        "output.LayerNorm": "output.layernorm",
    }
)


def arguments(layer: Any, config: Any) -> dict[str, Any]:
    """Arguments of the distributed version of a layer of BERT's or RoBERTa's."""
    attention = layer.attention.self
    return {
        "num_attention_heads": attention.num_attention_heads,
        "attention_head_size": attention.attention_head_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "add_cross_attention": layer.add_cross_attention,
        "variant": Variant(is_eager=is_eager(config), is_causal=layer.is_decoder, layer_index=layer_index(attention)),
    }


def call(given: Given) -> AttentionCall:
    """A call of such a layer."""
    return AttentionCall(
        attended(given.get("attention_mask")),
        given.get("encoder_hidden_states"),
        attended(given.get("encoder_attention_mask")),
    )


FAMILY = Family(
    "transformers.models.bert.modeling_bert.BertLayer",
    StateFormat("BERT", "layer", RULES),
    arguments,
    call,
    hidden_only,
    until_positions,
)

# See Format. The public API has these names with and without the family's name.
translate_hf_state_dict_to_smdistributed_bert = translate_hf_state_dict_to_smdistributed = FAMILY.to_smdistributed
translate_state_dict_to_hf_bert = translate_state_dict_to_hf = FAMILY.to_hf
