"""See `smpc.nn.huggingface.bert`, and `smpc.nn.huggingface.layer_hooks` for the hooks."""

from smpc.nn.huggingface.bert import (
    FAMILY,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_bert,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_bert,
)
from smpc.nn.huggingface.layer_hooks import hooks_of

__all__ = [
    "get_hf_bert_transformer_layer_hooks",
    "translate_hf_bert_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_bert",
]

translate_hf_bert_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed
get_hf_bert_transformer_layer_hooks = hooks_of(FAMILY)
