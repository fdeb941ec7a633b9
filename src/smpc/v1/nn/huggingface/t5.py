"""See `smpc.nn.huggingface.t5`, and `smpc.nn.huggingface.layer_hooks` for the hooks."""

from smpc.nn.huggingface.layer_hooks import hooks_of
from smpc.nn.huggingface.t5 import (
    FAMILY,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_t5,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_t5,
)

__all__ = [
    "get_hf_t5_transformer_layer_hooks",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_t5",
    "translate_hf_t5_state_dict_to_smdistributed",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_t5",
]

translate_hf_t5_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed
get_hf_t5_transformer_layer_hooks = hooks_of(FAMILY)
