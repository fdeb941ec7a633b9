"""Numbers that left the tensor of a slice alone (`weight.norm().item()`): floats that know it as long as a script reckons with them.

    scale = 1 / max(weight.norm().item(), 1e-6)
    print(f"{scale:.3f}")                     as any float
    weight.mul_(scale)                        UsageError, as by the tensor
    torch.tensor(scale)                       an ordinary tensor, to be summed over ranks

`float(number)`, functions of `math`, copies and files have ordinary floats, of which nothing is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from smpc.nn.script_writes.rows import OfSlice


class SliceNumber(float):
    """See above."""

    of: OfSlice

    @classmethod
    def told(cls, value: float, of: OfSlice) -> SliceNumber:
        """A number that was computed of a slice alone."""
        found = cls(value)
        found.of = of
        return found

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _reckoning(name: str) -> Callable[..., Any]:
    original: Callable[..., Any] = getattr(float, name)

    @functools.wraps(original)
    def reckon(self: SliceNumber, *others: Any) -> Any:
        found = original(self, *others)
        return SliceNumber.told(found, self.of) if isinstance(found, float) else found

    return reckon


_SIGNS = ("neg", "pos", "abs")
_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in (*_SIGNS, *_OF_TWO, *(f"r{_each}" for _each in _OF_TWO)):
    setattr(SliceNumber, f"__{_name}__", _reckoning(f"__{_name}__"))
