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

from smpc.nn.script_writes.between_steps import NoticedParameter, between_steps

_ALIAS = "_smpc_data"  # of a watched parameter: the alias whose counter counts, None before the first
_of_parts: Any = WeakTensorKeyDictionary()  # the same of parts, by this rank's tensor
_TORCHS: Any = Tensor.data


def watch_data(parameter: Tensor) -> None:
    """Have writes through `parameter.data` between steps counted from now on."""
    if isinstance(parameter, DTensor):
        _patch_parts()
        _of_parts.setdefault(parameter._local_tensor, None)
    elif isinstance(parameter, nn.Parameter):
        vars(parameter).setdefault(_ALIAS, None)
        between_steps(parameter, CountedParameter)


def data_version(parameter: Tensor) -> int:
    """A number that changes when a watched parameter is written through `parameter.data`."""
    alias = _of_parts.get(parameter._local_tensor) if isinstance(parameter, DTensor) else vars(parameter).get(_ALIAS)
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


@functools.cache
def _patch_parts() -> None:
    """Parts have no place of their own for it: they are of the class of all DTensors."""
    torchs = vars(DTensor).get("data", _TORCHS)
    DTensor.data = property(read_data, lambda self, value: assign_data(self, value, torchs))  # type: ignore[assignment]


def read_data(parameter: Any) -> Tensor:
    """`parameter.data`."""
    with torch._C.DisableTorchFunctionSubclass():
        table, key = _table(parameter)
        if key not in table or torch.compiler.is_compiling():
            return _TORCHS.__get__(parameter)  # type: ignore[no-any-return]
        if table[key] is None:
            table[key] = _TORCHS.__get__(parameter)
        return table[key].detach()  # type: ignore[no-any-return]


def assign_data(parameter: Any, value: Any, torchs: Any = _TORCHS) -> None:
    """`parameter.data = value`."""
    table, key = _table(parameter)
    if key in table:
        table[key] = None  # it would keep the old memory
    with torch._C.DisableTorchFunctionSubclass():
        torchs.__set__(parameter, value)


def _table(parameter: Any) -> tuple[Any, Any]:
    return (_of_parts, parameter._local_tensor) if isinstance(parameter, DTensor) else (vars(parameter), _ALIAS)
