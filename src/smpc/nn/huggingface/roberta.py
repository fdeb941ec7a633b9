"""RoBERTa: its layers are BERT's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smpc.nn.huggingface.bert import RULES, arguments, call
from smpc.nn.huggingface.family import Family, hidden_only
from smpc.nn.state_format import Format

FAMILY = Family(
    "transformers.models.roberta.modeling_roberta.RobertaLayer",
    Format("RoBERTa", "layer", RULES),
    arguments,
    call,
    hidden_only,
)


def translate_hf_state_dict_to_smdistributed_roberta(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """The state dict of a RoBERTa model of Hugging Face's, under the names and shapes of one whose layers are distributed.

    `max_seq_len` has no effect: models of current releases of transformers have no causal masks as buffers.
    """
    return FAMILY.format.to_smdistributed(state_dict, max_seq_len)


def translate_state_dict_to_hf_roberta(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """The inverse of `translate_hf_state_dict_to_smdistributed_roberta`: of a full state dict, for from_pretrained and load_state_dict."""
    return FAMILY.format.to_hf(state_dict, max_seq_len)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_state_dict_to_hf = translate_state_dict_to_hf_roberta
