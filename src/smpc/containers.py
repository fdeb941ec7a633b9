"""Lists, tuples and mappings whose elements are exchanged, and that stay what they are otherwise.

torch's pytree runs the constructor of a named tuple again, which may change what it is given. `smpc.tracer.structure` takes containers
apart to write down what they are made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only


def rebuilt(value: Any, children: Iterable[Any]) -> Any:
    """A list, tuple, set or mapping like `value` with other children, in their order; a dict for a mapping that cannot be written.

    No constructor of the value's class runs again, but for sets': it may have changed what it was given.
    """
    cls: Any = type(value)
    if isinstance(value, MutableMapping):
        new: Any = copy.copy(value)  # keeps what else it knows, a default factory for instance
        for key, child in zip(list(value), children, strict=True):
            new[key] = child
        return new
    if isinstance(value, Mapping):
        return dict(zip(value, children, strict=True))
    if isinstance(value, list):
        new = copy.copy(value)
        new[:] = children
        return new
    if isinstance(value, tuple) and cls.__module__ not in (
        "torch",
        "torch.return_types",
    ):  # torch.Size, torch.return_types.topk
        return tuple.__new__(cls, children)
    return cls(children)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in whose places `map_tensors` puts others, in its order. Nothing is copied."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(child)
    else:
        yield from (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `function` of each tensor in its place: in lists, tuples, mappings (`rebuilt`), and where torch's pytree finds one."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return rebuilt(value, [map_tensors(function, child) for child in value.values()])
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [map_tensors(function, child) for child in value])
    return tree_map_only(Tensor, function, value)
