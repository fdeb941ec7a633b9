"""Writes through `parameter.data`, which no version counter of the parameter counts.

    watch_data(weight)
    before = data_version(weight)
    weight.data.clamp_(-1, 1)                  an alias with a counter of its own, in torch
    data_version(weight) != before             all aliases of a watched parameter have one counter together

What keeps values beside a parameter (fp32 masters) asks so whether the parameter has been written. Reading `data` counts nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

_aliases: Any = WeakTensorKeyDictionary()  # watched parameter: the alias whose counter counts, None before the first
_TORCHS: Any = Tensor.data


def watch_data(parameter: Tensor) -> None:
    """Have writes through `parameter.data` counted from now on."""
    _patch_data()
    _aliases.setdefault(parameter, None)


def data_version(parameter: Tensor) -> int:
    """A number that changes when a watched parameter is written through `parameter.data`."""
    alias = _aliases.get(parameter)
    return -1 if alias is None else alias._version


@functools.cache
def _patch_data() -> None:
    """`data` of parameters alone: `torch.Tensor.data` stays what recordings and overrides know."""
    nn.Parameter.data = property(_read, _assign)  # type: ignore[assignment]
    torchs = vars(DTensor).get("data", _TORCHS)
    DTensor.data = property(_read, lambda self, value: _assign(self, value, torchs))  # type: ignore[assignment]


def _read(self: Any) -> Tensor:
    if self not in _aliases or torch.compiler.is_compiling():
        return _TORCHS.__get__(self)  # type: ignore[no-any-return]
    alias = _aliases[self]
    if alias is None:
        alias = _aliases[self] = _TORCHS.__get__(self)
    return alias.detach()  # type: ignore[no-any-return]


def _assign(self: Any, value: Tensor, torchs: Any = _TORCHS) -> None:
    if self in _aliases:
        _aliases[self] = None  # it would keep the old memory
    torchs.__set__(self, value)
