"""See `smpc.nn.huggingface.roberta`."""

from smpc.nn.huggingface.roberta import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_roberta,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_roberta,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_roberta",
]
