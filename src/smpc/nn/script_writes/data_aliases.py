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

from smpc.nn.script_writes.classes import NoticedParameter, between_steps

_aliases: Any = WeakTensorKeyDictionary()  # watched parameter: the alias whose counter counts, None before the first
_TORCHS: Any = Tensor.data


def watch_data(parameter: Tensor) -> None:
    """Have writes through `parameter.data` between steps counted from now on."""
    if parameter in _aliases:
        return
    _aliases[parameter] = None
    if isinstance(parameter, DTensor):
        _patch_parts()
    elif isinstance(parameter, nn.Parameter):
        between_steps(parameter, CountedParameter)


def data_version(parameter: Tensor) -> int:
    """A number that changes when a watched parameter is written through `parameter.data`."""
    alias = _aliases.get(parameter)
    return -1 if alias is None else alias._version


class CountedParameter(NoticedParameter):
    """A parameter whose aliases count together."""

    @property
    def data(self) -> Tensor:
        """An alias of the memory."""
        return read_data(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        assign_data(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


@functools.cache
def _patch_parts() -> None:
    """Parts have no place of their own for it: they are of the class of all DTensors."""
    torchs = vars(DTensor).get("data", _TORCHS)
    DTensor.data = property(read_data, lambda self, value: assign_data(self, value, torchs))  # type: ignore[assignment]


def read_data(parameter: Any) -> Tensor:
    """`parameter.data`."""
    with torch._C.DisableTorchFunctionSubclass():
        if parameter not in _aliases or torch.compiler.is_compiling():
            return _TORCHS.__get__(parameter)  # type: ignore[no-any-return]
        alias = _aliases[parameter]
        if alias is None:
            alias = _aliases[parameter] = _TORCHS.__get__(parameter)
        return alias.detach()  # type: ignore[no-any-return]


def assign_data(parameter: Any, value: Any, torchs: Any = _TORCHS) -> None:
    """`parameter.data = value`."""
    if parameter in _aliases:
        _aliases[parameter] = None  # it would keep the old memory
    with torch._C.DisableTorchFunctionSubclass():
        torchs.__set__(parameter, value)
