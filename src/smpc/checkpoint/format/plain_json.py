"""Nested plain values with tensors in them, as JSON beside named tensors; no pickle.

    flatten({"step": 3, "ema": tensor}, "user")
        -> {"step": 3, "ema": {"$": "tensor", "name": "/ema"}}, {"/ema": tensor}
    rebuild(values, read)
        -> the same again; `read(name)` brings a tensor

Supported: None, bool, int, float (NaN and infinities too), str, bytes, list, tuple, set, dict with any of these as keys, defaultdict of a
plain type, collections.Counter (MultiStepLR has one), torch.Tensor, torch.dtype, torch.device, numpy.ndarray (comes back as a tensor),
numpy's numbers. DTensors are refused, as they would have to be gathered. Anything else raises CheckpointError with its path; or, with
`objects`, its attributes are saved, and it comes back as a SavedObject.

A SavedObject is an object of any class among the user's content. Saving and restoring it run none of its code.

    user_content={"args": argparse.Namespace(lr=0.1), "config": GPT2Config(...)}
    resume_from_checkpoint(...)["args"]      SavedObject of argparse.Namespace: {"lr": 0.1}

The name of the class and the attributes of the instance are saved, each by the same rules; for an object without attributes (a function,
a lock, an enum's member) its `repr`. It comes back as a mapping of the attributes, which can also be read as attributes: the class is not
imported, so a file cannot choose what is imported.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smpc.errors import CheckpointError

_LONGEST = 500
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class SavedObject(dict[str, Any]):
    """The attributes of an object that was saved. `class_name` is its class; `text` its repr if it has no attributes."""

    def __init__(self, class_name: str, attributes: dict[str, Any], text: str = "") -> None:
        super().__init__(attributes)
        vars(self).update(class_name=class_name, text=text)

    class_name: str
    text: str

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the saved {self.class_name} has no attribute {name!r}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"SavedObject({self.class_name}, {self.text or dict(self)!r})"


def name_of(value: Any) -> str:
    """The class of an object."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def attributes_of(value: Any) -> dict[str, Any]:
    """The saved attributes of an object, without those that its class computes."""
    found: dict[str, Any] = {}
    for cls in reversed(type(value).__mro__):
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found | dict(getattr(value, "__dict__", {}))


def text_of(value: Any) -> str:
    """The repr of an object without its address, shortened; what its class is if it has none."""
    try:
        return _ADDRESS.sub("", repr(value))[:_LONGEST]
    except Exception as error:  # whatever a user's __repr__ raises
        return f"<{name_of(value)}, whose repr raises {type(error).__name__}>"


_TAG = "$"
_FACTORIES = MappingProxyType({kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)})
_KINDS = (
    np.bool_,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.float16,
    np.float32,
    np.float64,
)
_NUMBERS: MappingProxyType[str, Any] = MappingProxyType({np.dtype(kind).name: kind for kind in _KINDS})


def flatten(tree: Any, what: str, *, objects: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """JSON values, and the tensors that they refer to. `what` names the tree in errors, of which all are listed."""
    tensors: dict[str, Tensor] = {}
    wrong: list[str] = []
    try:
        values = _JsonFlattening(tensors, wrong, objects).of(tree, "")
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply, or contains itself") from None
    if wrong:
        raise CheckpointError(
            "\n".join(
                f"{what}{place}; saved are plain values, lists, tuples, dicts and tensors. Convert it, or ask for pickle by name"
                for place in wrong
            )
        )
    return values, tensors


def rebuild(values: Any, read: Callable[[str], Any]) -> Any:
    """The tree of JSON values that `flatten` made."""
    try:
        return _rebuilt_value(values, read)
    except RecursionError:
        raise CheckpointError("saved values are nested too deeply") from None


def _rebuilt_value(values: Any, read: Callable[[str], Any]) -> Any:
    """The Python value that a JSON value stands for."""
    if isinstance(values, list):
        return [_rebuilt_value(item, read) for item in values]
    if not isinstance(values, dict):
        return values
    tag = values.get(_TAG)
    if tag is None:
        return {key: _rebuilt_value(item, read) for key, item in values.items()}
    try:
        return _rebuilt_tagged(str(tag), values, read)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"a saved value of the type {str(tag)[:80]!r} is damaged, or a later release wrote it: {error}"
        ) from error


def _rebuilt_tagged(tag: str, values: dict[str, Any], read: Callable[[str], Any]) -> Any:
    """The Python value of a JSON object with a tag."""
    if tag == "tensor":
        return read(values["name"])
    if tag == "tuple":
        return tuple(_rebuilt_value(item, read) for item in values["items"])
    if tag == "dict":
        return {_rebuilt_value(key, read): _rebuilt_value(item, read) for key, item in values["items"]}
    if tag == "set":
        items = [_rebuilt_value(item, read) for item in values["items"]]
        return frozenset(items) if values["frozen"] else set(items)
    if tag == "defaultdict":
        factory = None if values["factory"] is None else _FACTORIES[values["factory"]]
        return defaultdict(
            factory, {_rebuilt_value(key, read): _rebuilt_value(item, read) for key, item in values["items"]}
        )
    if tag == "number":
        return _NUMBERS[values["dtype"]](_rebuilt_value(values["value"], read))
    if tag == "dtype":
        return _dtype_named(values["name"])
    if tag == "device":
        return torch.device(values["name"])
    if tag == "object":
        attributes = {str(key): _rebuilt_value(item, read) for key, item in values["attributes"]}
        return SavedObject(str(values["class"]), attributes, str(values["text"]))
    if tag == "bytes":
        return bytes.fromhex(values["hex"])
    if tag == "float":
        return float(values["value"])
    if tag == "counter":
        return Counter({_rebuilt_value(key, read): _rebuilt_value(item, read) for key, item in values["items"]})
    raise ValueError("unknown type")


def _dtype_named(name: str) -> torch.dtype:
    """torch's dtype of that name; ValueError if there is none."""
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {name[:80]!r}")
    return found


class _JsonFlattening:
    """One run of `flatten`. `wrong` gets what cannot be saved; `objects`: whether instances of other classes can."""

    def __init__(self, tensors: dict[str, Tensor], wrong: list[str], objects: bool) -> None:
        self._tensors, self._wrong, self._objects = tensors, wrong, objects
        self._around: dict[int, None] = {}  # objects that are being saved

    def of(self, tree: Any, place: str) -> Any:
        """The JSON value at a position of the tree."""
        if tree is None or type(tree) in (bool, int, str):
            return tree
        if (
            isinstance(tree, int) and tree.__reduce_ex__(2)[0] is int
        ):  # of a class that is pickled as an ordinary number
            return int.__index__(tree)
        if isinstance(tree, (np.bool_, np.integer, np.floating)):
            value = tree.item()
            return {_TAG: "number", "dtype": tree.dtype.name, "value": self.of(value, place)}
        if isinstance(tree, float):
            return float(tree) if math.isfinite(tree) else {_TAG: "float", "value": repr(float(tree))}
        if isinstance(tree, bytes):
            return {_TAG: "bytes", "hex": tree.hex()}
        if isinstance(tree, (torch.dtype, torch.device)):
            kind = "dtype" if isinstance(tree, torch.dtype) else "device"
            return {_TAG: kind, "name": str(tree).removeprefix("torch.")}
        if isinstance(tree, np.ndarray) and tree.dtype.kind in "biuf":
            tree = torch.from_numpy(np.array(tree))
        if isinstance(tree, Tensor) and not isinstance(tree, DTensor):
            self._tensors[place or "/"] = tree.detach()
            return {_TAG: "tensor", "name": place or "/"}
        if isinstance(tree, dict):
            return self._mapping(tree, place)
        if type(tree) in (list, tuple, torch.Size, set, frozenset):
            return self._items(tree, place)
        return self._object(tree, place)

    def _items(self, tree: Any, place: str) -> Any:
        is_set = isinstance(tree, (set, frozenset))
        ordered = sorted(tree, key=repr) if is_set else tree  # the same bytes in every run
        items = [self.of(item, f"{place}/{index}") for index, item in enumerate(ordered)]
        if is_set:
            return {_TAG: "set", "items": items, "frozen": isinstance(tree, frozenset)}
        return items if type(tree) is list else {_TAG: "tuple", "items": items}

    def _mapping(self, tree: dict[Any, Any], place: str) -> Any:
        pairs = [
            (self.of(key, f"{place}/key {i}"), self.of(item, f"{place}/{key}"))
            for i, (key, item) in enumerate(tree.items())
        ]
        items = [list(pair) for pair in pairs]
        if isinstance(tree, Counter):
            return {_TAG: "counter", "items": items}
        if isinstance(tree, defaultdict):
            factory = getattr(tree.default_factory, "__name__", None)
            if tree.default_factory is None or _FACTORIES.get(factory or "") is tree.default_factory:
                return {_TAG: "defaultdict", "factory": factory, "items": items}
        if all(type(key) is str for key, _ in pairs) and _TAG not in tree:
            return dict(pairs)
        return {_TAG: "dict", "items": items}

    def _object(self, tree: Any, place: str) -> Any:
        if not self._objects or isinstance(tree, DTensor):
            self._wrong.append(f"{place or ' itself'} is a {name_of(tree)}")
            return None
        pairs: list[Any] = []
        if id(tree) not in self._around and not isinstance(tree, type):
            self._around[id(tree)] = None
            pairs = [[str(name), self.of(value, f"{place}/{name}")] for name, value in attributes_of(tree).items()]
            del self._around[id(tree)]
        return {_TAG: "object", "class": name_of(tree), "attributes": pairs, "text": "" if pairs else text_of(tree)}
