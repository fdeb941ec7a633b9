"""How to distribute the instances of a module class, and how to get from one to the other.

Terms
    init_hook      arguments of the module's __init__ to (args, kwargs) of the distributed one's
    forward_hook   arguments of the module's forward to (args, kwargs) of the distributed one's
    return_hook    what the distributed module returns to what the module returns
    state_hook     the module's state dict to the whole values of the distributed module's parameters
    arguments      what a module was constructed with. Registering a class makes its instances remember them; for known classes they are
                   read from attributes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from smpc.errors import UsageError
from smpc.nn.parallel import DistributedModule
from smpc.nn.state_format import StateFormat

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Translation = Callable[..., Any]
Fill = Callable[[Tensor], object]  # in place
StateHook = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
ARGUMENTS = "_smpc_arguments"  # of a module: what it was constructed with
_FORMAT = "_smpc_format"  # of a distributed module: how Hugging Face writes its state


@dataclass(frozen=True, slots=True)
class Registration:
    """How to distribute the instances of a module class."""

    module: type[nn.Module]
    distributed: type[DistributedModule]
    init_hook: Translation | None = None
    forward_hook: Translation | None = None
    return_hook: Translation | None = None
    state_hook: StateHook | None = None
    read_arguments: Callable[[Any, Any], Arguments] | None = (
        None  # of a module and a configuration; None: the module remembers them
    )
    format: StateFormat | None = None  # how Hugging Face writes the module's state, instead of a state_hook
    fills: Callable[[Any, Any], Mapping[str, Fill]] | None = None  # how weights are drawn, by name, where not as always

    def arguments(self, module: nn.Module, config: object = None) -> Arguments | None:
        """Arguments of the distributed module; None if the module was made before its class was registered.

        `config`: the configuration of the model that the module is a part of, if there is one.
        """
        own = vars(module).get(ARGUMENTS) if self.read_arguments is None else self.read_arguments(module, config)
        if own is None:
            return None
        args, kwargs = own
        if self.init_hook is None:
            return tuple(args), dict(kwargs)
        return _hook_arguments(self.init_hook(*args, **kwargs), "init_hook", self.module)

    def values(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Whole values of the distributed module, from the module's state dict; None where these are not known."""
        if self.format is not None:
            return self.format.layer_to_smdistributed(state)
        return None if self.state_hook is None else self.state_hook(state)

    def attach(self, distributed: DistributedModule) -> None:
        """Makes a distributed module take and return what the original does."""
        forward, back, owner = self.forward_hook, self.return_hook, self.module
        if forward is not None:

            def translate(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
                return _hook_arguments(forward(*args, **kwargs), "forward_hook", owner)

            distributed.register_forward_pre_hook(translate, with_kwargs=True)
        if self.format is not None:
            vars(distributed)[_FORMAT] = self.format
        if back is not None:
            distributed.register_forward_hook(lambda module, args, output: back(output))


def formats_in(model: nn.Module) -> list[StateFormat]:
    """Hugging Face's state formats of the layers that a model's distributed modules replace, each once."""
    found: list[StateFormat] = []
    for module in model.modules():
        form = vars(module).get(_FORMAT)
        if form is not None and form not in found:
            found.append(form)
    return found


def _hook_arguments(found: Any, name: str, owner: type[nn.Module]) -> Arguments:
    """The arguments that a registration's hook has returned; UsageError for anything else."""
    is_pair = isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], Mapping)
    if not is_pair or isinstance(found[0], str | Mapping | Tensor):
        raise UsageError(
            f"the {name} of {owner.__name__} returned {type(found).__name__}, expected a tuple (positional arguments, keyword arguments)"
        )
    return tuple(found[0]), dict(found[1])
