"""Functions of Python, such as torch's, that do something else from now on, also for who has imported them by name."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


def change_function(function: Any, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Have a function of Python do what `make` makes of what it has done, under every name that it has been given."""
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__code__, function.__defaults__ = _changed.__code__, None
    function.__kwdefaults__, function.__wrapped__ = {"_smpc_made": make(original)}, original


def _changed(*args: Any, _smpc_made: Callable[..., Any], **kwargs: Any) -> Any:
    return _smpc_made(*args, **kwargs)
