"""See `smpc.nn.huggingface.gptneox`, and `smpc.nn.huggingface.layer_hooks` for the hooks."""

from smpc.nn.huggingface.gptneox import (
    FAMILY,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gptneox,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_gptneox,
)
from smpc.nn.huggingface.layer_hooks import hooks_of

__all__ = [
    "get_hf_gptneox_transformer_layer_hooks",
    "translate_hf_gptneox_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptneox",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_gptneox",
]

translate_hf_gptneox_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed
get_hf_gptneox_transformer_layer_hooks = hooks_of(FAMILY)
