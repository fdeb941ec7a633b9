"""See `smpc.nn.huggingface.gptneox`."""

from smpc.nn.huggingface.gptneox import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gptneox,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_gptneox,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptneox",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_gptneox",
]
