"""Which module classes have a distributed version, and how to get from one to the other.

Terms
    registration   module class -> distributed class, with hooks that translate
                       init_hook      arguments of the module's __init__ to (args, kwargs) of the distributed one's
                       forward_hook   arguments of the module's forward to (args, kwargs) of the distributed one's
                       return_hook    what the distributed module returns to what the module returns
                       state_hook     the module's state dict to the whole values of the distributed module's parameters
    arguments      what a module was constructed with. Registering a class makes its instances remember them; those of torch's own
                   classes are read from their attributes

Hooks take the arguments of the method that they translate, without self. Hooks for other releases of a class are fitted
(`smpc.nn.distribution.fitting`); a hook that cannot be fitted is refused when it is registered.

    registry = Registry()
    registry.register(MyLinear, DistributedLinear, init_hook=lambda width: ((width, width), {}))

Source: "Registering Tensor Parallelism Distributed Modules" in the public reference of SMP v1; `state_hook` is an addition.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import nn

from smpc.errors import UsageError
from smpc.nn.distribution.fitting import fitted
from smpc.nn.huggingface import families
from smpc.nn.huggingface.layer_hooks import LayerArguments
from smpc.nn.layers.embedding import DistributedEmbedding
from smpc.nn.layers.linear import DistributedLinear
from smpc.nn.parallel import DistributedModule
from smpc.nn.registration import ARGUMENTS, Arguments, Registration, StateHook, Translation


class Registry:
    """The registrations of one session; nn.Linear, nn.Embedding and the layers of Hugging Face's models are there from the start."""

    def __init__(self) -> None:
        self._found: dict[type[nn.Module], Registration] = {
            nn.Linear: Registration(nn.Linear, DistributedLinear, state_hook=dict, read_arguments=_linear_arguments),
            nn.Embedding: Registration(
                nn.Embedding, DistributedEmbedding, state_hook=dict, read_arguments=_embedding_arguments
            ),
        }

    def register(
        self,
        module_cls: type[nn.Module],
        dist_module: type[DistributedModule],
        init_hook: Translation | None = None,
        forward_hook: Translation | None = None,
        return_hook: Translation | None = None,
        state_hook: StateHook | None = None,
    ) -> None:
        """Registers a distributed version of a class, in place of an earlier one. UsageError for what cannot be one, or a hook that cannot
        be given the arguments of what it translates."""
        for value, base, name in (
            (module_cls, nn.Module, "module_cls"),
            (dist_module, DistributedModule, "dist_module"),
        ):
            if not (isinstance(value, type) and issubclass(value, base)):
                raise UsageError(f"tp_register: expected {name} to be a subclass of {base.__name__}, found {value!r}")
        forward_hook = fitted("forward_hook", forward_hook, module_cls, module_cls.forward)
        if return_hook is not None and not callable(return_hook):
            raise UsageError(f"tp_register: expected return_hook to be callable, found {type(return_hook).__name__}")
        own = init_hook.registration(module_cls) if isinstance(init_hook, LayerArguments) else None
        if own is not None:  # a layer of Hugging Face's, whose weights are kept
            self._found[module_cls] = replace(
                own, distributed=dist_module, forward_hook=forward_hook, return_hook=return_hook, state_hook=state_hook
            )
            return
        init_hook = fitted("init_hook", init_hook, module_cls, module_cls.__init__)
        _remember_arguments(module_cls)
        self._found[module_cls] = Registration(
            module_cls, dist_module, init_hook, forward_hook, return_hook, state_hook
        )

    def find(self, module: nn.Module) -> Registration | None:
        """The registration of a module's very class."""
        cls = type(module)
        return self._found.get(cls) or families.find(cls)


def _remember_arguments(module_cls: type[nn.Module]) -> None:
    construct = module_cls.__init__
    if ARGUMENTS in vars(construct):
        return

    @functools.wraps(construct)
    def remembering(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if type(self) is module_cls:
            vars(self)[ARGUMENTS] = (args, kwargs)

    vars(remembering)[ARGUMENTS] = True
    module_cls.__init__ = remembering  # type: ignore[method-assign]


def _linear_arguments(module: nn.Linear, config: object) -> Arguments:
    return (module.in_features, module.out_features), {"bias": module.bias is not None}


def _embedding_arguments(module: nn.Embedding, config: object) -> Arguments:
    return (module.num_embeddings, module.embedding_dim), {
        "padding_idx": module.padding_idx,
        "max_norm": module.max_norm,
        "norm_type": module.norm_type,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "sparse": module.sparse,
    }
