"""What scripts hand to models and step functions: containers, opened and rebuilt.

Terms
    container   list, tuple, named tuple, set, frozenset, or mutable mapping (dict and its kin, Hugging Face's ModelOutput and
                BatchEncoding): opened, and rebuilt of the same type when something inside has changed
    leaf        everything else
    path        how a leaf is reached from the argument, as Python: `batch['input_ids']`

An object with `smp_slice(num_mb, mb, axis)` is a leaf, whatever it is made of.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import FunctionType, ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_PLAIN = frozenset(
    {list, tuple, dict, set, frozenset, str, int, float, bool, type(None)}
)  # types that are quickly known


@runtime_checkable
class Sliceable(Protocol):
    """A user's object that knows how to be split."""

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        """Microbatch `mb` of `num_mb`, cut along `axis`."""


def map_leaves(value: Any, function: Callable[[Any, str], Any], path: str) -> Any:
    """The value with `function(leaf, path)` in place of every leaf; the value itself if no leaf has changed."""
    steps, children = _open(value)
    if steps is None:
        return function(value, path)
    new = [map_leaves(child, function, path + step) for step, child in zip(steps, children, strict=True)]
    if all(a is b for a, b in zip(new, children, strict=True)):
        return value
    return _rebuild(value, new)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The value with `function(tensor)` in place of every tensor in its containers."""
    return map_leaves(value, lambda leaf, _: function(leaf) if isinstance(leaf, Tensor) else leaf, "")


def slices_itself(value: Any) -> bool:
    """Whether an object knows how to be split."""
    if type(value) in _PLAIN or isinstance(value, type):
        return False
    # A DistributedModel would look for it in the module in it.
    return isinstance(value, Sliceable) if not isinstance(value, torch.nn.Module) else hasattr(type(value), "smp_slice")


def _open(value: Any) -> tuple[list[str] | None, list[Any]]:
    """The path steps and children of a container; (None, []) for a leaf."""
    if isinstance(value, (Tensor, torch.Size, torch.nn.Module, str)) or slices_itself(value):
        return None, []
    if isinstance(value, (list, tuple, set, frozenset)):
        children = list(value)
        return [f"[{i}]" for i in range(len(children))], children
    if isinstance(value, MutableMapping):
        return [f"[{key!r}]" for key in value], list(value.values())
    return None, []


def _rebuild(value: Any, children: list[Any]) -> Any:
    if isinstance(value, MutableMapping):
        new = copy.copy(value)  # keeps the class and what else it knows, a default factory for instance
        for key, child in zip(value, children, strict=True):
            new[key] = child
        return new
    if isinstance(value, tuple) and type(value) is not tuple:
        return type(value)(*children)
    cls: Any = type(value)
    return cls(children)


_CLOSED = (str, bytes, int, float, complex, type(None), type, FunctionType, ModuleType, torch.nn.Module)


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Every tensor that a value leads to, once: through containers, torch's pytrees, and attributes of objects of any class.

    What `forward` returns may be a class of the script's own, of which pytree knows nothing.
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
                waiting += _inside(leaf)


def _inside(value: Any) -> list[Any]:
    """What an object holds directly."""
    found: list[Any] = []
    if isinstance(value, Mapping):
        found += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        found += value
    found += getattr(value, "__dict__", {}).values()
    for slot in _slots(type(value)):
        if hasattr(value, slot):
            found.append(getattr(value, slot))
    return found


def _slots(cls: type) -> Iterable[str]:
    for each in cls.__mro__:
        slots = each.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            hidden = slot.startswith("__") and not slot.endswith("__")
            yield f"_{each.__name__.lstrip('_')}{slot}" if hidden else slot
