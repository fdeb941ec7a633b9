"""The layer classes of Hugging Face's models that have a distributed version. They are known by name, so nothing imports transformers."""

from __future__ import annotations

from types import MappingProxyType

from torch import nn

from smpc.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, roberta, t5, vit
from smpc.nn.registration import Registration

FAMILIES = {module.FAMILY.layer: module.FAMILY for module in (gpt2, gptj, gptneo, gptneox, bert, roberta, t5, vit)}
# The lists of such layers by the classes that have them and pass each layer's hidden states to the next one, and do nothing else with them.
STACKS = MappingProxyType(
    {
        "transformers.models.gpt2.modeling_gpt2.GPT2Model": "h",
        "transformers.models.gptj.modeling_gptj.GPTJModel": "h",
        "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoModel": "h",
        "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXModel": "layers",
        "transformers.models.bert.modeling_bert.BertEncoder": "layer",
        "transformers.models.roberta.modeling_roberta.RobertaEncoder": "layer",
        "transformers.models.t5.modeling_t5.T5Stack": "block",
        "transformers.models.vit.modeling_vit.ViTModel": "layers",
        "transformers.models.vit.modeling_vit.ViTEncoder": "layer",  # before 5
    }
)


def find(cls: type[nn.Module]) -> Registration | None:
    """How a class is distributed, if it is the layer class of a family."""
    family = FAMILIES.get(f"{cls.__module__}.{cls.__qualname__}")
    return None if family is None else family.registration(cls)
