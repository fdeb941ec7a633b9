"""RoBERTa: its layers are BERT's."""

from __future__ import annotations

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

# See Format; by the names of the public API, which exist with and without that of the family.
translate_hf_state_dict_to_smdistributed_roberta = translate_hf_state_dict_to_smdistributed = (
    FAMILY.format.to_smdistributed
)
translate_state_dict_to_hf_roberta = translate_state_dict_to_hf = FAMILY.format.to_hf
