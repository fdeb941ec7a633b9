"""Classes that parameters have between steps, so that what scripts do with them is noticed.

    between_steps(parameter, CountedParameter)      in place, from now on
    with plain_parameters(model): ...               what runs, records or updates the model: ordinary parameters
    after_steps(model, note, places)                `note()` at the end of each in which parameters there were exchanged for others

Recordings, torch.compile and optimizers see ordinary parameters, and steps take no longer. A class goes before its bases. Nothing
here has weak references to parameters, with which torch could not swap them.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_KIND = "_smpc_between_steps"  # of a parameter: its class then, and its id
_is_plain: ContextVar[bool] = ContextVar("smpc_parameters_are_plain", default=False)
# Parameters, with their classes in steps and between them, until others are noticed.
_known: weakref.WeakKeyDictionary[nn.Module, list[tuple[nn.Parameter, Any, Any]]] = weakref.WeakKeyDictionary()
_noting: weakref.WeakKeyDictionary[nn.Module, list[_Noting]] = weakref.WeakKeyDictionary()

PlaceOfParameter = tuple[weakref.ref[nn.Module], str]  # a module, and its own name for the parameter


class NoticedParameter(nn.Parameter):
    """The base of such classes. Copies, files, and what is made of one or by its class (`type(weight)(values)`) are ordinary parameters."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """An ordinary one."""
        return nn.Parameter(data, requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())


@functools.cache
def _make_ordinary() -> None:
    """`nn.Parameter(weight)` asks of what class `weight` is."""
    torchs = nn.Parameter.__new__

    @functools.wraps(torchs)
    def make(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, NoticedParameter):
            with torch._C.DisableTorchFunctionSubclass():
                data = data.detach()
        return torchs(cls, data, *args, **kwargs)

    nn.Parameter.__new__ = make  # type: ignore[method-assign]


def between_steps(parameter: nn.Parameter, kind: type[NoticedParameter]) -> None:
    """Have a parameter be of a class outside of `plain_parameters`. One that others hold, or that is in parts, stays what it is."""
    known = _kind_of(parameter) or NoticedParameter
    if known is kind or not _is_ordinary(parameter) or not issubclass(kind, known):
        return
    _make_ordinary()
    vars(parameter)[_KIND] = kind, id(parameter)
    _known.clear()
    if not _is_plain.get():
        parameter.__class__ = kind


def after_steps(model: nn.Module, note: Callable[[], None], places: Sequence[PlaceOfParameter]) -> None:
    """See above; now, too."""
    noting = _Noting(note, places)
    noting.look()
    _noting.setdefault(model, []).append(noting)


class _Noting:
    """What is noted in places after steps, and the parameters that were there at the last look, if all of them are noticed."""

    def __init__(self, note: Callable[[], None], places: Sequence[PlaceOfParameter]) -> None:
        self._note, self._places = note, places
        self._noticed: list[tuple[weakref.ref[nn.Module], str, nn.Parameter]] = []

    def look(self) -> None:
        """Note what is there now, unless the same parameters are there."""
        for place, name, parameter in self._noticed:
            module = place()
            if module is None or module._parameters.get(name) is not parameter:
                break
        else:
            if self._noticed:
                return
        with torch._C.DisableTorchFunction():  # modes that look at what a forward uses have nothing to see here
            self._note()
        found = ((place, name, place()) for place, name in self._places)
        now = [(place, name, module._parameters.get(name)) for place, name, module in found if module is not None]
        noticed = [(place, name, each) for place, name, each in now if each is not None and _kind_of(each) is not None]
        self._noticed = noticed if len(noticed) == len(self._places) else []


def notice_again(model: nn.Module) -> None:
    """Parameters have been exchanged for others between steps."""
    for module in model.modules():
        for noting in _noting.get(module, ()):
            noting.look()


@contextmanager
def plain_parameters(model: nn.Module) -> Iterator[None]:
    """In this context the model's parameters are ordinary ones. What is noticed in it begins after it."""
    if _is_plain.get():
        yield
        return
    token = _is_plain.set(True)
    for parameter, ordinary, _ in _noticed_in(model):
        if isinstance(parameter, NoticedParameter):
            parameter.__class__ = ordinary
    try:
        yield
    finally:
        for noting in _noting.get(model, ()):
            noting.look()
        _is_plain.reset(token)
        for parameter, ordinary, kind in _noticed_in(model):
            if type(parameter) is ordinary:
                parameter.__class__ = kind


def _noticed_in(model: nn.Module) -> list[tuple[nn.Parameter, Any, Any]]:
    if model not in _known:
        every = ((each, _ordinary_class(each), _kind_of(each)) for each in model.parameters())
        _known[model] = [found for found in every if found[2] is not None]
    return _known[model]


def are_plain() -> bool:
    """Whether this code runs in `plain_parameters`."""
    return _is_plain.get()


def are_noticed(model: nn.Module) -> bool:
    """Whether `plain_parameters` may change something."""
    return model in _noting


def _is_ordinary(parameter: nn.Parameter) -> bool:
    return type(parameter) is _ordinary_class(parameter) or isinstance(parameter, NoticedParameter)


def _kind_of(parameter: nn.Parameter) -> Any:
    """Its class between steps; None: it has none. Another may have been given its attributes."""
    kind, owner = vars(parameter).get(_KIND, (None, 0))
    return kind if owner == id(parameter) else None


def _ordinary_class(parameter: nn.Parameter) -> Any:
    return DTensor if isinstance(parameter, DTensor) else nn.Parameter
