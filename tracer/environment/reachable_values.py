"""The closures, defaults, class attributes and modules of Python behind values that a recording's code has read.

A function that ran depends on the variables of its closure, on its defaults and on its code. A class or a module of Python counts by the
names in it that the code uses; a module of the standard library, of numpy or torch only by names of numbers and strings.

`guards_of_torch`: the functions, methods and classes of torch that the code names. A script may put others in their places
(`F.relu = F.gelu`). The recorder itself replaces some of them while it runs. So they are read when it has ended, and they are guarded by
identity.
"""

from __future__ import annotations

import dis
import functools
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from smpc.tracer.environment.environment_guards import (
    BASES,
    CLASS,
    CODE,
    NAMES,
    EnvironmentGuard,
    GuardSource,
    is_special,
)
from smpc.tracer.environment.value_snapshots import Entries, Frozen, Identical, Items, freeze, users_attributes

_TRUSTED = frozenset({"torch", "smpc", "numpy", *sys.stdlib_module_names}) - {"__main__"}
_OPAQUE = frozenset(
    {"torch", "smpc", "logging", "threading", "weakref", "io", "_io", "multiprocessing", "concurrent", "asyncio"}
)

_CONSTANTS = (bool, int, float, complex, str)
_OF_PYTHON = (*_CONSTANTS, list, tuple, dict, set, FunctionType, BuiltinFunctionType, type, ModuleType)
_OF_FUNCTION = (*NAMES, "__doc__", "__annotations__", "__defaults__", "__kwdefaults__")
_EVER_CHANGING = {("sys", "modules"), ("sys", "path_importer_cache"), ("warnings", "filters")}

MUTABLE = (list, dict, set, deque)


@dataclass(slots=True)
class Called:
    """A code object that ran: its globals, the modules whose code called it, the variables of its closures as each call found them."""

    namespace: dict[str, Any]
    contexts: dict[str, None] = field(default_factory=dict)
    free: list[list[tuple[Any, Frozen | None]]] = field(default_factory=list)
    arguments: dict[int, tuple[Any, Frozen | None]] = field(
        default_factory=dict
    )  # mutable ones, as calls found them, by id

    def has_classes(self, values: Sequence[Any]) -> bool:
        """Whether these are the variables that the last call found, and all of them classes."""
        return all(
            value is found and issubclass(type(value), type)
            for value, (found, _) in zip(values, self.free[-1], strict=True)
        )

    def defaults(self, value: tuple[Any, ...] | dict[str, Any]) -> Frozen | None:
        """The defaults of the function as its calls found them; None if it was given none of them that can change."""
        items = list(value.values() if isinstance(value, dict) else value)
        if not any(id(item) in self.arguments for item in items):
            return None
        before = [self.arguments.get(id(item), (item, None))[1] or freeze(item) for item in items]
        return (
            Entries(dict, tuple(zip(value, before, strict=True)))
            if isinstance(value, dict)
            else Items(tuple, tuple(before))
        )


Read = Callable[..., EnvironmentGuard | None]


class Reached:
    """Finds what is behind values. `known`: guards that are there already, by (id of the holder, key); `read` makes others.

    `of_torch`: torch's modules of Python that were met, see `smpc.tracer.environment.reachable_values`.
    """

    def __init__(
        self, codes: Mapping[CodeType, Called], known: Mapping[tuple[int, Any], EnvironmentGuard], read: Read
    ) -> None:
        self._codes, self._known, self._read = codes, known, read
        self._queue: list[Any] = []
        self.of_torch: list[ModuleType] = []

    def guards(self, names: set[str] | None, values: list[Any]) -> Iterator[EnvironmentGuard]:
        """Guards of everything behind `values`; `names` are those that the code uses, None if it may use any."""
        used = names if names is not None else {name for code in self._codes for name in code.co_names}
        seen: dict[int, Any] = {}
        queue = self._queue = [*values]
        while queue:
            value = queue.pop()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            if isinstance(value, FunctionType):
                yield from self._of_function(value)
                for name in (name for name in _OF_FUNCTION if name in used and not is_trusted(str(value.__module__))):
                    place = GuardSource(value, name, f"{name} of {value.__qualname__}", is_answer=True)
                    yield from self._one(place, getattr(value, name))
            elif isinstance(value, ModuleType):
                if value.__name__.partition(".")[0] == "torch":
                    self.of_torch.append(value)
                    queue += [item for name in used if isinstance(item := vars(value).get(name), ModuleType)]
                own = used if not is_trusted(value.__name__) else _of_trusted_module(value, used)
                yield from self._of_names(vars(value), f"of {value.__name__}", own)
            elif isinstance(value, type):
                yield from self._of_class(value, used)
            else:
                queue += _parts_of_value(value)

    def _of_function(self, function: FunctionType) -> Iterator[EnvironmentGuard]:
        if "__wrapped__" in vars(function):
            self._queue.append(vars(function)["__wrapped__"])
        called = self._codes.get(function.__code__)
        if called is None:
            return
        names = function.__code__.co_freevars
        cells = function.__closure__ or ()
        places = [
            GuardSource(cell, position, f"{name!r} in the closure of {function.__qualname__}")
            for position, (name, cell) in enumerate(zip(names, cells, strict=True))
        ]
        before = self._before(called, places, names)
        if before is None:
            return  # made of the same code as one that was called
        yield from self._one(GuardSource(function, CODE, f"the code of {function.__qualname__}"), function.__code__)
        for place, (value, frozen) in zip(places, before, strict=True):
            for guard in self._one(place, value):
                guard.expected = guard.expected if frozen is None else [frozen]
                guard.readers.update(called.contexts)
                yield guard
        for name in ("__defaults__", "__kwdefaults__"):
            value = getattr(function, name)
            if value:
                place = GuardSource(function, name, f"{name} of {function.__qualname__}")
                for guard in self._one(place, value, called.defaults(value)):
                    guard.readers.update(called.contexts)
                    yield guard

    def _before(
        self, called: Called, places: Sequence[GuardSource], names: Sequence[str]
    ) -> list[tuple[Any, Frozen | None]] | None:
        """The variables of a function's closure as it found them when it was called; None if it was not."""
        now = [place.read() for place in places]
        for values in called.free:
            if all(value is current for (value, _), current in zip(values, now, strict=True)):
                return values
        if not names:
            return []
        rebound = any(name in stored_variables(code) for code in self._codes for name in names)
        return called.free[0] if rebound and called.free else None

    def _of_names(self, holder: dict[str, Any], where: str, used: set[str]) -> Iterator[EnvironmentGuard]:
        for name in sorted(used):
            if name in holder:
                yield from self._one(GuardSource(holder, name, f"{name!r} {where}"), holder[name])

    def _of_class(self, cls: type, used: set[str]) -> Iterator[EnvironmentGuard]:
        for base in _bases(cls):
            if issubclass(base, torch.autograd.Function):
                continue
            for name, value in list(vars(base).items()):
                if name not in NAMES and (name in used or (is_special(name) and isinstance(value, FunctionType))):
                    yield from self._one(GuardSource(base, name, f"{base.__qualname__}.{name}"), value)
            for name in (name for name in NAMES if name in used):
                yield from self._one(
                    GuardSource(base, name, f"{name} of {base.__qualname__}", is_answer=True), getattr(base, name)
                )

    def _one(self, place: GuardSource, value: Any, before: Frozen | None = None) -> Iterator[EnvironmentGuard]:
        """`before`: as the run found it, where it may have been filled since."""
        if (id(place.holder), place.key) in self._known:
            return
        guard = self._read(place, value, None, before=before)
        if guard is not None:
            self._queue.append(value)
            yield guard


def _of_trusted_module(module: ModuleType, used: set[str]) -> set[str]:
    """The names that count: a script may put functions and lists into Python's and numpy's modules, too; torch's the recorder replaces."""
    name = module.__name__.partition(".")[0]
    kinds = _CONSTANTS if name in ("torch", "smpc") else _OF_PYTHON
    found = {key: vars(module)[key] for key in used if key in vars(module) and (name, key) not in _EVER_CHANGING}
    return {key for key, value in found.items() if isinstance(value, kinds) and not _is_method(value)}


def _is_method(value: Any) -> bool:
    """Whether it is a method of an object that Python holds, such as `random.random`, whose state is looked after elsewhere."""
    return isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, (ModuleType, type(None)))


def _parts_of_value(value: Any) -> list[Any]:
    """The parts of a value."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, (dict, MappingProxyType)):
        return list(value.values())
    if isinstance(value, nn.Module):
        return []
    if isinstance(value, ContextVar):
        return [value.get(None)]
    attributes = _attributes_of(value) or {}
    found = [attributes["__wrapped__"]] if "__wrapped__" in attributes else []
    return [*found, type(value)] if is_looked_into(value) else found


def places_in(value: Any) -> Iterator[GuardSource]:
    """Attributes of an object or a function, and what is no function among the names of a class or of a module of Python."""
    functions = (type, ModuleType, FunctionType, property, staticmethod, classmethod)
    if isinstance(value, type):
        if not is_trusted_class(value):
            yield GuardSource(value, BASES, f"the base classes of {value.__qualname__}")
        for base in _bases(value):
            for name, item in list(vars(base).items()):
                if not (name.startswith("__") or isinstance(item, functions) or _is_descriptor_of_python(item)):
                    yield GuardSource(base, name, f"{base.__qualname__}.{name}")
    elif isinstance(value, ModuleType):
        for name, item in [] if is_trusted(value.__name__) else list(vars(value).items()):
            if not (name.startswith("__") or isinstance(item, functions)):
                yield GuardSource(vars(value), name, f"{name!r} of {value.__name__}")
    elif isinstance(value, FunctionType):
        for name in () if is_trusted(str(value.__module__)) else list(vars(value)):
            yield GuardSource(vars(value), name, f"attribute {name!r} of {value.__qualname__}")
    elif isinstance(value, torch.Tensor):
        for name in users_attributes(value):
            yield GuardSource(vars(value), name, f"attribute {name!r} of a tensor")
    elif isinstance(value, logging.Logger):
        for name in ("level", "disabled"):
            yield GuardSource(vars(value), name, f"{name} of logger {value.name}")
    elif is_looked_into(value):
        what = f"of a {type(value).__qualname__}"
        yield GuardSource(value, CLASS, f"the class {what}")
        attributes = _attributes_of(value)
        for name in list(attributes or ()):
            yield GuardSource(attributes, name, f"attribute {name!r} {what}")
        for name in (name for cls in type(value).__mro__ for name in slots_of(cls)):
            yield GuardSource(value, name, f"attribute {name!r} {what}")


def _bases(cls: type) -> list[type]:
    """The classes that give a class its attributes, its metaclass's included, without trusted ones."""
    metaclass: type = type(cls)
    return [base for base in (*cls.__mro__, *metaclass.__mro__) if not is_trusted_class(base)]


def _is_descriptor_of_python(value: Any) -> bool:
    """Whether a class gives something else in a value's place, and no code of the model decides what."""
    return is_trusted_class(type(value)) and hasattr(type(value), "__get__")


def tables_in(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The dicts with the attributes of an object, a function, a class or a module of Python, where others may appear."""
    if isinstance(value, type):
        for base in _bases(value):
            table = GuardSource(base, "", "").table
            if table is not None:
                yield table, f"of {base.__qualname__}"
    elif isinstance(value, ModuleType):
        if value.__name__.partition(".")[0] not in ("torch", "smpc"):
            yield vars(value), f"of {value.__name__}"
    elif isinstance(value, FunctionType):
        if not is_trusted(str(value.__module__)):
            yield vars(value), f"of {value.__qualname__}"
    elif isinstance(value, torch.Tensor):
        yield vars(value), "of a tensor"
    elif is_looked_into(value):
        attributes = _attributes_of(value)
        if type(attributes) is dict:
            yield attributes, f"of a {type(value).__qualname__}"


def has_unseen_code(value: Any) -> bool:
    """Whether code that nobody looks into, of a `UserDict`, of a function that `singledispatch` has made, may use any attribute."""
    if isinstance(value, FunctionType):
        return is_trusted(str(value.__globals__.get("__name__", ""))) and not is_trusted(str(value.__module__))
    bases = (base for base in type(value).__mro__ if is_trusted_class(base))
    return any(isinstance(item, FunctionType) for base in bases for item in vars(base).values())


def global_values(namespace: Mapping[str, Any]) -> list[str]:
    """The names of globals that a function may find in their dict, without functions, classes and modules."""
    code = (FunctionType, type, ModuleType)
    return [name for name, value in namespace.items() if not (name.startswith("__") or isinstance(value, code))]


_IMPORTING = frozenset({"import_module", "__import__", "modules"})


def imported_modules(code: CodeType, namespace: Mapping[str, Any]) -> list[str]:
    """Names of the modules that a function's import statements name, and that it may ask importlib or `sys.modules` for."""
    names = [*_imports_of_code(code, str(namespace.get("__package__") or ""))]
    if not _IMPORTING.isdisjoint(code.co_names):
        names += [item for item in code.co_consts if isinstance(item, str)]
    return [name for name in dict.fromkeys(names) if name and not is_trusted(name)]


@functools.lru_cache(maxsize=4096)
def _imports_of_code(code: CodeType, package: str) -> tuple[str, ...]:
    """The modules that code imports."""
    found: dict[str, None] = {}
    constants: list[Any] = [0, None]  # the last two: how far up, and the names that are wanted
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_CONST":
            constants = [constants[-1], step.argval]
        elif step.opname == "IMPORT_NAME":
            level, wanted = constants
            above = package.rsplit(".", level - 1)[0] if level > 1 else package
            name = ".".join(filter(None, (above, step.argval))) if level else step.argval
            found[name] = None
            found.update(dict.fromkeys(f"{name}.{item}" for item in wanted or ()))
            if not wanted:  # `import a.b` gives a
                found.update(dict.fromkeys(name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)))
    return tuple(found)


def stored_variables(code: CodeType) -> frozenset[str]:
    """Variables of functions around it that the code writes, and globals."""
    return _variables_of_code(code)[1]


def global_names(code: CodeType) -> tuple[str, ...]:
    """The globals that code reads or writes, and names of Python's own. `co_names` has attributes, too."""
    return _variables_of_code(code)[0]


_GLOBAL_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_GLOBAL_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_OUTER_STORES = frozenset({"STORE_DEREF", "DELETE_DEREF"})


@functools.lru_cache(maxsize=4096)
def _variables_of_code(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Globals that are read or written, and what is written of them and of functions around."""
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    used = dict.fromkeys(name for kind, name in steps if kind in _GLOBAL_READS or kind in _GLOBAL_STORES)
    return tuple(used), frozenset(name for kind, name in steps if kind in _GLOBAL_STORES or kind in _OUTER_STORES)


def is_trusted(module_name: str) -> bool:
    """Whether a module of Python is taken to change nothing by itself: torch, numpy, the standard library."""
    return module_name.partition(".")[0] in _TRUSTED


def is_trusted_class(cls: type) -> bool:
    """Whether a class belongs to such a module. Classes that `types.new_class` makes for others (`make_dataclass`) only claim to."""
    is_made = cls.__module__ == "types" and vars(types).get(cls.__name__) is not cls
    return is_trusted(str(cls.__module__)) and not is_made


def is_looked_into(value: Any) -> bool:
    """Whether the attributes of an object are looked at."""
    kinds = (nn.Module, ModuleType, type, FunctionType, MethodType, property, staticmethod, classmethod)
    if isinstance(value, kinds) or type(value).__module__.partition(".")[0] in _OPAQUE:
        return False
    return _attributes_of(value) is not None or any(slots_of(cls) for cls in type(value).__mro__)


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes; None if it has none. A `__getattr__` of its class may raise anything."""
    try:
        found = getattr(value, "__dict__", None)
    except Exception:
        return None
    return found if isinstance(found, dict) else None


def slots_of(cls: type) -> tuple[str, ...]:
    """Names of the slots that a class declares."""
    found = vars(cls).get("__slots__", ())
    return tuple(name for name in ((found,) if isinstance(found, str) else found) if not name.startswith("__"))


_CALLED = (FunctionType, BuiltinFunctionType, type)


def guards_of_torch(
    layers: Iterable[nn.Module], modules: Iterable[ModuleType], names: Collection[str]
) -> list[EnvironmentGuard]:
    """Guards of what `names` stand for in torch's `modules` of Python and in its tensors, and of what its classes of `layers` compute."""
    guards = []
    for place in (*_in_modules(modules, names), *_in_tensors(names), *_in_layers(layers)):
        value = place.read()
        guards.append(EnvironmentGuard(place, [Identical(value)], value))
    return guards


def _in_modules(modules: Iterable[ModuleType], names: Collection[str]) -> Iterator[GuardSource]:
    for module in modules:
        for name in sorted(names):
            if isinstance(vars(module).get(name), _CALLED):
                yield GuardSource(vars(module), name, f"{name!r} of {module.__name__}", is_answer=True)


def _in_tensors(names: Collection[str]) -> Iterator[GuardSource]:
    for name in sorted(names):
        for cls in (torch.Tensor, nn.Parameter):
            yield GuardSource(cls, name, f"{cls.__module__}.{cls.__qualname__}.{name}", is_answer=True)


def _in_layers(layers: Iterable[nn.Module]) -> Iterator[GuardSource]:
    classes = {base: None for layer in layers for base in type(layer).__mro__}
    for base in classes:
        if base.__module__.partition(".")[0] == "torch" and base is not nn.Module and "forward" in vars(base):
            yield GuardSource(base, "forward", f"{base.__qualname__}.forward", is_answer=True)
