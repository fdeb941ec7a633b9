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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smpc.tracer.environment.environment_guards import (
    Difference,
    Environment,
    Guard,
    GuardSource,
    Names,
    Table,
    TableLike,
)
from smpc.tracer.environment.memory_words import DictVersions
from smpc.tracer.environment.value_snapshots import MISSING, freeze
from smpc.tracer.ir import NodeKind, Trace
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
        self, modules: Iterable[tuple[str, nn.Module]], paths: frozenset[str], guards: Sequence[Guard]
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


def _moved_guards(guards: Iterable[Guard], original: Original) -> Iterator[Guard]:
    """The guards, on the objects that are looked at from now on."""
    for guard in guards:
        place = guard.place
        holder = original(place.holder)
        if holder is not None:
            found = GuardSource(holder, place.key, place.text, place.is_shown, place.is_answer)
            value = found.read()
            expected = guard.expected if any(frozen.holds(value) for frozen in guard.expected) else [freeze(value)]
            yield Guard(found, expected, value, guard.readers, guard.owner)


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
