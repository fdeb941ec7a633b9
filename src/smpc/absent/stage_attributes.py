"""Attributes that a module's forward sets in Python, such as a count of its calls, where only one rank of a pipeline runs the module.

    watch = AttributeWatch(model, {"encoder.warmup"})       before a program first runs: the modules that it calls whole on this rank
    found = watch.changed()                                 after it: [("encoder.warmup", "calls")]
    attributes = StageAttributes(model, rank=0)
    attributes.take(gathered)                               `attributes.told(found)` of every rank of the pipeline, after a step
    model.encoder.warmup.calls                              4, on all ranks
    with attributes.in_step():
        model.encoder.warmup.calls                          an error where it is used: pipeline rank 1 changes it now

Numbers, text, True, False and None are sent; in the place of a tensor, other ranks have an error at any time. An attribute counts if one of
these is in the place of something else, not if a list or an object is changed inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn

from smpc.errors import UsageError

Attribute = tuple[str, str]  # the name of a module, and of its attribute
Told = tuple[tuple[Attribute, ...], dict[Attribute, Any]]
_OF_MODULES = frozenset(vars(nn.Module()))
_COMPARED = (type(None), bool, int, float, complex, str, bytes)
_OTHER = object()
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
            (name, key): _kept(value)
            for name, each in inside
            for key, value in vars(each).items()
            if key not in _OF_MODULES and not key.startswith("_smpc")
        }

    def changed(self) -> list[Attribute]:
        """The attributes in whose place there is another number, text or tensor now."""
        found = []
        for attribute, before in self._before.items():
            name, key = attribute
            now = vars(self._model.get_submodule(name)).get(key, _OTHER)
            if isinstance(now, Tensor):
                is_same = isinstance(before, weakref.ref) and before() is now
            else:
                is_same = now is before or (type(now) is type(before) and now == before)
            if not is_same and isinstance(now, (Tensor, *_COMPARED)):
                found.append(attribute)
        return found


def _kept(value: Any) -> Any:
    """What a value is compared by later. Tensors are not kept alive."""
    if isinstance(value, Tensor):
        return weakref.ref(value)
    return value if isinstance(value, _COMPARED) else _OTHER


class StaleValue:
    """In the place of a value that another rank has. It can be shown, and copied with its module; everything else is an error."""

    def __init__(self, text: str, why: str) -> None:
        self._text, self._why = text, why
        self.before: Any = None  # in its place before the step

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


class StageAttributes:
    """See above. `rank`: this process's, of the pipeline."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank
        self._own: dict[Attribute, None] = {}
        self._marks: dict[Attribute, StaleValue] = {}  # of those of other ranks
        self.is_empty = True  # on all ranks

    def told(self, changed: Collection[Attribute]) -> Told:
        """After a step: which attributes of the modules that this rank runs have changed, now or before, and what can be sent of them."""
        self._own |= dict.fromkeys(changed)
        held = {attribute: self._table(attribute).get(attribute[1], _OTHER) for attribute in self._own}
        return tuple(self._own), {each: value for each, value in held.items() if isinstance(value, _COMPARED)}

    def take(self, told: Sequence[Told]) -> None:
        """What every rank has `told`, by rank."""
        values: dict[Attribute, Any] = {}
        for rank, (attributes, own) in enumerate(told):
            self.is_empty = self.is_empty and not attributes
            values |= own
            for attribute in attributes:
                if attribute not in self._marks:
                    self._marks[attribute] = _mark_of(attribute, rank, self._rank)
        for attribute in self._own:
            self._marks.pop(attribute, None)
        for attribute, mark in self._marks.items():
            table, key = self._table(attribute), attribute[1]
            if table.get(key) is not mark:
                mark.before = table.get(key)
            table[key] = values.get(attribute, mark)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """In this context nobody uses the values of other ranks: they change now."""
        with self._exchanged(lambda attribute, value: self._marks[attribute]):
            yield

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """In this context, in a step, the values are there that were there before it: for recordings, and for what they depend on."""
        with self._exchanged(lambda attribute, value: value.before if isinstance(value, StaleValue) else value):
            yield

    @contextmanager
    def _exchanged(self, other: Callable[[Attribute, Any], Any]) -> Iterator[None]:
        kept = []
        for attribute, mark in self._marks.items():
            table, key = self._table(attribute), attribute[1]
            value = table.get(key)
            new = other(attribute, value)
            if new is mark and value is not mark:
                mark.before = value
            if new is not value:
                table[key] = new
                kept.append((table, key, value))
        try:
            yield
        finally:
            for table, key, value in kept:
                table[key] = value

    def _table(self, attribute: Attribute) -> dict[str, Any]:
        return vars(self._model.get_submodule(attribute[0]))


def _mark_of(attribute: Attribute, holder: int, rank: int) -> StaleValue:
    name, key = attribute
    text = f"attribute {key!r} of module {name!r}, on pipeline rank {holder}"
    return StaleValue(
        text,
        f"{text}: forward sets it there, and pipeline rank {rank} has no value of it now; between steps all ranks have numbers and text; "
        "in a step, and for tensors, return what is needed from the model, or keep it in a buffer, whose value model.state_dict() has",
    )
