"""The layers of a transformed model, for `isinstance`, as scripts tell FSDP what to wrap.

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})

A layer keeps its own class. A layer is a member of a list of modules (`nn.ModuleList`) of one class that is not inside another layer.

Source: public training scripts for SMP v2.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

__all__ = ["TETransformerLayer", "TransformerLayer"]
_MARK = "_smpc_transformed_layer"


class _Layers(type):
    """A class of all modules that are marked."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Module) and _MARK in vars(instance)


class TransformerLayer(metaclass=_Layers):
    """Any layer of a model that `transform` has returned."""


class TETransformerLayer(metaclass=_Layers):
    """The same: layers of TransformerEngine stay what they are, too."""


def mark_layers(model: nn.Module) -> None:
    """Find the layers of a model by its structure, so that the classes above know them."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        children = list(module.children())
        kinds = Counter(type(child) for child in children if any(True for _ in child.parameters()))
        if isinstance(module, nn.ModuleList) and len(kinds) == 1:
            for child in children:
                vars(child)[_MARK] = True
        else:
            waiting += children
