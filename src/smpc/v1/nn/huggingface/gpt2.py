"""See `smpc.nn.huggingface.gpt2`, and `smpc.nn.huggingface.layer_hooks` for the hooks."""

from smpc.nn.huggingface.gpt2 import (
    FAMILY,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf,
    translate_state_dict_to_hf_gpt2,
)
from smpc.nn.huggingface.layer_hooks import hooks_of

__all__ = [
    "get_hf_gpt2_transformer_layer_hooks",
    "translate_hf_block_state_dict_to_smdistributed",
    "translate_hf_gpt2_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_layer_state_dict_to_hf_gpt2_block",
    "translate_state_dict_to_hf",
    "translate_state_dict_to_hf_gpt2",
]

translate_hf_gpt2_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed
translate_hf_block_state_dict_to_smdistributed = FAMILY.format.block_to_smdistributed
translate_layer_state_dict_to_hf_gpt2_block = FAMILY.format.block_to_hf
get_hf_gpt2_transformer_layer_hooks = hooks_of(FAMILY)
