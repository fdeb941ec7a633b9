"""See `smpc.nn.huggingface.gptj`."""

from smpc.nn.huggingface.gptj import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gptj,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_gptj,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_gptj",
]
