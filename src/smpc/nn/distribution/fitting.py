"""Fits hooks that were written for another release of a class: other names, other defaults, added or removed arguments.

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
from typing import Any

from torch import nn

from smpc.errors import UsageError
from smpc.nn.registration import Translation

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def fitted(name: str, hook: Translation | None, owner: type[nn.Module], translated: Translation) -> Translation | None:
    """The hook, taking the arguments of `translated` without self. UsageError if it has a parameter that nothing can be given to."""
    if hook is None:
        return None
    if not callable(hook):
        raise UsageError(f"tp_register: expected {name} to be callable, found {type(hook).__name__}")
    wanted = list(inspect.signature(translated).parameters.values())[1:]
    found = list(inspect.signature(hook).parameters.values())
    if [_key(parameter) for parameter in wanted] == [_key(parameter) for parameter in found]:
        return hook
    places = _places(wanted, found)
    without = [p for p in found if p.default is p.empty and p.kind in _NAMED and p.name not in places.values()]
    if without or any(p.kind is p.POSITIONAL_ONLY for p in found):
        method = f"{owner.__name__}.{translated.__name__}"
        raise UsageError(
            f"tp_register: expected the {name} of {owner.__name__} to take the arguments of {method} without self, "
            f"{_text(wanted)}, found {_text(found)}"
        )
    takes_more = any(p.kind is p.VAR_KEYWORD for p in found)
    return functools.partial(_call, _Fit(f"{name} of {owner.__name__}", hook, wanted, places, takes_more))


class _Fit:
    """A hook, and which of its parameters each argument goes to. `takes_more`: it has `**kwargs`."""

    def __init__(
        self, what: str, hook: Translation, wanted: list[inspect.Parameter], places: dict[str, str], takes_more: bool
    ) -> None:
        self.what, self.hook, self.places, self.takes_more = what, hook, places, takes_more
        self.signature = inspect.Signature(wanted)
        self.defaults = {parameter.name: parameter.default for parameter in wanted}
        self.is_told = False


def _call(fit: _Fit, *args: Any, **kwargs: Any) -> Any:
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


def _places(wanted: list[inspect.Parameter], found: list[inspect.Parameter]) -> dict[str, str]:
    """The hook's parameter for each argument that has one."""
    theirs, ours = [p.name for p in wanted if p.kind in _NAMED], [p.name for p in found if p.kind in _NAMED]
    places = {name: name for name in theirs if name in ours}
    pairs = zip(theirs, ours, strict=False)
    return places | {name: other for name, other in pairs if name not in places and other not in theirs}


def _key(parameter: inspect.Parameter) -> tuple[str, int, str]:
    return parameter.name, int(parameter.kind), repr(parameter.default)


def _text(parameters: list[inspect.Parameter]) -> str:
    return str(inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]))
