"""See `smpc.nn.huggingface.t5`."""

from smpc.nn.huggingface.t5 import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_t5,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_t5,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_t5",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_t5",
]
