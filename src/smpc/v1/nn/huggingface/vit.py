"""See `smpc.nn.huggingface.vit`."""

from smpc.nn.huggingface.vit import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_vit,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_vit,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_vit",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_vit",
]
