"""The layer classes of Hugging Face's models that have a distributed version. They are known by name, so nothing imports transformers."""

from __future__ import annotations

from torch import nn

from smpc.nn.huggingface import bert, gpt2, gptj, gptneox, roberta, t5, vit
from smpc.nn.registration import Registration

FAMILIES = {module.FAMILY.layer: module.FAMILY for module in (gpt2, gptj, gptneox, bert, roberta, t5, vit)}


def find(cls: type[nn.Module]) -> Registration | None:
    """How a class is distributed, if it is the layer class of a family."""
    family = FAMILIES.get(f"{cls.__module__}.{cls.__qualname__}")
    return None if family is None else family.registration(cls)
