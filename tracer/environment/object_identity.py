"""What of the environment depends on the identity of objects: aliased tensors, and a recording's environment on another copy.

Buffers and tensor attributes may be one and the same tensor. A trace reads it under one of its names.

    self.register_buffer("frequencies", table)
    self.original = self.frequencies                # the trace reads "frequencies" for both

After `self.original = other` it would go on reading the first. So which of these are the same is guarded. Two that become the same are
detected as well: a write into one of them would be seen in the other. Parameters are looked after elsewhere.

`moved` is the environment of a recording for other objects than those that were recorded, or for the same ones after a change of our own.

    copied = copy.deepcopy(model)                                # what is recorded
    trace, environment = ...
    environment = moved(environment, trace, modules, original)   # what is looked at from now on is the model

Everything is as it was when it was recorded: but a value that violates a guard is in place of the one that was read, such as a module in
place of its copy.

Makes fakes look like the tensors that they stand for: the same object identity, and the same class, for the model's code.

`Identity`: which object a tensor is. A fake is another object than the parameter or buffer that it stands for.

    seen = {model.head.weight: 2}       held outside of modules, where no fake takes its place
    seen.get(self.weight, 1)            finds nothing while the model is recorded

Code of the model that looks a fake up, or compares what it is (`is`) while such tensors are within its reach, has its module called
whole, and so has code that gives parameters attributes. `id` is among what `smpc.tracer.environment.outside_reads` notes.

`TensorClasses`: which class it is of. `type(x) is torch.Tensor` says of a fake what it says of a tensor. Python's `type` is another
object in the globals of the code that runs, for the time of the recording. Code of torch and of Python's standard library finds the
fakes' own class.
"""

from __future__ import annotations

import builtins
import ctypes
import dis
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from smpc.tracer.environment.environment_guards import (
    Difference,
    Environment,
    EnvironmentGuard,
    GuardSource,
    Names,
    Table,
    TableLike,
)
from smpc.tracer.environment.memory_words import DictVersions
from smpc.tracer.environment.reachable_values import Called, is_trusted
from smpc.tracer.environment.state_changes import common_module
from smpc.tracer.environment.value_snapshots import MISSING, freeze
from smpc.tracer.ir import NodeKind, Trace
from smpc.tracer.recording.untraceable import UntraceableError
from smpc.tracer.state.fakes import FakeState
from smpc.tracer.structure import item_path

_TABLES = ("_parameters", "_buffers", "_modules")


class _Place:
    """A key of a module's dict, or an item of an existing container. `path`: as traces name it; `owner`: id of the module's dict."""

    def __init__(self, module: nn.Module, table: dict[str, Any], name: str, item: Any, fqn: str, path: str) -> None:
        self.table, self.name, self.item, self.fqn, self.path = table, name, item, fqn, path
        self.owner = id(vars(module))

    def read(self) -> Any:
        """The present value."""
        value = self.table.get(self.name, MISSING)
        if self.item is MISSING:
            return value
        try:
            return value[self.item]
        except (LookupError, TypeError):
            return MISSING


class Aliases:
    """Which buffers and tensor attributes of a model are the same tensor, of those that a recording has read.

    `modules`: the model's, by name. `paths`: tensors that its trace reads; `guards`: on values that its Python has read.
    """

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], paths: frozenset[str], guards: Sequence[EnvironmentGuard]
    ) -> None:
        found = list(_places(modules))
        read = {(id(guard.place.holder), guard.place.key) for guard in guards}
        tensors = {id(tensor) for place, tensor in found if place.path in paths or (place.owner, place.name) in read}
        self._places = [place for place, tensor in found if id(tensor) in tensors]
        self._expected = self._content()
        first = self._expected
        shared = {number for number in first if first.count(number) > 1}
        containers = [place.table[place.name] for place in self._places if place.item is not MISSING]
        self.holders = [place.table for place in self._places] + [item for item in containers if type(item) is dict]
        self.is_deep = any(
            number in shared and place.item is not MISSING and type(place.table[place.name]) is not dict
            for place, number in zip(self._places, first, strict=True)
        )

    def holds(self) -> bool:
        """Whether the same ones are the same."""
        return self._content() == self._expected

    def difference(self) -> Difference | None:
        """The first that is the same as another one than before."""
        now = self._content()
        for place, found, expected in zip(self._places, now, self._expected, strict=True):
            if found != expected:
                return Difference(
                    f"tensor {place.path!r}", self._text(place, expected), self._text(place, found), place.fqn
                )
        return None

    def _content(self) -> list[int]:
        """For every place, the first place that holds the same tensor."""
        firsts: dict[int, int] = {}
        values = [place.read() for place in self._places]
        return [
            firsts.setdefault(id(value), number) if isinstance(value, torch.Tensor) else number
            for number, value in enumerate(values)
        ]

    def _text(self, place: _Place, number: int) -> str:
        first = self._places[number]
        return "a tensor of its own" if first is place else f"the same tensor as {first.path!r}"


def read_tensors(trace: Trace) -> frozenset[str]:
    """The names of the buffers and tensor attributes that a trace reads."""
    read = {node.target for node in trace.nodes if node.kind is NodeKind.GET_ATTR}
    return frozenset(read.difference(name for spec in trace.state if spec.is_parameter for name in spec.names))


def _places(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[_Place, torch.Tensor]]:
    """The places of a model's buffers and tensor attributes, those in lists, tuples and dicts among them."""
    for fqn, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its tables are C++
        for table in (module._buffers, vars(module)):
            for name, value in table.items():
                path = f"{fqn}.{name}" if fqn else str(name)
                for item, tensor in _held_tensors(name, value):
                    inner = path if item is MISSING else item_path(path, item)
                    if inner is not None and not isinstance(tensor, nn.Parameter):
                        yield _Place(module, table, name, item, fqn, inner), tensor


def _held_tensors(name: str, value: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """The tensors in an attribute, with their keys if it is a container."""
    if isinstance(value, torch.Tensor):
        yield MISSING, value
    elif name not in _TABLES and isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((key, item) for key, item in items if isinstance(item, torch.Tensor))


Original = Callable[[Any], Any]


def moved(
    environment: Environment,
    trace: Trace,
    modules: Iterable[tuple[str, nn.Module]],
    original: Original = lambda value: value,
    versions: DictVersions | None = None,
) -> Environment:
    """Looks at `original(holder)` wherever the environment looks at a holder: a dict, an object, a class or a cell; None: nowhere.

    `modules`: the model's, by name. `versions`: see `Environment`.
    """
    guards = list(_moved_guards(environment.guards, original))
    tables: list[TableLike] = list(_moved_tables(environment.tables, original))
    return Environment(guards, [*tables, Aliases(modules, read_tensors(trace), guards)], versions)


def _moved_guards(guards: Iterable[EnvironmentGuard], original: Original) -> Iterator[EnvironmentGuard]:
    """The guards, on the objects that are looked at from now on."""
    for guard in guards:
        place = guard.place
        holder = original(place.holder)
        if holder is not None:
            found = GuardSource(holder, place.key, place.text, place.is_shown, place.is_answer)
            value = found.read()
            expected = guard.expected if any(frozen.holds(value) for frozen in guard.expected) else [freeze(value)]
            yield EnvironmentGuard(found, expected, value, guard.readers, guard.owner)


def _moved_tables(tables: Iterable[TableLike], original: Original) -> Iterator[TableLike]:
    """The tables, of the objects that are looked at from now on."""
    for table in tables:
        holder = original(table.holder) if isinstance(table, (Table, Names)) else None
        if holder is not None and isinstance(table, Table):
            yield Table(table.fqn, table.what, holder, has_types=table.is_deep)
        elif holder is not None and isinstance(table, Names):
            names = Names(holder, table.text, table.owner, are_all_read=table.are_all_read, is_class=table.is_class)
            names.used = table.used
            names.known |= table.known  # what a run leaves was there when it was recorded for a second time
            yield names


_CONSTANTS = ("LOAD_CONST", "LOAD_GLOBAL")  # `is None`, `is missing`


class RecordingRun(Protocol):
    """The recording's interface for Reads."""

    @property
    def is_unseen(self) -> bool:
        """Whether what happens is part of one call that runs again as it is."""

    def context(self) -> str:
        """The FQN of the module whose code runs."""

    def error(self, what: str) -> UntraceableError:
        """An error of the module whose code runs."""

    def error_in(self, fqn: str, what: str) -> UntraceableError:
        """An error of that module."""


class Identity:
    """The identities of one recording's parameters and buffers. `lacks` is called when one lacks an attribute that is read."""

    def __init__(self, state: FakeState, run: RecordingRun, lacks: Callable[[torch.Tensor], None]) -> None:
        self._state, self._run, self._lacks = state, run, lacks
        self._raw = ""  # an original that the code can reach, beside its fake

    def reached(self, tensor: torch.Tensor) -> None:
        """Code can get hold of a parameter or buffer, or of its fake, otherwise than through its module."""
        if not isinstance(tensor, FakeTensor):
            self._raw = self._raw or self._state.names[id(tensor)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the model runs."""

        def hashed(fake: FakeTensor) -> int:
            if id(fake) in self._state.originals and not self._run.is_unseen:
                module = str(sys._getframe(1).f_globals.get("__name__", ""))
                if not is_trusted(module):
                    raise self._run.error(f"forward looks {self._state.names[id(fake)]} up in a dict or a set")
            return builtins.id(fake)

        def lacking(fake: FakeTensor, name: str) -> Any:
            if vars(fake).get("_is_param") and name in vars(nn.Parameter):
                return vars(nn.Parameter)[name]
            if id(fake) in self._state.originals and not self._run.is_unseen:
                self._lacks(self._state.originals[id(fake)])
            raise AttributeError(f"{type(fake).__name__!r} object has no attribute {name!r}", name=name, obj=fake)

        FakeTensor.__hash__, FakeTensor.__getattr__ = hashed, lacking  # type: ignore[method-assign, assignment, attr-defined]
        try:
            yield
        finally:
            del FakeTensor.__hash__, FakeTensor.__getattr__  # type: ignore[attr-defined]

    def check(self, codes: Mapping[CodeType, Called]) -> None:
        """After the run. Raises the error of the module whose code tells a fake from its original, or writes on it."""
        for fake in self._state.fakes:
            attributes, of_original = vars(fake), vars(self._state.originals[id(fake)])
            for name in (name for name in attributes if attributes[name] is not of_original.get(name)):
                writers = {
                    context for code, called in codes.items() if name in code.co_names for context in called.contexts
                }
                if writers:
                    what = f"forward sets attribute {name!r} of {self._state.names[id(fake)]}"
                    raise self._run.error_in(common_module(writers), what)
        given = [name for name in vars(nn.Parameter) if not name.startswith("__")]
        for code, called in codes.items():
            read = [name for name in given if name in code.co_names]
            if read:
                what = f"forward reads {read[0]!r}, which a script has given nn.Parameter"
                raise self._run.error_in(common_module(called.contexts), what)
            if self._raw and compares_identity(code):
                what = f"forward asks which tensor is which, and finds {self._raw} outside of modules, too"
                raise self._run.error_in(common_module(called.contexts), what)


@functools.lru_cache(maxsize=4096)
def compares_identity(code: CodeType) -> bool:
    """Whether code asks if two objects are one, beside None and other constants."""
    before: Any = None
    for step in dis.get_instructions(code):
        if step.opname == "IS_OP" and before is not None and before.opname not in _CONSTANTS:
            return True
        before = step
    return False


_NAME, _CLASS = "type", "__class__"


class _SeenAsType(type):
    """Calls, `isinstance` and `issubclass` as in `type`, but right for the class of a fake."""

    originals: ClassVar[Mapping[int, torch.Tensor]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        return class_seen(args[0], cls.originals)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(other, type)


def class_seen(value: Any, originals: Mapping[int, torch.Tensor]) -> type:
    """The class of a value; for a fake, the class of its original. `originals`: by the id of their fake."""
    if type(value) is not FakeTensor:
        return type(value)
    original = originals.get(id(value))
    if original is not None:
        return type(original)
    return nn.Parameter if vars(value).get("_is_param") else torch.Tensor


class TensorClasses:
    """For one recording. `originals`: parameters and buffers by the id of their fakes."""

    def __init__(self, originals: Mapping[int, torch.Tensor]) -> None:
        self._originals = originals
        self._type = _SeenAsType(_NAME, (type,), {"originals": originals})
        self._namespaces: list[dict[str, Any]] = []

    def is_shown(self, value: Any) -> bool:
        """Whether a value is the stand-in for Python's `type`."""
        return value is self._type

    def show_in(self, namespace: dict[str, Any]) -> None:
        """Code with these globals is about to ask for types."""
        if _NAME not in namespace:
            namespace[_NAME] = self._type
            self._namespaces.append(namespace)

    def end(self) -> None:
        """Code finds Python's `type` again."""
        while self._namespaces:
            del self._namespaces.pop()[_NAME]

    @contextmanager
    def active(self) -> Iterator[None]:
        """While the model runs, `x.__class__` says it, too."""
        originals = self._originals
        (table,) = gc.get_referents(vars(FakeTensor))  # an assignment would set the class of FakeTensor itself
        table[_CLASS] = property(lambda fake: class_seen(fake, originals))
        _forget_lookups(FakeTensor)
        try:
            yield
        finally:
            del table[_CLASS]
            _forget_lookups(FakeTensor)
            self.end()


def _forget_lookups(cls: type) -> None:
    """Python remembers what it has found in a class; who writes into the table of one tells it."""
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))
