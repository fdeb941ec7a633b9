"""See `smpc.nn.huggingface.vit`, and `smpc.nn.huggingface.layer_hooks` for the hooks."""

from smpc.nn.huggingface.layer_hooks import hooks_of
from smpc.nn.huggingface.vit import (
    FAMILY,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_vit,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_vit,
)

__all__ = [
    "get_hf_vit_transformer_layer_hooks",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_vit",
    "translate_hf_vit_state_dict_to_smdistributed",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_vit",
]

translate_hf_vit_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed
get_hf_vit_transformer_layer_hooks = hooks_of(FAMILY)
