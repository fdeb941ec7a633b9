"""Copies of Python values, to tell later whether a value is still the same.

    >>> frozen = freeze([1, {"scale": 0.5}])
    >>> frozen.holds([1, {"scale": 0.5}]), frozen.holds([1, {"scale": 0.7}])
    (True, False)

Plain values compare by type and value, containers by what they hold, numpy arrays and random generators by their content, tensors by
shape, dtype and layout (their values are read when a program runs), and everything else by identity. A container of a class of its own
(a list or dict with attributes) is compared by identity and by what it holds. Iterators, which change when they are
read, never hold.

While a model is recorded, fake tensors stand for parameters and buffers. A fake without an original was made by the recorded run;
`DerivedError` says so.
"""

from __future__ import annotations

import array
import ctypes
import functools
import mmap
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import is_
from types import BuiltinMethodType, MappingProxyType, ModuleType
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from smpc.tracer.effects.randomness import GENERATORS, comparable_state, generator_state, set_generator_state
from smpc.tracer.environment.weakly_held import weakly_held
from smpc.tracer.ir import TensorSpec

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SETS = (set, frozenset)
_CONTAINERS = (OrderedDict, dict, list, tuple, deque, set, frozenset)
_MAX_DEPTH = 20


class Missing:
    """The value of an empty place."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


class DerivedError(Exception):
    """The value holds a tensor that the recorded run has made."""


@dataclass(slots=True)
class Frozen(ABC):
    """A value as it was. `deep`: it may change without being replaced."""

    @abstractmethod
    def holds(self, value: Any) -> bool:
        """Whether the value is the same."""

    @property
    def deep(self) -> bool:
        """Whether the value may change without being replaced by another."""
        return False

    def __str__(self) -> str:
        return "?"


@dataclass(slots=True)
class Plain(Frozen):
    """A value of a plain type."""

    value: Any

    def holds(self, value: Any) -> bool:
        """The same type and value; NaN equals NaN, and 0.0 is not -0.0."""
        mine = self.value
        if value is mine:
            return True
        if type(value) is not type(mine):
            return False
        return repr(value) == repr(mine) if type(mine) in (float, complex) else bool(value == mine)

    def __str__(self) -> str:
        return f"{self.value!r:.80}"


@dataclass(slots=True)
class Identical(Frozen):
    """A very object."""

    value: Any

    def holds(self, value: Any) -> bool:
        """The same object; a bound method is made anew whenever it is read."""
        mine = self.value
        if value is mine:
            return True
        function = getattr(mine, "__func__", None)
        return function is not None and getattr(value, "__func__", None) is function and value.__self__ is mine.__self__

    def __str__(self) -> str:
        name = getattr(self.value, "__qualname__", None) or (repr(self.value) if self.value is MISSING else None)
        return str(name) if isinstance(name, str) else f"a {type(self.value).__qualname__}"


@dataclass(slots=True)
class Spec(Frozen):
    """A tensor of these shape, dtype, layout and device, with these attributes, if a script has given it some.

    `baked`: the very tensor, where its values are part of the trace.
    """

    spec: TensorSpec
    device: str
    attributes: Frozen | None = None
    baked: torch.Tensor | None = None

    def holds(self, value: Any) -> bool:
        """A tensor alike, whatever its values."""
        if self.baked is not None:
            return value is self.baked
        if not (
            isinstance(value, torch.Tensor) and TensorSpec.of(value) == self.spec and value.device.type == self.device
        ):
            return False
        found = users_attributes(value)
        return self.attributes.holds(found) if self.attributes is not None else not found

    @property
    def deep(self) -> bool:
        """Its attributes, or its replacement's, may change."""
        return self.attributes is not None and self.attributes.deep

    def __str__(self) -> str:
        return f"a tensor {self.spec}"


@dataclass(slots=True)
class Written(Frozen):
    """A tensor whose values are part of the trace: the same one, which nobody has written into."""

    value: torch.Tensor
    version: int

    def holds(self, value: Any) -> bool:
        """The same tensor, not written into."""
        return value is self.value and value._version == self.version

    @property
    def deep(self) -> bool:
        """It may be written into."""
        return True

    def __str__(self) -> str:
        return f"a tensor of shape {list(self.value.shape)}"


@dataclass(slots=True)
class AnyTensor(Frozen):
    """A parameter or buffer, which is looked after elsewhere."""

    def holds(self, value: Any) -> bool:
        """Any tensor."""
        return isinstance(value, torch.Tensor)

    def __str__(self) -> str:
        return "a parameter"


@dataclass(slots=True)
class Never(Frozen):
    """A value that reading changes, such as an iterator."""

    value: Any

    def holds(self, value: Any) -> bool:
        """Never: nobody can tell."""
        return False

    @property
    def deep(self) -> bool:
        """It changes without being replaced."""
        return True

    def __str__(self) -> str:
        return f"an iterator ({type(self.value).__qualname__})"


class Fading(Never):
    """A weak reference, or a container of such, to what goes when nobody holds it: whoever compared it would hold it."""

    def __str__(self) -> str:
        return f"a weak reference ({type(self.value).__qualname__})"


@dataclass(slots=True)
class ContentSnapshot(Frozen):
    """The result of `read(value)`, compared by ==: for arrays and random generators."""

    kind: type
    content: Any
    read: Callable[[Any], Any]

    def holds(self, value: Any) -> bool:
        """The same content."""
        return type(value) is self.kind and bool(self.read(value) == self.content)

    @property
    def deep(self) -> bool:
        """It may be written into."""
        return True

    def __str__(self) -> str:
        return f"a {self.kind.__qualname__}"


@dataclass(slots=True)
class Items(Frozen):
    """A list, tuple, deque or set."""

    kind: type
    items: tuple[Frozen, ...]
    plain: tuple[Any, ...] | None = field(
        init=False
    )  # the very items, where all are plain: found to be there faster than compared

    def __post_init__(self) -> None:
        self.plain = _all_plain(self.items)

    def holds(self, value: Any) -> bool:
        """The same items in the same order."""
        if type(value) is not self.kind:
            return False
        items: Any = value
        if len(items) != len(self.items):
            return False
        if self.plain is not None and all(map(is_, self.plain, items)):
            return True
        return all(map(_holds, self.items, items))

    @property
    def deep(self) -> bool:
        """A tuple of plain values cannot change."""
        return self.kind is not tuple or any(item.deep for item in self.items)

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.items[:4])) + (", ..." if len(self.items) > 4 else "")
        return f"{self.kind.__name__} of {len(self.items)}: {shown}" if shown else f"an empty {self.kind.__name__}"


@dataclass(slots=True)
class Members(Frozen):
    """A set of hashable values."""

    kind: type
    members: frozenset[Any]

    def holds(self, value: Any) -> bool:
        """The same members."""
        return type(value) is self.kind and value == self.members

    @property
    def deep(self) -> bool:
        """A frozenset cannot change."""
        return self.kind is not frozenset

    def __str__(self) -> str:
        return f"{self.kind.__name__} of {len(self.members)}"


@dataclass(slots=True)
class Entries(Frozen):
    """A dict."""

    kind: type
    entries: tuple[tuple[Any, Frozen], ...]
    keys: list[Any] = field(init=False)
    plain: tuple[Any, ...] | None = field(init=False)  # the very values, see `Items`

    def __post_init__(self) -> None:
        self.keys = [key for key, _ in self.entries]
        self.plain = _all_plain([item for _, item in self.entries])

    @property
    def is_shallow(self) -> bool:
        """Whether it is a plain dict of values that cannot change by themselves."""
        return self.kind is dict and not any(item.deep for _, item in self.entries)

    def holds(self, value: Any) -> bool:
        """The same keys in the same order, with the same values."""
        if type(value) is not self.kind:
            return False
        found: Any = value
        if len(found) != len(self.entries):
            return False
        if self.plain is not None and all(map(is_, self.plain, found.values())):
            return self.keys == [*found]
        for (mine, frozen), (key, item) in zip(self.entries, found.items(), strict=True):
            if not ((key is mine or key == mine) and frozen.holds(item)):
                return False
        return True

    @property
    def deep(self) -> bool:
        """It may be written into."""
        return True

    def __str__(self) -> str:
        shown = ", ".join(f"{key!r}: {item}" for key, item in self.entries[:4]) + (
            ", ..." if len(self.entries) > 4 else ""
        )
        return f"{{{shown}}}"


@dataclass(slots=True)
class Own(Frozen):
    """A list, tuple, set or dict of a class derived from these: a very object, with what it holds."""

    value: Any
    content: Frozen

    def holds(self, value: Any) -> bool:
        """The same object, which holds what it held."""
        return value is self.value and self.content.holds(_plain(value))

    @property
    def deep(self) -> bool:
        """It may be written into."""
        return True

    def __str__(self) -> str:
        return f"{type(self.value).__qualname__}: {self.content}"


@dataclass(slots=True)
class Seen(Frozen):
    """A very object of the standard library, with what it gives: the value of a context variable, the items of a weak container."""

    value: Any
    content: Frozen

    def holds(self, value: Any) -> bool:
        """The same object, which gives what it gave."""
        return value is self.value and self.content.holds(_seen(value))

    @property
    def deep(self) -> bool:
        """It may be written into."""
        return True

    def __str__(self) -> str:
        return f"a {type(self.value).__qualname__} with {self.content}"


@dataclass(slots=True)
class Contents:
    """The findings while values were frozen: `objects` with attributes of their own, and copies of mutable `containers`."""

    objects: dict[int, Any] = field(default_factory=dict)
    containers: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # id -> (container, shallow copy)
    generators: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # of random numbers: id -> (generator, state)
    outlives: Callable[[Any], bool] = lambda _: False  # whether what a weak reference refers to stays anyway
    fades: bool = False  # whether a weak reference to something else was found
    max_values: int = 200_000
    num_values: int = 0

    def restore(self) -> None:
        """Puts back what containers held, where that has changed, and the states of generators."""
        for generator, state in self.generators.values():
            set_generator_state(generator, state)
        for container, copied in self.containers.values():
            plain = _plain(container)
            if len(plain) == len(copied) and all(map(is_, _flat(plain), _flat(copied))):
                continue
            kind: Any = _base(container)  # its methods, not a derived class's
            kind.clear(container)
            if issubclass(kind, (list, deque)):
                kind.extend(container, copied)
            elif issubclass(kind, dict):
                for key, item in copied.items():
                    kind.__setitem__(container, key, item)  # an OrderedDict's own `update` would ask the derived class
            else:
                kind.update(container, copied)


def freeze_tensor(value: torch.Tensor) -> Spec:
    """A tensor whose values are read when a program runs. Raises DerivedError for a fake."""
    if isinstance(value, FakeTensor):
        raise DerivedError
    found = users_attributes(value)
    return Spec(TensorSpec.of(value), value.device.type, freeze(found, Identical) if found else None)


def is_users(name: str) -> bool:
    """Whether an attribute's name is neither one of Python's own nor one in which smpc notes what it knows of modules and tensors."""
    return not name.startswith(("__", "_smpc_"))


def users_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that a script has given to a tensor."""
    return {name: value for name, value in vars(tensor).items() if is_users(name)}


def freeze(
    value: Any,
    tensor: Callable[[torch.Tensor], Frozen] = freeze_tensor,
    contents: Contents | None = None,
    depth: int = 0,
) -> Frozen:
    """The value as it is now. `tensor` freezes tensors; `contents` collects what the value is made of."""
    contents = Contents() if contents is None else contents
    contents.num_values += 1
    if type(value) in _PLAIN:
        return Plain(value)
    if not all(map(contents.outlives, weakly_held(value))):
        contents.fades = True
        return Fading(value)
    if type(value) in weakref.ProxyTypes:
        return Identical(value)
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if depth > _MAX_DEPTH or contents.num_values > contents.max_values:
        return Identical(value)

    def inner(item: Any) -> Frozen:
        return freeze(item, tensor, contents, depth + 1)

    if type(value) in _SEQUENCES or (isinstance(value, tuple) and hasattr(value, "_fields")):
        if not isinstance(value, tuple):
            contents.containers.setdefault(id(value), (value, list(value)))
        return Items(type(value), tuple(inner(item) for item in value))
    if type(value) in _MAPPINGS:
        contents.containers.setdefault(id(value), (value, dict(value)))
        return Entries(type(value), tuple((key, inner(item)) for key, item in list(value.items())))
    if type(value) in _SETS:
        if isinstance(value, set):
            contents.containers.setdefault(id(value), (value, set(value)))
        return Members(type(value), frozenset(value))
    known = _freeze_known(value, contents, inner)
    if known is not None:
        return known
    if isinstance(value, Iterator):
        return Never(value)
    if value is not MISSING:
        contents.objects.setdefault(id(value), value)
    if _base(value) is not None:
        plain = _plain(value)
        if not isinstance(plain, (tuple, frozenset)):
            contents.containers.setdefault(id(value), (value, plain))
        if isinstance(plain, dict):
            return Own(value, Entries(type(plain), tuple((key, inner(item)) for key, item in plain.items())))
        if isinstance(plain, (set, frozenset)):
            return Own(value, Members(type(plain), frozenset(plain)))
        return Own(value, Items(type(plain), tuple(map(inner, plain))))
    return Identical(value)


def _freeze_known(value: Any, contents: Contents, inner: Callable[[Any], Frozen]) -> Frozen | None:
    """A value of a class of Python or numpy that tells what it holds; None for others."""
    if isinstance(value, GENERATORS):
        contents.generators.setdefault(id(value), (value, generator_state(value)))
        return ContentSnapshot(type(value), comparable_state(value), comparable_state)
    if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return Seen(value, inner(_seen(value)))
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return ContentSnapshot(type(value), _array(value), _array)
    if isinstance(value, _MEMORY):
        return ContentSnapshot(type(value), bytes(value), bytes)
    if isinstance(value, _SEEN) or _class_path(value) in _ASKED:
        return Seen(value, inner(_seen(value)))
    if isinstance(value, functools.partial):
        return _Partial(value, inner((value.func, value.args, value.keywords)))
    if type(value) is weakref.ref:
        return Reference(inner(value()))
    if isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, (ModuleType, type(None), type)):
        return Bound(value, inner(value.__self__))
    return None


@dataclass(slots=True)
class Bound(Frozen):
    """A method of a builtin type, such as `[].append`."""

    value: Any
    owner: Frozen

    def holds(self, value: Any) -> bool:
        """The same method of the same object, which holds what it held."""
        mine = self.value
        if type(value) is not type(mine) or value.__name__ != mine.__name__:
            return False
        return value.__self__ is mine.__self__ and self.owner.holds(value.__self__)

    @property
    def deep(self) -> bool:
        """The object that it belongs to may change."""
        return self.owner.deep

    def __str__(self) -> str:
        return f"{self.value.__name__} of {self.owner}"


@dataclass(slots=True)
class Reference(Frozen):
    """A weak reference."""

    target: Frozen

    def holds(self, value: Any) -> bool:
        """A reference to the same thing."""
        return type(value) is weakref.ref and self.target.holds(value())

    @property
    def deep(self) -> bool:
        """The object that it refers to may be freed."""
        return True

    def __str__(self) -> str:
        return f"a weak reference to {self.target}"


@dataclass(slots=True)
class _Partial(Frozen):
    """A functools.partial."""

    value: Any
    parts: Frozen

    def holds(self, value: Any) -> bool:
        """The same function with the same arguments."""
        return type(value) is functools.partial and self.parts.holds((value.func, value.args, value.keywords))

    @property
    def deep(self) -> bool:
        """Its keywords may be written into."""
        return True

    def __str__(self) -> str:
        return "a functools.partial"


def _array(value: Any) -> tuple[str, tuple[int, ...], Any]:
    return str(value.dtype), value.shape, value.tobytes()


_MEMORY = (
    bytearray, memoryview, array.array, mmap.mmap,
    ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union,
)  # fmt: skip
_WEAK = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary)
_SEEN = (ContextVar, MappingProxyType, weakref.WeakSet, *_WEAK)


_ASKED: dict[
    tuple[str, str], Callable[[Any], Any]
] = {  # state of objects of C, and between threads or processes; by module and name of the class
    ("threading", "Event"): lambda event: event.is_set(),
    ("threading", "Semaphore"): lambda semaphore: semaphore._value,
    ("threading", "BoundedSemaphore"): lambda semaphore: semaphore._value,
    ("multiprocessing.synchronize", "Event"): lambda event: event.is_set(),
    ("multiprocessing.synchronize", "Semaphore"): lambda semaphore: semaphore.get_value(),
    ("multiprocessing.sharedctypes", "Synchronized"): lambda value: value.value,
    ("multiprocessing.sharedctypes", "SynchronizedArray"): lambda array: array[:],
    ("multiprocessing.sharedctypes", "SynchronizedString"): lambda string: string.raw,
    ("multiprocessing.shared_memory", "SharedMemory"): lambda memory: bytes(memory.buf),
    ("multiprocessing.shared_memory", "ShareableList"): lambda shared: list(shared),
    ("_hashlib", "HASH"): lambda found: found.digest(),
    ("_hashlib", "HMAC"): lambda found: found.digest(),
    ("_blake2", "blake2b"): lambda found: found.digest(),
    ("_blake2", "blake2s"): lambda found: found.digest(),
}


def _class_path(value: Any) -> tuple[str, str]:
    return type(value).__module__, type(value).__name__


def _seen(value: Any) -> Any:
    """The values that an object of these classes shows."""
    if isinstance(value, ContextVar):
        try:
            return value.get()  # its default, too
        except LookupError:
            return MISSING
    if isinstance(value, MappingProxyType):
        return dict(value)
    if isinstance(value, numpy.ndarray):
        return value.shape, tuple(value.flat)
    if isinstance(value, _WEAK):
        return tuple(value.items())
    shared = _ASKED.get(_class_path(value))
    return tuple(value) if shared is None else shared(value)


def _all_plain(items: Sequence[Frozen]) -> tuple[Any, ...] | None:
    values = tuple(item.value for item in items if isinstance(item, Plain))
    return values if len(values) == len(items) else None


def _holds(frozen: Frozen, value: Any) -> bool:
    return frozen.holds(value)


def _base(value: Any) -> type | None:
    """The builtin container that a value is one of; None if it is none."""
    return next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)


def _plain(container: Any) -> Any:
    """A builtin container with what this one holds, whatever its class makes of looking into it."""
    kind: Any = _base(container)
    return kind(kind.items(container) if issubclass(kind, dict) else kind.__iter__(container))


def _flat(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for entry in container.items() for part in entry]
    return sorted(container, key=id) if isinstance(container, set) else list(container)
