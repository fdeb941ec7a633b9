"""Referents of weak references: they are freed when nobody holds them any more."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

from torch import nn

from smpc.errors import TraceError


def weakly_held(value: Any) -> Iterable[Any]:
    """The present referents of a weak reference or a container of such, without classes and Python modules; empty for other values."""
    found: Iterable[Any] = ()
    if type(value) in weakref.ProxyTypes:  # first: a proxy says that it is what it refers to, and a dead one raises
        with suppress(ReferenceError):
            found = (value.__init__.__self__,)
    elif isinstance(value, weakref.ref):
        found = (weakref.ref.__call__(value),)
    elif isinstance(value, weakref.finalize):
        found = (value.peek() or (None,))[:1]
    elif isinstance(value, (weakref.WeakSet, weakref.WeakKeyDictionary)):
        found = list(value)
    elif isinstance(value, weakref.WeakValueDictionary):
        found = list(value.values())
    return [item for item in found if item is not None and not isinstance(item, (type, ModuleType))]


def check_proxies(model: nn.Module) -> None:
    """TraceError for an attribute that is a proxy of a freed object: reading it, even its class, raises ReferenceError."""
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in weakref.ProxyTypes and not _is_alive(value):
                where = f"module {fqn!r}" if fqn else "the model"
                raise TraceError(
                    f"cannot trace the model: attribute {name!r} of {where} is a weak proxy of an object that is gone; "
                    "what to do: set it to None"
                )


def _is_alive(proxy: Any) -> bool:
    try:
        return proxy.__class__ is not None
    except ReferenceError:
        return False
