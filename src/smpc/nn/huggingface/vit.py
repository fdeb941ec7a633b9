"""ViT: norms first, attention to all patches."""

from __future__ import annotations

from typing import Any

from smpc.nn.attention.variant import AttentionCall, Variant
from smpc.nn.huggingface.family import Family, Given, activation, attended, hidden_only, is_eager
from smpc.nn.state_format import StateFormat, renamed

_FORMAT = StateFormat(
    "ViT",
    "layers",
    renamed(
        {
            "layernorm_before": "attention.pre_layernorm",
            **{f"attention.{name[0]}_proj": f"attention.{name}" for name in ("query", "key", "value")},
            "attention.o_proj": "attention.dense",
            "layernorm_after": "output.pre_layernorm",
            "mlp.fc1": "output.dense1",
            "mlp.fc2": "output.dense2",
        }
    ),
    in_files=(
        (r"\bencoder\.layer\.(\d+)\.", r"layers.\1."),
        (r"\.attention\.attention\.([qkv])\w+\.", r".attention.\1_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"(\blayers\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    ),
)


_OLDER = StateFormat(
    "ViT",
    "layer",
    renamed(
        {
            "layernorm_before": "attention.pre_layernorm",
            **{f"attention.attention.{name}": f"attention.{name}" for name in ("query", "key", "value")},
            "attention.output.dense": "attention.dense",
            "layernorm_after": "output.pre_layernorm",
            "intermediate.dense": "output.dense1",
            "output.dense": "output.dense2",
        }
    ),
)


def _vit_arguments(layer: Any, config: Any) -> dict[str, Any]:
    has_biases = any(name.endswith(("q_proj.bias", "query.bias")) for name, _ in layer.attention.named_parameters())
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "pre_layernorm": True,
        "post_layernorm": False,
        "variant": Variant(is_eager=is_eager(config), input_bias=has_biases),
    }


def _vit_call(given: Given) -> AttentionCall:
    return AttentionCall(attended(given.get("attention_mask")))


FAMILY = Family(
    "transformers.models.vit.modeling_vit.ViTLayer", _FORMAT, _vit_arguments, _vit_call, hidden_only, older=_OLDER
)

# See Format. The public API has these names with and without the family's name.
translate_hf_state_dict_to_smdistributed_vit = translate_hf_state_dict_to_smdistributed = FAMILY.to_smdistributed
translate_state_dict_to_hf_vit = translate_state_dict_to_hf = FAMILY.to_hf
