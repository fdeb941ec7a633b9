"""The hooks of a family's layers, for scripts that register them by themselves.

    hooks = get_hf_gpt2_transformer_layer_hooks()
    smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *hooks)

They are (init_hook, forward_hook, return_hook), and take the arguments of the installed transformers' layer class. A class that is
registered with them keeps the weights of its instances, like the built-in ones.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smpc.errors import UsageError
from smpc.nn.huggingface.family import Family
from smpc.nn.registration import Arguments, Registration, Translation

Hooks = tuple["LayerArguments", Translation | None, Translation | None]


class LayerArguments:
    """The init_hook: from arguments of a layer of the family to arguments of DistributedTransformerLayer."""

    def __init__(self, family: Family, layer_cls: type[nn.Module]) -> None:
        self._family, self._layer_cls = family, layer_cls
        parameters = list(inspect.signature(layer_cls.__init__).parameters.values())
        self.__signature__ = inspect.Signature(parameters[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Arguments:
        """(args, kwargs) of DistributedTransformerLayer."""
        config = self.__signature__.bind(*args, **kwargs).arguments.get("config")
        with torch.device("meta"):
            layer = self._layer_cls(*args, **kwargs)
        return self._registration.arguments(layer, config) or ((), {})

    @property
    def _registration(self) -> Registration:
        return self._family.registration(self._layer_cls)

    def registration(self, module_cls: type[nn.Module]) -> Registration | None:
        """How the family distributes a class; None if it is none of its layers, so that only its constructor's arguments tell."""
        return self._family.registration(module_cls) if issubclass(module_cls, self._layer_cls) else None


def hooks_of(family: Family) -> Callable[[], Hooks]:
    """The function that makes the hooks of a family. UsageError without transformers, which has these layers."""

    def get() -> Hooks:
        """(init_hook, forward_hook, return_hook) of the family's layers, for `smp.tp_register_with_module`."""
        module, _, name = family.layer.rpartition(".")
        try:
            layer_cls: type[nn.Module] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"hooks of {name}: expected transformers with {module}, found: {error}") from None
        registration = family.registration(layer_cls)
        return LayerArguments(family, layer_cls), registration.forward_hook, registration.return_hook

    return get
