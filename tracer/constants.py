"""Constants that a trace may hold: their JSON form, their Python source, and the references among them.

A constant is None, bool, int, float, complex, str, Ellipsis, a torch dtype, device, layout or memory format, an enum member,
a class or function with a qualified name, or a tuple, list, dict, slice or torch.Size of constants. Numpy scalars become Python's.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import keyword
import math
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy
import torch

T = TypeVar("T")

_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
_JSON_CLASSES: dict[str, type] = {}
_JSON_FIELDS: dict[type, tuple[str, ...]] = {}


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of the node called `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that a trace cannot hold; `text` describes it."""

    text: str


@dataclass(frozen=True, slots=True)
class TraceDevice:
    """The device that the model was traced on; where a stage runs, its own device takes this place."""


@dataclass(frozen=True, slots=True)
class SameInput:
    """The leaf of the model's inputs at this position among their leaves."""

    position: int


def is_constant(value: Any) -> bool:
    """Whether a leaf can be in a trace as it is."""
    if value is None or value is Ellipsis:
        return True
    if isinstance(
        value,
        (bool, int, float, complex, str, enum.Enum, torch.device, torch.Size, TraceDevice, *_TORCH_CONSTANTS),
    ):
        return True
    return isinstance(value, type) or (callable(value) and _is_importable(value))


def normalise(value: Any) -> Any:
    """Numpy scalars as Python scalars; everything else unchanged."""
    return value.item() if isinstance(value, numpy.generic) else value


def references(tree: Any) -> tuple[str, ...]:
    """Names of the `Ref`s in a tree of containers, each once, in order."""
    return tuple(dict.fromkeys(_names_in(tree)))


def _names_in(tree: Any) -> Iterator[str]:
    """The names of the nodes that arguments refer to."""
    if isinstance(tree, Ref):
        yield tree.name
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _names_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _names_in(item)
    elif isinstance(tree, slice):
        yield from _names_in((tree.start, tree.stop, tree.step))


def map_references(tree: Any, function: Callable[[str], Any]) -> Any:
    """The tree with every `Ref` replaced by `function(name)`."""
    if isinstance(tree, Ref):
        return function(tree.name)
    if type(tree) in (tuple, list):
        return type(tree)(map_references(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: map_references(item, function) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_references(item, function) for item in (tree.start, tree.stop, tree.step)))
    return tree


def to_source(value: Any, name_of: Callable[[str], str]) -> str:
    """Python source of a tree; `name_of` gives the expression for a referenced node. Needs `import torch` (and `inf`, `nan`)."""
    if isinstance(value, Ref):
        return name_of(value.name)
    if isinstance(value, TraceDevice):
        return "self._device"
    if value is Ellipsis:
        return "..."
    if isinstance(value, torch.Size):
        return f"torch.Size({list(value)})"
    if type(value) is tuple:
        inner = ", ".join(to_source(item, name_of) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return "[" + ", ".join(to_source(item, name_of) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {to_source(item, name_of)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({', '.join(to_source(x, name_of) for x in (value.start, value.stop, value.step))})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, enum.Enum):
        return _enum_source(value)
    if isinstance(value, (str, int, float, complex)):
        return _number_or_text(value)
    if isinstance(value, type) or callable(value):
        return qualified_source(value)
    return repr(value)


def _enum_source(value: enum.Enum) -> str:
    """A member by its name; a combination of flags has none, or one that is no name."""
    cls = qualified_source(type(value))
    return f"{cls}.{value.name}" if is_plain_name(value.name or "") else f"{cls}({to_source(value.value, str)})"


def _number_or_text(value: str | complex) -> str:
    """A literal of the plain class, whatever `repr` a class of the user's own has."""
    if isinstance(value, complex) and not (math.isfinite(value.real) and math.isfinite(value.imag)):
        return f"complex({to_source(value.real, str)}, {to_source(value.imag, str)})"
    return next(base.__repr__(value) for base in (bool, str, int, float, complex) if isinstance(value, base))


def is_plain_name(name: str) -> bool:
    """Whether `x.name` in a class reads the attribute of exactly that name.

    Python reads identifiers in their NFKC form, and those that begin with two underscores as `_Class__name`.
    """
    is_name = name.isidentifier() and not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return is_name and not (name.startswith("__") and not name.endswith("__"))


def qualified_source(value: Any) -> str:
    """An expression for an importable class or function; modules other than torch are loaded by `importlib`."""
    module, name = value.__module__, value.__qualname__
    if module == "builtins":
        return str(name)
    parts = [*module.split("."), *name.split(".")] if module.split(".")[0] == "torch" else name.split(".")
    source = parts.pop(0) if module.split(".")[0] == "torch" else f"importlib.import_module({module!r})"
    for part in parts:
        source = f"{source}.{part}" if is_plain_name(part) else f"getattr({source}, {part!r})"
    return source


def is_writable(value: Any) -> bool:
    """Whether `to_source` gives an expression for the value: not for a class whose name does not lead to it, as in a function."""
    if isinstance(value, (tuple, list)):
        return all(map(is_writable, value))
    if isinstance(value, dict):
        return all(map(is_writable, value.values()))
    if isinstance(value, enum.Enum):
        return _is_importable(type(value))
    return not isinstance(value, Opaque) and (not isinstance(value, type) or _is_importable(value))


def register(cls: type[T]) -> type[T]:
    """Class decorator: let instances of a frozen dataclass be encoded."""
    _JSON_CLASSES[cls.__name__] = cls
    _JSON_FIELDS[cls] = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    return cls


_PLAIN = frozenset((str, int, bool, type(None)))  # what JSON has, and most of a trace is


def encode(value: Any) -> Any:
    """A JSON value; anything that JSON lacks becomes {"$": kind, "v": ...}."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return {"$": "tuple", "v": [item if type(item) in _PLAIN else encode(item) for item in value]}
    names = _JSON_FIELDS.get(kind)
    if names is not None:
        fields = [getattr(value, name) for name in names]
        return {"$": kind.__name__, "v": [item if type(item) in _PLAIN else encode(item) for item in fields]}
    if isinstance(value, (bool, str)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, enum.Enum):
        return {"$": "enum", "v": [_name(type(value)), value.name]}
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$": "float", "v": str(value)}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, torch.Size):
        return {"$": "size", "v": list(value)}
    if isinstance(value, tuple):
        return {"$": "tuple", "v": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"$": "dict", "v": [[encode(key), encode(item)] for key, item in value.items()]}
    return _encode_special(value)


def _encode_special(value: Any) -> Any:
    if value is Ellipsis:
        return {"$": "ellipsis"}
    if isinstance(value, complex):
        return {"$": "complex", "v": [value.real, value.imag]}
    if isinstance(value, slice):
        return {"$": "slice", "v": [encode(x) for x in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"$": "device", "v": str(value)}
    if isinstance(value, _TORCH_CONSTANTS):
        return {"$": "torch", "v": str(value).removeprefix("torch.")}
    if isinstance(value, type) or callable(value):
        return {"$": "import", "v": _name(value)}
    raise TypeError(f"{type(value).__name__} {value!r} has no JSON form in a trace")


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind: str = value["$"]
    content: Any = value.get("v")
    if kind in _JSON_CLASSES:
        return _JSON_CLASSES[kind](*(decode(item) for item in content))
    decoders: dict[str, Callable[[Any], Any]] = {
        "tuple": lambda v: tuple(decode(item) for item in v),
        "dict": lambda v: {decode(key): decode(item) for key, item in v},
        "slice": lambda v: slice(*(decode(x) for x in v)),
        "enum": lambda v: resolve(v[0])[v[1]],
        "import": resolve,
        "float": float,
        "size": torch.Size,
        "complex": lambda v: complex(*v),
        "device": torch.device,
        "torch": lambda v: getattr(torch, v),
        "ellipsis": lambda v: Ellipsis,
    }
    return decoders[kind](content)


def resolve(name: str) -> Any:
    """The object that `module:qualified.name` names, in a module of torch or one that is imported: a name runs nothing."""
    module, _, path = name.partition(":")
    found: Any = loaded(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def loaded(module: str) -> ModuleType:
    """The module of that name. Raises ModuleNotFoundError for one that is neither torch's, smpc's nor imported already."""
    if module.split(".")[0] in ("torch", "smpc"):
        return importlib.import_module(module)
    found = sys.modules.get(module)
    if found is None:
        raise ModuleNotFoundError(f"{module} is not imported: import it before what names it is read")
    return found


def _name(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _is_importable(value: Any) -> bool:
    try:
        return resolve(_name(value)) is value
    except (AttributeError, ImportError, TypeError, ValueError):
        return False


register(Ref)
register(Opaque)
register(TraceDevice)
register(SameInput)
