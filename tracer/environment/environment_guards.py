"""The guards of a recording: values that its Python read besides its inputs, such as attributes, globals, closures, and their contents.

A trace belongs to the values that were read. `Environment` remembers them; `difference` says which of them is another one now:

    trace, environment = ...                             # of a model whose forward reads `self.beta`
    environment.difference()                             # None
    model.beta = 0.7
    str(environment.difference())                        # "attribute 'beta' of the model: 0.7, which was 0.5"

Terms
    place       where a value was read (`GuardSource`): a key of a dict (attributes, globals), a name in a class, a cell of a closure
    guard       a place with the value that was read there (see `smpc.tracer.environment.value_snapshots`)
    readers     FQNs of the modules whose code read the place; "" is the model itself

Parameters, buffers and submodules are guarded as tables: which names a module has, and which submodules.
"""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from types import CellType, FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from smpc.tracer.environment.memory_words import DictVersions, Words, function_reader, type_reader
from smpc.tracer.environment.value_snapshots import (
    MISSING,
    DerivedError,
    Entries,
    Frozen,
    freeze,
    is_users,
    users_attributes,
)

_HIDDEN = "another value than before (its values are not shown)"
CLASS, CODE, BASES = (
    "__class__",
    "__code__",
    "__mro__",
)  # of an object, a function, a class: nothing counts the writes to these
_IMMUTABLE, _ON_HEAP = 1 << 8, 1 << 9  # Py_TPFLAGS_IMMUTABLETYPE, Py_TPFLAGS_HEAPTYPE
NAMES = ("__name__", "__qualname__")  # of a function or a class, alike
_OF_CLASSES = frozenset(
    {"__abstractmethods__", "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__orig_bases__",
     "__parameters__", "__slotnames__", "__slots__", "__static_attributes__", "__weakref__", "_abc_impl"}
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """The present answer of `ask()`. `key` distinguishes questions.

    put_back    has it say what it said before, where that can be done
    about       the object that is asked, where the answer is its state
    """

    key: tuple[Any, ...]
    ask: Callable[[], Any] = field(compare=False)
    put_back: Callable[[Any], None] | None = field(default=None, compare=False)
    about: Any = field(default=None, compare=False)

    @property
    def answer(self) -> Any:
        """The present answer."""
        return self.ask()

    def place(self, text: str) -> GuardSource:
        """The place of a guard."""
        return GuardSource(self, "answer", text, is_answer=True)


@dataclass(frozen=True, slots=True)
class GuardSource:
    """Where a value is read: `holder[key]` of a dict, `holder.key` of a class or an object with slots, or the content of a cell."""

    holder: Any
    key: Any
    text: str  # for people
    is_shown: bool = True  # False: messages do not hold its values, which may be passwords
    is_answer: bool = False  # what a function says: nobody can put another value there

    def read(self) -> Any:
        """The value now; MISSING if there is none."""
        holder = self.holder
        if type(holder) is dict:
            return holder.get(self.key, MISSING)
        if isinstance(holder, CellType):
            try:
                return holder.cell_contents
            except ValueError:
                return MISSING
        if self.key == CLASS:
            return type(holder)
        if self.key == BASES:
            return holder.__mro__
        if isinstance(holder, type) and self.key not in NAMES:
            return vars(holder).get(self.key, MISSING)
        if isinstance(holder, dict):
            return holder.get(self.key, MISSING)
        return getattr(holder, self.key, MISSING)

    @property
    def table(self) -> dict[Any, Any] | None:
        """The dict that is written to when another value comes there; None if there is none."""
        if isinstance(self.holder, dict):
            return self.holder
        if self.key in (CLASS, BASES, *NAMES):
            return None
        found = gc.get_referents(vars(self.holder)) if isinstance(self.holder, type) else ()
        return found[0] if len(found) == 1 and type(found[0]) is dict else None  # behind the read-only view of a class

    def write(self, value: Any) -> None:
        """Puts a value there, or takes it away. The base classes of a class stay what they are: their guard does not hold then."""
        holder = self.holder
        if isinstance(holder, Question) and holder.put_back is not None:
            holder.put_back(value)
        if self.key == BASES or self.is_answer or _is_immutable(holder):
            return
        if isinstance(holder, CellType):
            holder.cell_contents = value
        elif isinstance(holder, dict):
            if value is MISSING:
                holder.pop(self.key, None)
            else:
                holder[self.key] = value
        elif value is MISSING:
            delattr(holder, self.key)
        else:
            setattr(holder, self.key, value)


def _is_immutable(value: Any) -> bool:
    """Whether it is a class that Python lets nobody write into; some of C give another object whenever they are asked."""
    return isinstance(value, type) and bool(value.__flags__ & _IMMUTABLE or not value.__flags__ & _ON_HEAP)


@dataclass(slots=True, eq=False)
class EnvironmentGuard:
    """A place, and the values of it that the trace holds for. `value`: the very value that was read, to put it back."""

    place: GuardSource
    expected: list[Frozen]
    value: Any
    readers: dict[str, None] = field(default_factory=dict)
    owner: str | None = None  # FQN of the module whose attribute it is or was reached from
    fades: bool = False  # whether it has a weak reference to what the guard would hold

    def holds(self) -> bool:
        """Whether the place has one of its values."""
        value = self.place.read()
        return any(frozen.holds(value) for frozen in self.expected)

    @property
    def deep(self) -> bool:
        """Whether the value may change without being replaced."""
        return any(frozen.deep for frozen in self.expected)

    @property
    def is_of_dict(self) -> bool:
        """Whether its values are dicts of immutable values."""
        return all(isinstance(frozen, Entries) and frozen.is_shallow for frozen in self.expected)

    def difference(self) -> Difference | None:
        """The unexpected value of a place; None if it has one of its recorded values."""
        if self.holds():
            return None
        found = self.place.read()
        if not self.place.is_shown:
            return Difference(self.place.text, "", "gone" if found is MISSING else _HIDDEN, self.owner)
        return Difference(self.place.text, str(self.expected[0]), shown(found), self.owner)


@dataclass(frozen=True, slots=True)
class Difference:
    """A place whose value is not the one that was read."""

    text: str
    expected: str  # empty: not to be shown
    found: str
    owner: str | None = None

    def __str__(self) -> str:
        return f"{self.text}: {self.found}{f', which was {self.expected}' if self.expected else ''}"


class TableLike(Protocol):
    """What is looked at when one of some dicts was written to; always, if it `is_deep`."""

    is_deep: bool

    @property
    def holders(self) -> Sequence[dict[Any, Any]]:
        """The dicts."""

    def holds(self) -> bool:
        """Whether nothing has changed."""

    def difference(self) -> Difference | None:
        """The change, as text."""


class _OfOneDict(ABC):
    """Something that one dict tells."""

    is_deep = False
    holder: dict[str, Any]

    @property
    def holders(self) -> Sequence[dict[str, Any]]:
        """The dict."""
        return (self.holder,)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return self.difference() is None

    @abstractmethod
    def difference(self) -> Difference | None:
        """The change, as text."""


class Table(_OfOneDict):
    """The names of a module's parameters, buffers or submodules; of submodules, these themselves, of buffers what a trace rests on.

    `used`: the names of attributes of buffers that count, None if any may. `has_types`: the types of parameters count, too.
    """

    def __init__(
        self,
        fqn: str,
        what: str,
        holder: dict[str, Any],
        used: Collection[str] | None = None,
        *,
        has_types: bool = False,
    ) -> None:
        self.fqn, self.what, self.holder, self._used = fqn, what, holder, used
        self.is_deep = has_types
        self._expected = self._content()

    @property
    def holders(self) -> Sequence[dict[str, Any]]:
        """The dict, and the dicts of the attributes of the buffers in it."""
        if self.what != "buffer":
            return (self.holder,)
        return (self.holder, *(vars(buffer) for buffer in self.holder.values() if buffer is not None))

    def _content(self) -> tuple[tuple[str, Any], ...]:
        if self.what == "submodule":
            return tuple(self.holder.items())
        if self.what == "buffer":
            return tuple((name, self._form(value)) for name, value in self.holder.items())
        if self.is_deep:
            return tuple((name, True if value is None else value.dtype) for name, value in self.holder.items())
        return tuple((name, value is None) for name, value in self.holder.items())

    def difference(self) -> Difference | None:
        """The first name that has changed."""
        found = self._content()
        if len(found) == len(self._expected) and all(
            a[0] == b[0] and self._are_alike(a[1], b[1]) for a, b in zip(self._expected, found, strict=True)
        ):
            return None
        before, now = dict(self._expected), dict(found)
        names = [
            name
            for name in dict.fromkeys((*before, *now))
            if not self._are_alike(before.get(name, MISSING), now.get(name, MISSING))
        ]
        name = names[0] if names else next(iter(now), "")
        where = f"of module {self.fqn!r}" if self.fqn else "of the model"
        hint = _FORM_HINT if isinstance(before.get(name), _Form) and isinstance(now.get(name), _Form) else ""
        text = f"{self.what} {name!r} {where}{hint}"
        return Difference(text, self._text(before, name), self._text(now, name), self.fqn)

    def _are_alike(self, before: Any, now: Any) -> bool:
        if isinstance(before, _Form) and isinstance(now, _Form):
            return before.holds(now)
        return before == now if self.what == "buffer" else before is now

    def modes(self) -> Iterator[tuple[Table, str, bool]]:
        """Which parameters are trained."""
        if self.what == "parameter":
            for name, parameter in self.holder.items():
                if parameter is not None:
                    yield self, name, parameter.requires_grad

    def _form(self, buffer: torch.Tensor | None) -> _Form | bool:
        if buffer is None:
            return True
        of_users = users_attributes(buffer).items()
        counts = {name: value for name, value in of_users if self._used is None or name in self._used}
        return _Form(buffer.shape, buffer.dtype, counts and freeze(counts), counts)

    def _text(self, table: dict[str, Any], name: str) -> str:
        if name not in table:
            return "missing"
        value = table[name]
        if isinstance(value, (_Form, torch.dtype)):
            return str(value)
        return type(value).__name__ if isinstance(value, nn.Module) else "None" if value is True else "there"


_FORM_HINT = " (if it is forward that gives it another shape or type, do so before the first step)"


@dataclass(frozen=True, slots=True)
class _Form:
    """The properties of a buffer that a trace relies on; its values are read in every step. `frozen`: its recorded attributes."""

    shape: torch.Size
    dtype: torch.dtype
    frozen: Any
    attributes: dict[str, Any]

    def holds(self, now: _Form) -> bool:
        """Whether a buffer, as it is now, is like it."""
        if (self.shape, self.dtype) != (now.shape, now.dtype):
            return False
        return bool(self.frozen.holds(now.attributes) if self.frozen else not now.attributes)

    def __str__(self) -> str:
        tensor = f"a tensor {self.dtype}[{','.join(map(str, self.shape))}]".replace("torch.", "")
        return f"{tensor} with {self.frozen}" if self.frozen else tensor


def is_special(name: str) -> bool:
    """Whether Python itself looks for this name in a class, such as `__len__`."""
    return name.startswith("__") and name.endswith("__") and name not in _OF_CLASSES


class Names(_OfOneDict):
    """The names of an object's attributes, in its dict. `used`: those that count, None if any may; `known`: those that are there.

    `are_all_read`: the object was asked for all of them. `is_class`: Python looks for special methods there, whoever names them.
    """

    def __init__(
        self,
        holder: dict[str, Any],
        text: str,
        owner: str | None,
        *,
        are_all_read: bool = False,
        is_class: bool = False,
    ) -> None:
        self.holder, self.text, self.owner, self.are_all_read, self.is_class = (
            holder,
            text,
            owner,
            are_all_read,
            is_class,
        )
        self.known = set(holder)
        self.used: set[str] | None = None

    def new(self) -> list[str]:
        """The names that have come."""
        if len(self.known) == len(self.holder) and self.known.issuperset(self.holder):
            return []
        return [name for name in self.holder if name not in self.known and self._counts(str(name))]

    def _counts(self, name: str) -> bool:
        if not is_users(name):
            return self.is_class and is_special(name)
        return self.used is None or name in self.used

    def difference(self) -> Difference | None:
        """The first name that has come, and whose attribute is there."""
        for name in self.new():
            text = f"attribute {name!r} {self.text}"
            return Difference(text, str(MISSING), shown(self.holder[name]), self.owner)
        return None


class Environment:
    """The guards of one recording. A guard that held is checked again only if its dicts have been written to.

    `versions`: shared by those who poll it themselves; by default one of its own. `leave`: leaves in the model what a run of it leaves
    there.
    """

    def __init__(
        self,
        guards: Sequence[EnvironmentGuard],
        tables: Sequence[TableLike],
        versions: DictVersions | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self.guards, self.tables = tuple(guards), tuple(tables)
        self._versions, self._polls = versions or DictVersions(), versions is None
        self._fixed: list[_Fixed | _Addresses] = []  # what no dict tells: in objects, functions and cells
        self._leave, self._lock = leave, threading.Lock()
        self._always: list[EnvironmentGuard | TableLike] = []
        self._checks: dict[int, list[EnvironmentGuard | TableLike]] = {}  # by position of their dict
        fixed: dict[
            tuple[str, bool], list[EnvironmentGuard]
        ] = {}  # by key, and whether it is a name of plain functions
        for guard in self.guards:
            table = guard.place.table
            if guard.deep and not (table is not None and guard.is_of_dict):
                self._always.append(guard)
            elif table is None:
                holder = guard.place.holder
                key = "cell_contents" if isinstance(holder, CellType) else guard.place.key
                fixed.setdefault((key, type(holder) is FunctionType and key in NAMES), []).append(guard)
            else:
                self._checks.setdefault(self._versions.watch(table), []).append(guard)
                self._watch_content(guard)
        self._fixed = [_compared(key, is_name, guards) for (key, is_name), guards in fixed.items()]
        for each in self.tables:
            self._watch_table(each)
            if each.is_deep:
                self._always.append(each)
        # Where others poll the versions, they look at this, too.
        self._trained = [
            mode for table in self.tables if isinstance(table, Table) for mode in table.modes() if self._polls
        ]
        self._seen = -1  # the generation in which all held
        self._broken: int | None = None  # position of a dict that did not hold when it was last looked at

    def leave(self) -> None:
        """Before a run of a program: caches that the run would fill are filled, as later calls of plain PyTorch find them."""
        if self._leave is not None:
            self._leave()

    def difference(self) -> Difference | None:
        """The first place whose value is another one now; None if the trace holds. Threads wait for each other."""
        with self._lock:
            if self._polls:
                self._versions.poll()
            for fixed in self._fixed:
                found = fixed.difference()
                if found is not None:
                    return found
            for always in self._always:
                if not always.holds():
                    return always.difference()
            found = None if self._seen == self._versions.generation else self._difference_of_tables()
            return self._difference_of_modes() if found is None and self._trained else found

    def _watch_content(self, guard: EnvironmentGuard) -> None:
        """A dict of plain values is looked at when it has been written to, wherever it has come from."""
        value = guard.place.read() if guard.is_of_dict else None
        if type(value) is dict:
            checks = self._checks.setdefault(self._versions.watch(value), [])
            if guard not in checks:
                checks.append(guard)

    def _watch_table(self, table: TableLike) -> None:
        """Its present attributes: the buffer may have been replaced by another."""
        for holder in table.holders:
            checks = self._checks.setdefault(self._versions.watch(holder), [])
            checks += [] if table in checks else [table]

    def _difference_of_modes(self) -> Difference | None:
        for table, name, expected in self._trained:
            found = table.holder[name].requires_grad
            if found != expected:
                fqn = f"{table.fqn}.{name}" if table.fqn else name
                return Difference(f"requires_grad of parameter {fqn!r}", str(expected), str(found), table.fqn)
        return None

    def _difference_of_tables(self) -> Difference | None:
        generation = self._versions.generation
        changed = self._versions.changed_in
        candidates = (position for position in self._checks if changed[position] > self._seen)
        first = () if self._broken is None else (self._broken,)
        for position in (*first, *candidates):
            for check in self._checks[position]:
                found = check.difference()
                if found is not None:
                    self._broken = position
                    return found
                if isinstance(check, EnvironmentGuard):
                    self._watch_content(check)
                else:
                    self._watch_table(check)
        self._seen, self._broken = generation, None
        return None


def _compared(key: str, is_name: bool, guards: Sequence[EnvironmentGuard]) -> _Fixed | _Addresses:
    holders = [guard.place.holder for guard in guards]
    read = type_reader(holders) if key == CLASS else function_reader(holders, key) if is_name else None
    return _Fixed(guards) if read is None else _Addresses(guards, read)


class _Addresses:
    """Guards of one attribute of many objects, or of their classes: the addresses of the values are looked at in one go."""

    def __init__(self, guards: Sequence[EnvironmentGuard], read: Callable[[], Words]) -> None:
        self._guards, self._read = guards, read
        self._keep()

    def _keep(self) -> None:
        # Kept alive, so that no other value gets the address of one of these.
        self._alive = [guard.place.read() for guard in self._guards]
        self._addresses = self._read().copy()

    def difference(self) -> Difference | None:
        """The first that has another one."""
        if np.array_equal(self._read(), self._addresses):
            return None
        found = next(filter(None, (guard.difference() for guard in self._guards)), None)
        if found is None:
            self._keep()
        return found


class _Fixed:
    """Guards of one attribute of many objects, which is hardly ever another one: all are looked at in one go."""

    def __init__(self, guards: Sequence[EnvironmentGuard]) -> None:
        self._guards, self._places = guards, [guard.place for guard in guards]
        key = guards[0].place.key
        is_cell = isinstance(guards[0].place.holder, CellType)
        self._read = attrgetter("cell_contents" if is_cell else key)
        self._holders = [place.holder for place in self._places]
        self._values = self._now()
        self._are_comparable = key in (CODE, *NAMES)  # a list compares these faster than `is`, and alike

    def _now(self) -> list[Any]:
        try:
            return list(map(self._read, self._holders))
        except (AttributeError, ValueError):  # one of them has none
            return [place.read() for place in self._places]

    def difference(self) -> Difference | None:
        """The first that has another one."""
        now = self._now()
        if now == self._values if self._are_comparable else all(map(is_, now, self._values)):
            return None
        found = next(filter(None, (guard.difference() for guard in self._guards)), None)
        self._values = now if found is None else self._values
        return found


def shown(value: Any) -> str:
    """A value in a message."""
    try:
        return str(freeze(value))
    except DerivedError:
        return "a tensor"


def tables_of(
    model: nn.Module,
    listed: Collection[int] = (),
    used: Collection[str] | None = None,
    converted: Collection[int] = (),
) -> Iterator[Table]:
    """The tables of a model's modules that are not empty, or belong to a module that was asked for its members (`listed`, by id).

    `converted`: modules, by id, the types of whose parameters count. `used`: see `Table`.
    """
    for fqn, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its tables are C++
        tables = {"submodule": module._modules, "parameter": module._parameters, "buffer": module._buffers}
        for what, table in tables.items():
            if table or id(module) in listed:
                has_types = what == "parameter" and id(module) in converted
                yield Table(fqn, what, table, used, has_types=has_types)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hook_tables(module: nn.Module) -> Iterator[dict[int, Any]]:
    """The hooks of a module, by kind."""
    for name in _HOOKS:
        yield vars(module)[name]
