"""The objects that module attributes reference: which of them ranks in one process may share, and whether a script has changed
the others.

A value that references no tensor and no module is shared by all ranks, since a script changes it in the same way in every process. Other
values are copied for each rank; `Print` says when one has to be copied again.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

_ATOMS = (
    bool, int, float, complex, str, bytes, NoneType, type, FunctionType, BuiltinFunctionType, ModuleType, CodeType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_MAX_VALUES = 10_000  # of one attribute


def is_atom(value: Any) -> bool:
    """Whether a value is immutable, contents included."""
    return isinstance(value, _ATOMS)


def parts(value: Any) -> list[Any]:
    """The objects that a value references directly. For tensors only attributes set by a script; for modules none."""
    if isinstance(value, (*_ATOMS, nn.Module)):
        return []
    if isinstance(value, Tensor):
        return _attributes_of_value(value)
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    found: list[Any] = []
    if isinstance(value, dict):
        found += [*dict.keys(value), *dict.values(value)]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        found += value
    found += _attributes_of_value(value)
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                found.append(getattr(value, name))
    return found


def _attributes_of_value(value: Any) -> list[Any]:
    """The names and values of an object's own attributes."""
    own = getattr(value, "__dict__", {})
    return [*own.keys(), *own.values()]


def reached(values: Iterable[Any]) -> Iterator[Any]:
    """The values and everything that they reference, each once, up to a bound."""
    seen: dict[int, Any] = {}
    queue = deque(values)
    while queue and len(seen) < _MAX_VALUES:
        value = queue.popleft()
        if id(value) not in seen:
            seen[id(value)] = value
            yield value
            queue.extend(parts(value))


def paired(value: Any, copied: Any) -> Iterator[tuple[Any, Any]]:
    """Everything that a value references, paired with the counterparts in a copy of it, up to a bound. Members of sets are left out."""
    seen: dict[int, Any] = {}
    queue = deque([(value, copied)])
    while queue and len(seen) < _MAX_VALUES:
        theirs, ours = queue.popleft()
        if id(theirs) in seen or type(theirs) is not type(ours) or isinstance(theirs, (*_ATOMS, set, frozenset)):
            continue
        seen[id(theirs)] = theirs
        yield theirs, ours
        inside, copies = parts(theirs), parts(ours)
        if len(inside) == len(copies):
            queue.extend(zip(inside, copies, strict=True))


def shareable(values: Iterable[Any]) -> Iterator[Any]:
    """The objects reachable from the values that themselves reference no tensor and no module."""
    everything = list(reached(values))
    inside = {id(value): [id(part) for part in parts(value)] for value in everything}
    around: dict[int, list[int]] = {}
    for holder, held in inside.items():
        for part in held:
            around.setdefault(part, []).append(holder)
    queue = [id(value) for value in everything if isinstance(value, (Tensor, nn.Module))]
    queue += [holder for holder, held in inside.items() if any(part not in inside for part in held)]  # beyond the bound
    leading = set(queue)
    while queue:
        found = [holder for holder in around.get(queue.pop(), ()) if holder not in leading]
        leading.update(found)
        queue += found
    return (value for value in everything if id(value) not in leading and not is_atom(value))


class Print:
    """The objects that a value referenced, and the version of each tensor."""

    def __init__(self, value: Any) -> None:
        self._content = [(item, _writes_of_value(item)) for item in reached((value,))]

    def is_of(self, value: Any) -> bool:
        """Whether the value references the same objects and versions now."""
        now = [(item, _writes_of_value(item)) for item in reached((value,))]
        return len(now) == len(self._content) and all(
            a is b and before == after for (a, before), (b, after) in zip(now, self._content, strict=True)
        )


def _writes_of_value(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.data_ptr(), -1 if value.is_inference() else value._version
