"""Nested containers taken apart and put together again, and the paths by which a trace names what a model holds.

`flatten(value)` returns the leaves and a `Structure`; `structure.unflatten(leaves)` builds an equal value.
Containers are tuple, named tuple, list, dict, set, frozenset, slice, dataclass instances, dict subclasses such as Hugging
Face's `ModelOutput`, what torch functions return under field names (`torch.return_types.topk`), and any other object whose
attributes hold tensors (a key-value cache, say). Everything else is a leaf.
Unlike torch's pytree, sets and unregistered classes are opened, and a Structure is data: it serialises to JSON.

    >>> leaves, structure = flatten({"a": (1, 2), "b": [3]})
    >>> leaves
    [1, 2, 3]
    >>> structure.unflatten([x * 10 for x in leaves])
    {'a': (10, 20), 'b': [30]}
    >>> structure.paths()
    ("['a'][0]", "['a'][1]", "['b'][0]")

Paths: how a trace names the parameters, buffers, modules and tensors of a model.

    h.0.weight            parts with dots between them: a parameter, buffer, module or tensor attribute
    tables..'cos'         a tensor that a dict, list or tuple of the module holds: its key as a Python literal, after two dots

A part may hold any character but a dot: keys of ModuleDicts are data. No part is empty, so that nothing but an item has two dots: the
first item of a list `a` is `a..0`, and a module of the name `a[0]` is `a[0]`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smpc.errors import TraceError
from smpc.tracer.constants import is_plain_name, register, resolve

LEAF = "leaf"
_UNNAMED = "?"
_CLASS_NAMES = weakref.WeakKeyDictionary[type, str]()
_DEPTH = 8  # an encoder-decoder cache: caches, layers, a layer, its keys
_KEYWORD = re.compile(r"""\[1\]\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\](.*)""", re.DOTALL)


@register
@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a nested container.

    kind: "leaf", "tuple", "list", "dict", "set", "frozenset", "slice", "namedtuple", "return_type" (of torch), "mapping" (a
    dict subclass), "dataclass" or "object". `keys` are the dict keys or attribute names; `class_name` is "module:qualified.name".
    """

    kind: str = LEAF
    children: tuple[Structure, ...] = ()
    keys: tuple[Any, ...] = ()
    class_name: str = ""

    @property
    def num_leaves(self) -> int:
        """Number of leaves."""
        return 1 if self.kind == LEAF else sum(child.num_leaves for child in self.children)

    @property
    def class_text(self) -> str:
        """The class as errors name it, "module:qualified.name", also one that `unflatten` cannot find."""
        return self.class_name.removesuffix(_UNNAMED)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The container with these leaves, in order."""
        return self._build(iter(leaves))

    def paths(self, prefix: str = "") -> tuple[str, ...]:
        """How each leaf is reached from the container, as Python: `[0]`, `['mask']`, `.logits`."""
        if self.kind == LEAF:
            return (prefix,)
        return tuple(path for step, child in self._steps() for path in child.paths(prefix + step))

    def containers(self, prefix: str = "") -> Iterator[tuple[str, Structure]]:
        """This container and those in it, each with its path, as for leaves; none for a leaf."""
        if self.kind != LEAF:
            yield prefix, self
            for step, child in self._steps():
                yield from child.containers(prefix + step)

    def check_classes(self) -> None:
        """Raise TraceError for containers of a class that other ranks cannot find: `unflatten` would."""
        for _, container in self.containers():
            if container.class_name:
                _class_of(container.class_name)

    def _steps(self) -> Iterator[tuple[str, Structure]]:
        """The children, each with how it is reached."""
        by_key = self.kind in ("mapping", "dict")
        by_index = self.kind in ("namedtuple", "return_type", "tuple", "list")
        keys = self.keys or tuple(range(len(self.children)))
        for i, (key, child) in enumerate(zip(keys, self.children, strict=True)):
            yield f"[{key!r}]" if by_key else f"[{i}]" if by_index else f".{key}", child

    def _build(self, leaves: Iterator[Any]) -> Any:
        if self.kind == LEAF:
            return next(leaves)
        values = [child._build(leaves) for child in self.children]
        plain = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}
        if self.kind in plain:
            return plain[self.kind](values)
        if self.kind == "dict":
            return dict(zip(self.keys, values, strict=True))
        if self.kind == "slice":
            return slice(*values)
        cls = _class_of(self.class_name)
        if self.kind == "namedtuple":
            return tuple.__new__(cls, values)  # not by its own `__new__`, which has changed the values once
        if self.kind == "return_type":
            return cls(values)
        if self.kind == "mapping":
            return _build_mapping(cls, self.keys, values)
        instance = _bare_instance(cls)
        for key, value in zip(self.keys, values, strict=True):
            object.__setattr__(instance, key, value)
        return instance


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Leaves of a value, left to right, and the structure that holds them."""
    leaves: list[Any] = []
    return leaves, _flatten_value(value, leaves, ())


def containers_of(value: Any, open_objects: tuple[int, ...] = ()) -> Iterator[Any]:
    """The containers that `flatten` opens, outer ones first; one that is reached in several ways, as often."""
    kind, _, children = _open(value, open_objects)
    if kind != LEAF:
        yield value
        for child in children:
            yield from containers_of(child, (*open_objects, id(value)))


def _flatten_value(value: Any, leaves: list[Any], open_objects: tuple[int, ...]) -> Structure:
    """The structure of a value, whose leaves are appended."""
    kind, keys, children = _open(value, open_objects)
    if kind == LEAF:
        leaves.append(value)
        return Structure()
    flatten_child = functools.partial(_flatten_value, leaves=leaves, open_objects=(*open_objects, id(value)))
    named = kind in ("namedtuple", "return_type", "mapping", "dataclass", "object")
    return Structure(
        kind,
        tuple(map(flatten_child, children)),
        keys,
        _class_name(type(value)) if named else "",
    )


def _open(value: Any, open_objects: tuple[int, ...]) -> tuple[str, tuple[Any, ...], list[Any]]:
    """Kind, keys and children of one container; kind LEAF if it is none."""
    cls = type(value)
    if id(value) in open_objects or isinstance(value, (torch.Tensor, torch.nn.Module, torch.Size, type)):
        return LEAF, (), []
    if cls is dict:
        return "dict", tuple(value), list(value.values())
    if cls in (tuple, list):
        return cls.__name__, (), list(value)
    if cls in (set, frozenset):
        return cls.__name__, (), _ordered(value)
    if cls is slice:
        return "slice", (), [value.start, value.stop, value.step]
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return "namedtuple", cls._fields, list(value)
    if isinstance(value, tuple) and cls.__module__ == "torch.return_types":
        return "return_type", (), list(value)
    if isinstance(value, dict):
        return "mapping", tuple(value), list(value.values())
    if dataclasses.is_dataclass(value):
        fields = (f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
        names = tuple(dict.fromkeys((*fields, *getattr(value, "__dict__", ()))))  # `__post_init__` may set more
        return "dataclass", names, [getattr(value, name) for name in names]
    attributes = getattr(value, "__dict__", None)
    if attributes and _holds_tensor(attributes):
        return "object", tuple(attributes), list(attributes.values())
    return LEAF, (), []


def _ordered(values: Iterable[Any]) -> list[Any]:
    """Members of a set in an order that is the same on every rank: plain members sorted, tensors as they come."""
    members = list(values)
    try:
        return sorted(members)
    except (TypeError, RuntimeError):
        return members


def _holds_tensor(attributes: Any) -> bool:
    """Whether there is a tensor in an object's attributes, in what they hold, and so on, as far as caches of caches go."""
    level, seen = [attributes], {id(attributes)}
    for _ in range(_DEPTH):
        below = []
        for item in (item for each in level for item in _values_inside(each)):
            if isinstance(item, torch.Tensor):
                return True
            if id(item) not in seen and not isinstance(item, (str, int, float, torch.nn.Module, type)):
                seen.add(id(item))
                below.append(item)
        level = below
    return False


def _values_inside(value: Any) -> Iterable[Any]:
    """The values that a container has inside."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    return _values_inside(getattr(value, "__dict__", ()))


def _bare_instance(cls: Any) -> Any:
    """An instance without attributes; of classes that C has written (types.SimpleNamespace), as they make one."""
    try:
        return object.__new__(cls)
    except TypeError:
        return cls.__new__(cls)


def _build_mapping(cls: Any, keys: tuple[Any, ...], values: list[Any]) -> Any:
    """A dict subclass: by keyword if its constructor takes them (ModelOutput), else item by item."""
    if hasattr(cls, "__dataclass_fields__"):
        return cls(**dict(zip(keys, values, strict=True)))
    instance = cls.__new__(cls)
    for key, value in zip(keys, values, strict=True):  # some dict subclasses refuse `update`
        instance[key] = value
    return instance


def _class_name(cls: type) -> str:
    """ "module:qualified.name"; of a class that this does not name, one made by a function say, with `_UNNAMED` behind."""
    name = _CLASS_NAMES.get(cls)
    if name is None:
        name = f"{cls.__module__}:{cls.__qualname__}"
        try:
            is_found = resolve(name) is cls
        except (AttributeError, ImportError):
            is_found = False
        _CLASS_NAMES[cls] = name = name if is_found else name + _UNNAMED
    return name


def _class_of(name: str) -> Any:
    """The class of that name. Raises TraceError if no rank could find it."""
    try:
        return resolve(name)
    except (AttributeError, ImportError):
        raise TraceError(
            f"expected a class that every rank finds by its name, found {name.removesuffix(_UNNAMED)} in what passes between modules or "
            "ranks, and no such class at the top of its module; define it there, outside of functions and under its own name"
        ) from None


def input_path(path: str) -> str:
    """ "[1]['input_ids']" of (args, kwargs) as "input_ids"; "[0][2]" as "args[2]"."""
    if path.startswith("[0]"):
        return "args" + path[3:]
    match = _KEYWORD.match(path)
    assert match, path
    name = ast.literal_eval(match[1])
    return (name if is_plain_name(name) else f"kwargs[{match[1]}]") + match[2]


_ITEM = ".."
_LITERALS = (bool, bytes, float, int, str, type(None))


def item_path(owner: str, key: Any) -> str | None:
    """The path of `owner[key]`; None for a key that is not a literal, and for an owner without a path."""
    return f"{owner}{_ITEM}{key!r}" if _is_literal(key) and all(owner.split(".")) else None


def split_item(path: str) -> tuple[str, str]:
    """The dotted part of a path, and the literal of the key of an item, "" if it is none: `a..0` gives `a` and `0`."""
    dotted, _, key = path.partition(_ITEM)
    return dotted, key


def item_of(holder: Any, key: str) -> Any:
    """A holder's value under the key of that literal."""
    return holder[ast.literal_eval(key)]


def check_module_names(model: nn.Module) -> None:
    """Raise TraceError if a module has a name that a path cannot hold: torch takes any with `setattr`."""
    for prefix, module in model.named_modules():
        for name in () if isinstance(module, torch.jit.ScriptModule) else module._modules:
            if not name or "." in name:
                what = "is empty" if not name else "has a dot"
                where = (
                    f"{prefix!r} ({type(module).__name__})" if prefix else f"the model itself ({type(module).__name__})"
                )
                raise TraceError(
                    f"{where} has a module whose name {what}: {name!r}; names of modules are joined by dots, so give it another one"
                )


def is_index(name: str) -> bool:
    """Whether a name is the decimal form of a number, as `ModuleList` has them: "10", but not "01"."""
    return name.isascii() and name.isdigit() and (name == "0" or name[0] != "0")


def _is_literal(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_literal(part) for part in key)
    return type(key) in _LITERALS and key == key and key not in (float("inf"), float("-inf"))
