"""See `smpc.nn.huggingface.gptj`, and `smpc.nn.huggingface.layer_hooks` for the hooks."""

from smpc.nn.huggingface.gptj import (
    FAMILY,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gptj,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_gptj,
)
from smpc.nn.huggingface.layer_hooks import hooks_of

__all__ = [
    "get_hf_gptj_transformer_layer_hooks",
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_gptj",
]

translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed
get_hf_gptj_transformer_layer_hooks = hooks_of(FAMILY)
