"""Which module classes have a distributed version, and how to get from one to the other.

Terms
    registration   module class -> distributed class, with hooks that translate
                       init_hook      arguments of the module's __init__ to (args, kwargs) of the distributed one's
                       forward_hook   arguments of the module's forward to (args, kwargs) of the distributed one's
                       return_hook    what the distributed module returns to what the module returns
                       state_hook     the module's state dict to the whole values of the distributed module's parameters
    arguments      what a module was constructed with. Registering a class makes its instances remember them; for torch's own classes they
                   are read from attributes

Hooks take the arguments of the method that they translate, without self. Hooks for other releases of a class are fitted (`fitted`); a hook
that cannot be fitted is refused when it is registered.

    registry = Registry()
    registry.register(MyLinear, DistributedLinear, init_hook=lambda width: ((width, width), {}))

Source: "Registering Tensor Parallelism Distributed Modules" in the public reference of SMP v1; `state_hook` is an addition.

`fitted` fits hooks that were written for another release of a class: other names, other defaults, added or removed arguments.

    forward(hidden_states, past_key_values=None, attention_mask=None, **kwargs)      what is called
    hook(hidden_states, layer_past=None, attention_mask=None)                        what was registered for it

An argument goes to the hook's parameter of its name, else to the one at its place whose name nothing else has. An argument without a
parameter is dropped if it is None or its default; if it comes from the call's `**kwargs`, it is dropped with a warning; otherwise the
call is refused.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import replace
from typing import Any

from torch import nn

from smpc.errors import UsageError
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


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def fitted(name: str, hook: Translation | None, owner: type[nn.Module], translated: Translation) -> Translation | None:
    """The hook, taking the arguments of `translated` without self. UsageError if it has a parameter that nothing can be given to."""
    if hook is None:
        return None
    if not callable(hook):
        raise UsageError(f"tp_register: expected {name} to be callable, found {type(hook).__name__}")
    wanted = list(inspect.signature(translated).parameters.values())[1:]
    found = list(inspect.signature(hook).parameters.values())
    if [_key_of_hook_parameter(parameter) for parameter in wanted] == [
        _key_of_hook_parameter(parameter) for parameter in found
    ]:
        return hook
    places = _places_of_hook_arguments(wanted, found)
    without = [p for p in found if p.default is p.empty and p.kind in _NAMED and p.name not in places.values()]
    if without or any(p.kind is p.POSITIONAL_ONLY for p in found):
        method = f"{owner.__name__}.{translated.__name__}"
        raise UsageError(
            f"tp_register: expected the {name} of {owner.__name__} to take the arguments of {method} without self, "
            f"{_hook_parameters_as_text(wanted)}, found {_hook_parameters_as_text(found)}"
        )
    takes_more = any(p.kind is p.VAR_KEYWORD for p in found)
    return functools.partial(_call_fitted, _Fit(f"{name} of {owner.__name__}", hook, wanted, places, takes_more))


class _Fit:
    """A hook, and which of its parameters each argument goes to. `takes_more`: it has `**kwargs`."""

    def __init__(
        self, what: str, hook: Translation, wanted: list[inspect.Parameter], places: dict[str, str], takes_more: bool
    ) -> None:
        self.what, self.hook, self.places, self.takes_more = what, hook, places, takes_more
        self.signature = inspect.Signature(wanted)
        self.defaults = {parameter.name: parameter.default for parameter in wanted}
        self.is_told = False


def _call_fitted(fit: _Fit, *args: Any, **kwargs: Any) -> Any:
    """Calls a hook with the arguments of another release, fitted."""
    given = dict(fit.signature.bind(*args, **kwargs).arguments)
    extra: dict[str, Any] = {}
    for parameter in fit.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = given.pop(parameter.name, {})
    passed = {fit.places[name]: value for name, value in given.items() if name in fit.places}
    rest = {name: value for name, value in given.items() if name not in fit.places}
    if fit.takes_more:
        return fit.hook(**passed, **rest, **extra)
    passed |= {fit.places[name]: value for name, value in extra.items() if name in fit.places}
    wrong = [name for name, value in rest.items() if value is not None and value is not fit.defaults[name]]
    if wrong:
        raise UsageError(
            f"the {fit.what} does not take {', '.join(wrong)}, which this release of the module is given; add it to the hook's parameters"
        )
    dropped = [name for name, value in extra.items() if name not in fit.places and value is not None]
    if dropped and not fit.is_told:
        fit.is_told = True
        warnings.warn(f"the {fit.what} does not take {', '.join(dropped)}, which has no effect then", stacklevel=6)
    return fit.hook(**passed)


def _places_of_hook_arguments(wanted: list[inspect.Parameter], found: list[inspect.Parameter]) -> dict[str, str]:
    """The hook's parameter for each argument that has one."""
    theirs, ours = [p.name for p in wanted if p.kind in _NAMED], [p.name for p in found if p.kind in _NAMED]
    places = {name: name for name in theirs if name in ours}
    pairs = zip(theirs, ours, strict=False)
    return places | {name: other for name, other in pairs if name not in places and other not in theirs}


def _key_of_hook_parameter(parameter: inspect.Parameter) -> tuple[str, int, str]:
    return parameter.name, int(parameter.kind), repr(parameter.default)


def _hook_parameters_as_text(parameters: list[inspect.Parameter]) -> str:
    return str(inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]))
