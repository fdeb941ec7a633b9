"""Attributes that a module's forward sets in Python, such as a count of its calls: only the rank that runs the module has their value.

    watch = AttributeWatch(model, {"encoder.warmup"})       before a program first runs: the modules that it calls whole on this rank
    found = watch.changed()                                 after it: [("encoder.warmup", "calls")]
    stale = StaleAttributes(model, rank=0)
    stale.note([[], found])                                 what each rank of the pipeline has found
    model.encoder.warmup.calls + 1                          UsageError: pipeline rank 1 has it

An attribute counts if another value is in its place, not if a list or an object is changed inside. Recordings see what was there before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from smpc.errors import UsageError

Attribute = tuple[str, str]  # the name of a module, and of its attribute
_OF_MODULES = frozenset(vars(nn.Module()))
_COMPARED = (type(None), bool, int, float, complex, str, bytes)
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul",
    "rmatmul", "neg", "pos", "abs", "round", "lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "index", "len", "iter", "getitem",
    "setitem", "contains", "call", "and", "rand", "or", "ror", "xor", "rxor", "invert", "reduce_ex",
)  # fmt: skip


class AttributeWatch:
    """The attributes of modules, by the names of these, and of the modules in them, at one moment."""

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self._model = model
        inside = (
            (f"{name}.{path}".strip("."), each)
            for name in names
            for path, each in model.get_submodule(name).named_modules()
        )
        self._before = {
            (name, key): value for name, each in inside for key, value in vars(each).items() if key not in _OF_MODULES
        }
        self._names = tuple(dict.fromkeys(name for name, _ in self._before))

    def changed(self) -> list[Attribute]:
        """Those in whose place there is something else now."""
        found = []
        for attribute, before in self._before.items():
            name, key = attribute
            now = vars(self._model.get_submodule(name)).get(key, before)
            is_same = now is before or (type(now) is type(before) and isinstance(now, _COMPARED) and now == before)
            if not is_same:
                found.append(attribute)
        return found


class StaleValue:
    """In the place of a value that another rank has. It can be shown, and copied with its module; everything else is an error."""

    def __init__(self, text: str, why: str) -> None:
        self._text, self._why = text, why

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def __format__(self, form: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StaleValue:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Called by torch where it is an argument."""
        next(each for each in (*args, *(kwargs or {}).values()) if isinstance(each, cls))._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsageError(self._why)

    __hash__ = object.__hash__


for _name in _OPERATORS:
    setattr(StaleValue, f"__{_name}__", StaleValue._refuse)


class StaleAttributes:
    """See above. `rank`: this process's, of the pipeline."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank
        self._before: dict[Attribute, Any] = {}  # values of this rank
        self._marks: dict[Attribute, StaleValue] = {}

    def __bool__(self) -> bool:
        return bool(self._marks)

    def note(self, found: Sequence[Collection[Attribute]]) -> None:
        """By rank, which attributes of the modules that it runs have changed. What this rank changes stays what it is."""
        for rank, attributes in enumerate(found):
            for attribute in attributes:
                if attribute not in found[self._rank] and attribute not in self._marks:
                    self._marks[attribute] = _mark_of(attribute, rank, self._rank)
        for attribute in found[self._rank]:
            self._marks.pop(attribute, None)
        self.mark()

    def mark(self) -> None:
        """A step has run: also of what a script has set, others have another value now."""
        for attribute, mark in self._marks.items():
            name, key = attribute
            table = vars(self._model.get_submodule(name))
            if table.get(key) is not mark:
                self._before[attribute] = table.get(key)
                table[key] = mark

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """In this context there are the values of before."""
        put = []
        for (name, key), mark in self._marks.items():
            table = vars(self._model.get_submodule(name))
            if table.get(key) is mark:
                table[key] = self._before[name, key]
                put.append((table, key, mark))
        try:
            yield
        finally:
            for table, key, mark in put:
                table[key] = mark


def _mark_of(attribute: Attribute, holder: int, rank: int) -> StaleValue:
    name, key = attribute
    text = f"attribute {key!r} of module {name!r}, on pipeline rank {holder}"
    return StaleValue(
        text,
        f"{text}: forward sets it there, and pipeline rank {rank} has its value of before the first step alone; keep it in a buffer, whose "
        "value model.state_dict(), called on every rank, has, or return it from the step function",
    )
