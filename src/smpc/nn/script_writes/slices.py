"""Parameters of which a rank has a slice: scripts that write into them between steps get values that know it (`slice_values`, beside).

    note_slices(model, {"layers.0.weight": 0})

    with torch.no_grad(): weight[3] = 0        in code that is neither torch's nor smpc's: SliceValues are asked
    weight.data, weight.grad                   SliceValues, in such code

Between steps such a parameter has a class of its own (`classes`, beside). Where gradients are recorded, it behaves as ever.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer
from torch.utils._pytree import tree_map

from smpc.nn.script_writes.classes import after_steps, between_steps
from smpc.nn.script_writes.data_aliases import CountedParameter, assign_data, read_data
from smpc.nn.script_writes.slice_values import (
    OfSlice,
    SliceValues,
    answer,
    check_whole,
    computes,
    is_script,
    plain,
    told,
)

_SLICE_OF = "_smpc_slice_of"  # of a parameter: its name, its place, and the dimension
_TORCHS: Any = nn.Parameter


class SliceParameter(CountedParameter):
    """See above."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Of what scripts compute without gradients, and of what they detach, SliceValues decide."""
        name = getattr(func, "__name__", "")
        is_recorded = torch.is_grad_enabled() and name != "detach"
        if is_recorded or name == "__get__" or not is_script() or not computes(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        seen: dict[int, Tensor] = {}  # by id of the alias, the parameter
        values, named = tree_map(functools.partial(_alias, seen), (tuple(args), dict(kwargs or {})))
        result = answer(func, values, named)
        return seen.get(id(result), result)

    @property
    def data(self) -> Tensor:
        """An alias of the memory."""
        found = read_data(self)
        return _seen(self, found) if is_script() else found

    @data.setter
    def data(self, value: Tensor) -> None:
        assign_data(self, _ordinary(value))

    @property
    def grad(self) -> Tensor | None:
        """The gradient itself, which knows that it is one of a slice."""
        with torch._C.DisableTorchFunctionSubclass():
            found = super().grad
            known = None if found is None else _known(self, found)
        return found if found is None or known is None else told(found, known)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            check_whole(value)
        with torch._C.DisableTorchFunctionSubclass():
            _TORCHS.grad.__set__(self, value)


def note_slices(model: nn.Module, dims: Mapping[str, int]) -> None:
    """This rank has slices of these parameters, by name, along these dimensions."""
    _support()
    paths = {name: name.rpartition(".") for name in dims}
    places = [(_Place(model.get_submodule(path), own), name) for name, (path, _, own) in paths.items()]

    def note() -> None:
        for place, name in places:
            parameter = place()
            if parameter is not None and not isinstance(parameter, DTensor):
                vars(parameter)[_SLICE_OF] = name, place, dims[name]
                between_steps(parameter, SliceParameter)

    note()
    after_steps(model, note)


class _Place:
    """Where a module has a parameter. Copies of it, in files, are nowhere."""

    def __init__(self, module: nn.Module, own: str) -> None:
        self._module, self._own = weakref.ref(module), own

    def __call__(self) -> nn.Parameter | None:
        module = self._module()
        return None if module is None else module._parameters.get(self._own)

    def __reduce__(self) -> Any:
        return _Place, (nn.Module(), self._own)


@functools.cache
def _support() -> None:
    """Optimizers choose by the class, and `nn.Parameter(weight.data * 2)` would be of the class of its values."""
    optimizer._foreach_supported_types.append(SliceParameter)
    torchs = nn.Parameter.__new__

    @functools.wraps(torchs)
    def make(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        return torchs(cls, _ordinary(data, "nn.Parameter"), *args, **kwargs)

    nn.Parameter.__new__ = make  # type: ignore[method-assign]


def _alias(seen: dict[int, Tensor], value: Any) -> Any:
    if not isinstance(value, SliceParameter):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        alias = _seen(value, value.detach())
    seen[id(alias)] = value
    return alias


def _seen(parameter: Tensor, alias: Tensor) -> Tensor:
    known = _known(parameter, alias)
    return alias if known is None else told(alias.detach(), known)


def _known(parameter: Tensor, tensor: Tensor) -> OfSlice | None:
    """What a tensor of the parameter's layout is to know."""
    found = vars(parameter).get(_SLICE_OF)
    if found is None or type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.dim() <= found[2]:
        return None
    name, place, dim = found
    return OfSlice.of(name, place, dim, tensor)


def _ordinary(value: Any, what: str = "weight.data = ...") -> Any:
    if isinstance(value, SliceValues):
        check_whole(value, what)
        return plain(value)
    return value
