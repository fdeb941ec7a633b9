"""The description of a parameter beside its name, type and default: a `Key` in the metadata of a dataclass's field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from smpc.config.numbers import shown


@dataclass(frozen=True, slots=True)
class Flag:
    """The option of `smpc compile` that sets a parameter; its long name is the parameter's.

    `short`: such as -p. `shows_default`: the help says the default. `repeatable`: uses make a list. `is_searched`: --auto accepts it.
    `is_apart`: the rules for the script's key of this name (which requires ddp, for example) do not apply to a plan.
    """

    help: str
    short: str = ""
    metavar: str = ""
    shows_default: bool = False
    repeatable: bool = False
    is_searched: bool = False
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    """A parameter. `meaning` is for users.

    `unsupported` says what to do instead of a value other than the default; `no_effect` says why such a value changes nothing. `derived`
    is the text of a default that is not a constant of the key's type; None is then accepted and means that default. `limit` is the
    largest plausible value (`smpc.config.numbers`). `required`: callers of `smpc.compile_model` must give it. `as_option` converts a
    script's value into the planner's option.
    """

    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    options: tuple[str, ...] = ()
    unsupported: str = ""
    no_effect: str = ""
    derived: str = ""
    limit: float | None = None
    required: bool = False
    as_option: Callable[[Any], Any] | None = None
    flag: Flag | None = None

    def out_of_bounds(self, name: str, value: float) -> str:
        """What is wrong with a number; "" if nothing. `limit` is not checked."""
        low, high = self.minimum, self.maximum
        if (low is None or value >= low) and (high is None or value <= high):
            return ""
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        return f"{name}: expected {bounds}, found {shown(value)}"


def key(default: Any, meaning: str, **rules: Any) -> Any:
    """A field with its key; `rules`: other fields of `Key`."""
    return dataclasses.field(default=default, metadata={"key": Key(meaning, **rules)})


def restated(cls: type, name: str, default: Any = dataclasses.MISSING, **changes: Any) -> Any:
    """A field of a base class with another default (required if none is given) and other changes."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    known = dataclasses.replace(fields[name].metadata["key"], **changes)
    return dataclasses.field(default=default, metadata={"key": known})


def keys_of(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Key]]:
    """The fields of a class that have a `Key`."""
    for field in dataclasses.fields(cls):
        yield field, cast(Key, field.metadata["key"])
