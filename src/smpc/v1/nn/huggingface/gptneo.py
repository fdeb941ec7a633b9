"""See `smpc.nn.huggingface.gptneo`, and `smpc.nn.huggingface.layer_hooks` for the hooks."""

from smpc.nn.huggingface.gptneo import (
    FAMILY,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gptneo,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_gptneo,
)
from smpc.nn.huggingface.layer_hooks import hooks_of

__all__ = [
    "get_hf_gptneo_transformer_layer_hooks",
    "translate_hf_gptneo_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_gptneo",
]

translate_hf_gptneo_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed
get_hf_gptneo_transformer_layer_hooks = hooks_of(FAMILY)
