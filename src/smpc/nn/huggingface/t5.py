"""T5: RMS norms first, no biases, scores not scaled but biased by relative position, a plain or gated output layer.

The first layer of a stack computes the biases of the scores and hands them to the others. Each rank has the biases of its own heads, and
only these leave a distributed layer. Sums that overflow float16 are clamped. Decoder layers have cross-attention, and write their output
layer as the third part instead of the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from smpc.nn.attention.variant import AttentionCall, PositionBuckets, Variant
from smpc.nn.huggingface.family import (
    Family,
    Given,
    activation,
    attended,
    is_eager,
    layer_index,
    normal,
    until_objects,
    with_biases,
)
from smpc.nn.registration import Fill
from smpc.nn.state_format import FormatRule, StateFormat, renamed

_PARTS = {"q": "query", "k": "key", "v": "value", "o": "dense"}
_PLAIN = {"wi": "dense1", "wo": "dense2"}
_GATED = {"wi_0": "dense1", "wi_1": "gate", "wo": "dense2"}


def _t5_output(place: str, names: Mapping[str, str]) -> tuple[FormatRule, ...]:
    linear = {f"{place}.DenseReluDense.{theirs}": f"output.{ours}" for theirs, ours in names.items()}
    return renamed({f"{place}.layer_norm": "output.pre_layernorm", **linear}, ("weight",))


_SELF = renamed(
    {
        "layer.0.layer_norm": "attention.pre_layernorm",
        "layer.0.SelfAttention.relative_attention_bias": "attention.positions",
        **{f"layer.0.SelfAttention.{theirs}": f"attention.{ours}" for theirs, ours in _PARTS.items()},
    },
    ("weight",),
)
_CROSS = renamed(
    {
        "layer.1.layer_norm": "cross_attention.pre_layernorm",
        **{f"layer.1.EncDecAttention.{theirs}": f"cross_attention.{ours}" for theirs, ours in _PARTS.items()},
    },
    ("weight",),
)
_FORMAT = StateFormat(
    "T5",
    "block",
    _SELF + _t5_output("layer.1", _PLAIN),
    (
        _SELF + _t5_output("layer.1", _GATED),
        _SELF + _CROSS + _t5_output("layer.2", _PLAIN),
        _SELF + _CROSS + _t5_output("layer.2", _GATED),
    ),
    forgotten=("layer.1.EncDecAttention.relative_attention_bias.weight",),
)


def _t5_arguments(layer: Any, config: Any) -> dict[str, Any]:
    attention = layer.layer[0].SelfAttention
    buckets = PositionBuckets(
        config.relative_attention_num_buckets, config.relative_attention_max_distance, not config.is_decoder
    )
    variant = Variant(
        norm="rms",
        is_eager=is_eager(config),
        is_causal=config.is_decoder,
        scale=1.0,
        position_buckets=buckets if attention.has_relative_attention_bias else None,
        is_gated=config.is_gated_act,
        has_wide_dropout=True,
        clamps_half=True,
        input_bias=False,
        context_bias=False,
        output_bias=False,
        layer_index=layer_index(attention),
    )
    return {
        "num_attention_heads": attention.n_heads,
        "attention_head_size": attention.key_value_proj_dim,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "attention_dropout_prob": config.dropout_rate,
        "hidden_dropout_prob": config.dropout_rate,
        "activation": activation(config.dense_act_fn),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_factor * config.d_model**-0.5,
        "add_cross_attention": config.is_decoder,
        "pre_layernorm": True,
        "post_layernorm": False,
        "variant": variant,
    }


def _t5_call(given: Given) -> AttentionCall:
    return AttentionCall(
        attended(given.get("attention_mask")),
        given.get("encoder_hidden_states"),
        attended(given.get("encoder_attention_mask")),
        position_bias=given.get("position_bias"),
    )


def _t5_fills(layer: Any, config: Any) -> dict[str, Fill]:
    """The queries' weights are small since the scores are not scaled; other exceptions depend on widths, or are norms."""
    attention = layer.layer[0].SelfAttention
    inner = attention.n_heads * attention.key_value_proj_dim
    factor, size = config.initializer_factor, attention.key_value_proj_dim

    def fill_norm(block: Tensor) -> object:
        return block.fill_(factor)

    found = {
        "output.dense2.weight": normal(factor * config.d_ff**-0.5),
        "output.pre_layernorm.weight": fill_norm,
    }
    for part in ("attention", "cross_attention"):
        found[f"{part}.query.weight"] = normal(factor * (config.d_model * size) ** -0.5)
        found[f"{part}.dense.weight"] = normal(factor * inner**-0.5)
        found[f"{part}.pre_layernorm.weight"] = fill_norm
    return found


FAMILY = Family(
    "transformers.models.t5.modeling_t5.T5Block",
    _FORMAT,
    _t5_arguments,
    _t5_call,
    with_biases,
    until_objects,
    _t5_fills,
)

# See Format. The public API has these names with and without the family's name.
translate_hf_state_dict_to_smdistributed_t5 = translate_hf_state_dict_to_smdistributed = FAMILY.to_smdistributed
translate_state_dict_to_hf_t5 = translate_state_dict_to_hf = FAMILY.to_hf
