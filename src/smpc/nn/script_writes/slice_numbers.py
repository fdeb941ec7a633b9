"""Numbers that left the tensor of a slice alone (`weight.norm().item()`): numbers that know it as long as a script reckons with them.

    scale = 1 / max(weight.norm().item(), 1e-6)
    print(f"{scale:.3f}")                     as any float, and a warning: one process has another number
    weight.mul_(scale)                        UsageError, as by the tensor
    if scale > 0.5: ...                       UsageError: one process would decide by the whole
    torch.tensor(scale)                       an ordinary tensor, to be summed over ranks
    weight.shape[0] ** -0.5                   SliceNumber, too: the slice has fewer rows
    torch.empty(weight.shape)                 as any size
    torch.save({"norm": scale}, path)         an ordinary number in the file

`float(norm)`, with the same warning, functions of `math`, copies and files have ordinary numbers, of which nothing is known. Those that
differ between ranks are found when ranks compare (`compare_writes`). Sizes of equal slices do not, so `math.sqrt(weight.shape[0])` is an
error. Comparisons with zero or next to it, infinity, and what was computed, tell nothing of a size, and are any.

Pickled, they are calls of `float` and `int`, which torch's loader of weights refuses. So torch.save gets ordinary numbers in their place:
it is changed when the first number is made, and stays so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_any, tree_map_only

from smpc.errors import UsageError
from smpc.nn.changed_functions import change_function
from smpc.nn.script_writes.callers import warn_at_script

_DIGITS = 6
_TINY = 1e-5  # up to here numbers keep others from being divided by zero


class _Shown:
    """A number whose text is asked for."""

    def __repr__(self) -> str:
        warn_of_shown("printing a number")
        return super().__repr__()

    def __format__(self, spec: str) -> str:
        warn_of_shown("printing a number")
        return super().__format__(spec)


class SliceNumber(_Shown, float):
    """See above."""

    of: Any

    def __new__(cls, value: float) -> Any:
        """An ordinary number: what is made by a number's class is not of a slice."""
        return float(value)

    @classmethod
    def told(cls, value: float, of: Any) -> SliceNumber:
        """A number that was computed of a slice alone."""
        _save_as_ordinary_numbers()
        found = float.__new__(cls, value)
        found.of = of
        return found

    def __float__(self) -> float:
        warn_of_shown("float(...)")
        return float.__float__(self)

    def __int__(self) -> int:
        raise decided("int(...)", self.of)

    def __reduce__(self) -> Any:
        return float, (float.__float__(self),)


class SliceInt(_Shown, int):
    """The same of whole numbers: counts, places, and sizes along a slice's rows."""

    of: Any

    def __new__(cls, value: int) -> Any:
        """An ordinary number."""
        return int(value)

    @classmethod
    def told(cls, value: int, of: Any) -> SliceInt:
        """A number that was computed of a slice alone."""
        _save_as_ordinary_numbers()
        found = int.__new__(cls, value)
        found.of = of
        return found

    def __float__(self) -> float:
        raise decided("float(...) or a function of math", self.of)

    def __reduce__(self) -> Any:
        return int, (int.__index__(self),)


KINDS = frozenset({SliceNumber, SliceInt})


def known_number(value: Any) -> Any:
    """Of which slice a number is; None: of none."""
    return value.of if isinstance(value, SliceNumber | SliceInt) else None


def number_of(value: Any, of: Any) -> Any:
    """A number that knows it; what is none, as it is."""
    if type(value) is float:
        return SliceNumber.told(value, of)
    return SliceInt.told(value, of) if type(value) is int else value


def decided(what: str, of: Any) -> UsageError:
    """For a script that decides by a number."""
    return UsageError(
        f"{what}: expected a number that one process would have, too, found one that was computed of {of.alone} "
        "(a norm, a mean, a count, a size): one process would decide by another one; sum up what all ranks have with "
        "torch.distributed.all_reduce, and take its item(), or compute it of the whole parameter of model.state_dict()"
    )


def warn_of_shown(what: str) -> None:
    """For a script that shows a number."""
    warn_at_script(
        f"{what}: expected a number that one process would have, too, found one that was computed of what this rank has of a parameter "
        "alone; sum up what all ranks have with torch.distributed.all_reduce before it is shown, or compute it of the whole parameter of "
        "model.state_dict()"
    )


def check_numbers(what: str, named: Mapping[str, Any]) -> None:
    """UsageError for a number (a learning rate) that was computed of a slice alone, of which `what` says who reads it. None is found where
    no value is of these KINDS."""
    for name, value in named.items():
        if known_number(value) is not None:
            raise decided(f"{what}: {name}", known_number(value))


def tells_of_size(other: Any) -> bool:
    """Whether to be larger than this number says how large one is: a number of a few digits, which somebody has chosen. Others were
    computed, such as norms that scripts sort."""
    if not isinstance(other, int | float) or known_number(other) is not None:
        return False
    return abs(other) > _TINY and math.isfinite(other) and float(f"{other:.{_DIGITS}g}") == other


def ordinary(tree: Any) -> Any:
    """`tree`, or one like it with ordinary numbers in place of these, in whatever torch's pytree takes apart."""
    kinds = tuple(KINDS)
    return (
        tree_map_only(kinds, _ordinary_number, tree) if tree_any(lambda leaf: isinstance(leaf, kinds), tree) else tree
    )


def _ordinary_number(number: Any) -> Any:
    return int.__index__(number) if isinstance(number, int) else float.__float__(number)


@functools.cache
def _save_as_ordinary_numbers() -> None:
    """Have torch.save do so."""
    change_function(torch.save, _saving)


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save(obj: object, *args: Any, **kwargs: Any) -> None:
        original(ordinary(obj), *args, **kwargs)

    return save


def _reckoning(base: type, name: str) -> Callable[..., Any]:
    original: Callable[..., Any] = getattr(base, name)

    @functools.wraps(original)
    def reckon(self: Any, *others: Any) -> Any:
        found = original(self, *others)
        if found is NotImplemented and isinstance(others[0], float) and base is int:
            found = getattr(float, name)(float(int.__index__(self)), others[0])
        return number_of(found, self.of)

    return reckon


def _deciding(base: type, name: str) -> Callable[..., Any]:
    original: Callable[..., Any] = getattr(base, name)

    @functools.wraps(original)
    def decide(self: Any, other: Any) -> Any:
        if tells_of_size(other):
            raise decided(f"a comparison with {other}", self.of)
        return original(self, other)

    return decide


_OF_ONE = ("neg", "pos", "abs", "round", "floor", "ceil", "trunc")
_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _base, _kind in ((float, SliceNumber), (int, SliceInt)):
    for _name in (*_OF_ONE, *_OF_TWO, *(f"r{_each}" for _each in _OF_TWO)):
        setattr(_kind, f"__{_name}__", _reckoning(_base, f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge"):
    setattr(SliceNumber, f"__{_name}__", _deciding(float, f"__{_name}__"))
