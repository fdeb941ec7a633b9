"""See `smpc.nn.huggingface.bert`."""

from smpc.nn.huggingface.bert import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_bert,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_bert,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_bert",
]
