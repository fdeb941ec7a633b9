"""The functions, methods and classes of torch that a model's code names: a script may put others in their places (`F.relu = F.gelu`).

The recorder itself replaces some of them while it runs. So they are read when it has ended, and they are guarded by identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType

import torch
from torch import nn

from smpc.tracer.environment.frozen import Identical
from smpc.tracer.environment.guarded import Guard, GuardSource

_CALLED = (FunctionType, BuiltinFunctionType, type)


def guards_of_torch(layers: Iterable[nn.Module], modules: Iterable[ModuleType], names: Collection[str]) -> list[Guard]:
    """Guards of what `names` stand for in torch's `modules` of Python and in its tensors, and of what its classes of `layers` compute."""
    guards = []
    for place in (*_in_modules(modules, names), *_in_tensors(names), *_in_layers(layers)):
        value = place.read()
        guards.append(Guard(place, [Identical(value)], value))
    return guards


def _in_modules(modules: Iterable[ModuleType], names: Collection[str]) -> Iterator[GuardSource]:
    for module in modules:
        for name in sorted(names):
            if isinstance(vars(module).get(name), _CALLED):
                yield GuardSource(vars(module), name, f"{name!r} of {module.__name__}", is_answer=True)


def _in_tensors(names: Collection[str]) -> Iterator[GuardSource]:
    for name in sorted(names):
        for cls in (torch.Tensor, nn.Parameter):
            yield GuardSource(cls, name, f"{cls.__module__}.{cls.__qualname__}.{name}", is_answer=True)


def _in_layers(layers: Iterable[nn.Module]) -> Iterator[GuardSource]:
    classes = {base: None for layer in layers for base in type(layer).__mro__}
    for base in classes:
        if base.__module__.partition(".")[0] == "torch" and base is not nn.Module and "forward" in vars(base):
            yield GuardSource(base, "forward", f"{base.__qualname__}.forward", is_answer=True)
