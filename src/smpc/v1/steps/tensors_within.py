"""Tensors inside of what a script hands over, whatever class holds them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_CLOSED = (str, bytes, int, float, complex, type(None), type, FunctionType, ModuleType, nn.Module)


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Every tensor reachable from a value, once: through containers, torch's pytrees, and attributes of objects of any class.

    `forward` may return a class of the script's own, which pytree does not know.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, _CLOSED) or id(leaf) in seen:
                continue
            seen.add(id(leaf))
            if isinstance(leaf, Tensor):
                yield leaf
            else:
                waiting += _held_values(leaf)


def _held_values(value: Any) -> list[Any]:
    """The values that an object holds directly."""
    found: list[Any] = []
    if isinstance(value, Mapping):
        found += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        found += value
    found += getattr(value, "__dict__", {}).values()
    for slot in _slot_names(type(value)):
        if hasattr(value, slot):
            found.append(getattr(value, slot))
    return found


def _slot_names(cls: type) -> Iterable[str]:
    """The attributes in the slots of a class."""
    for each in cls.__mro__:
        slots = each.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            hidden = slot.startswith("__") and not slot.endswith("__")
            yield f"_{each.__name__.lstrip('_')}{slot}" if hidden else slot
