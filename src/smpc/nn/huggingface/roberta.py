"""RoBERTa: its layers are BERT's."""

from __future__ import annotations

from smpc.nn.huggingface.bert import RULES, arguments, call
from smpc.nn.huggingface.family import Family, hidden_only, until_positions
from smpc.nn.state_format import StateFormat

FAMILY = Family(
    "transformers.models.roberta.modeling_roberta.RobertaLayer",
    StateFormat("RoBERTa", "layer", RULES),
    arguments,
    call,
    hidden_only,
    until_positions,
)

# See Format. The public API has these names with and without the family's name.
translate_hf_state_dict_to_smdistributed_roberta = translate_hf_state_dict_to_smdistributed = FAMILY.to_smdistributed
translate_state_dict_to_hf_roberta = translate_state_dict_to_hf = FAMILY.to_hf
