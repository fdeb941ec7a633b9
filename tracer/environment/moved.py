"""The environment of a recording, for other objects than those that were recorded, or for the same ones after a change of our own.

    copied = copy.deepcopy(model)                                # what is recorded
    trace, environment = ...
    environment = moved(environment, trace, modules, original)   # what is looked at from now on is the model

Everything is as it was when it was recorded: but a value that violates a guard is in place of the one that was read, such as a module in
place of its copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from smpc.tracer.environment.aliased import Aliases, read_tensors
from smpc.tracer.environment.frozen import freeze
from smpc.tracer.environment.guarded import Environment, Guard, GuardSource, Names, Table, TableLike
from smpc.tracer.environment.memory_words import DictVersions
from smpc.tracer.ir import Trace

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
    guards = list(_guards(environment.guards, original))
    tables: list[TableLike] = list(_tables(environment.tables, original))
    return Environment(guards, [*tables, Aliases(modules, read_tensors(trace), guards)], versions)


def _guards(guards: Iterable[Guard], original: Original) -> Iterator[Guard]:
    for guard in guards:
        place = guard.place
        holder = original(place.holder)
        if holder is not None:
            found = GuardSource(holder, place.key, place.text, place.is_shown, place.is_answer)
            value = found.read()
            expected = guard.expected if any(frozen.holds(value) for frozen in guard.expected) else [freeze(value)]
            yield Guard(found, expected, value, guard.readers, guard.owner)


def _tables(tables: Iterable[TableLike], original: Original) -> Iterator[TableLike]:
    for table in tables:
        holder = original(table.holder) if isinstance(table, (Table, Names)) else None
        if holder is not None and isinstance(table, Table):
            yield Table(table.fqn, table.what, holder, has_types=table.is_deep)
        elif holder is not None and isinstance(table, Names):
            names = Names(holder, table.text, table.owner, are_all_read=table.are_all_read, is_class=table.is_class)
            names.used = table.used
            yield names
