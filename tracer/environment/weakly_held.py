"""What weak references refer to: it goes when nobody holds it any more."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any


def weakly_held(value: Any) -> Iterable[Any]:
    """What a weak reference or a container of such refers to now, classes and Python's modules aside; nothing for other values."""
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
