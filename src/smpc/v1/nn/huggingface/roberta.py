"""See `smpc.nn.huggingface.roberta`, and `smpc.nn.huggingface.layer_hooks` for the hooks."""

from smpc.nn.huggingface.layer_hooks import hooks_of
from smpc.nn.huggingface.roberta import (
    FAMILY,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_roberta,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_roberta,
)

__all__ = [
    "get_hf_roberta_transformer_layer_hooks",
    "translate_hf_roberta_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_roberta",
]

translate_hf_roberta_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed
get_hf_roberta_transformer_layer_hooks = hooks_of(FAMILY)
