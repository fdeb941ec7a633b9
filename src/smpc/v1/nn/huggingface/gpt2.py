"""See `smpc.nn.huggingface.gpt2`."""

from smpc.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_gpt2,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_gpt2",
]
