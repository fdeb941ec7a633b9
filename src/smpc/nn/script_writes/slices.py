"""Parameters of which a rank has a slice: scripts that write into them between steps get values that know it (`slice_values`, beside).

    note_slice(parameter, "layers.0.weight", dim=0)

    with torch.no_grad(): weight[3] = 0        in code that is neither torch's nor smpc's: SliceValues are asked
    weight.data, weight.grad                   SliceValues, in such code


Between steps such a parameter has a class of its own (`classes`, beside). Where gradients are recorded, it behaves as ever.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.overrides import handle_torch_function
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from smpc.nn.script_writes.classes import between_steps
from smpc.nn.script_writes.data_aliases import CountedParameter, assign_data, read_data
from smpc.nn.script_writes.slice_values import OfSlice, SliceValues, check_whole, plain, seen_as

_slices: Any = WeakTensorKeyDictionary()  # parameter: (name, dimension)
_TORCHS: Any = nn.Parameter
_OWN = ("torch", "smpc")


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
        if name == "__get__" or (torch.is_grad_enabled() and name != "detach") or not _is_script():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        seen: dict[int, Tensor] = {}  # by id of the alias, the parameter
        values, named = tree_map(functools.partial(_alias, seen), (tuple(args), dict(kwargs or {})))
        result = func(*values, **named)
        return seen.get(id(result), result)

    @property
    def data(self) -> Tensor:
        """An alias of the memory."""
        found = read_data(self)
        return _seen(self, found) if _is_script() else found

    @data.setter
    def data(self, value: Tensor) -> None:
        assign_data(self, _ordinary(value))

    @property
    def grad(self) -> Tensor | None:
        """The gradient; for scripts an alias."""
        with torch._C.DisableTorchFunctionSubclass():
            found = super().grad
        return found if found is None or not _is_script() else _seen(self, found)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            before = super().grad
            is_own = isinstance(value, SliceValues) and before is not None and before.data_ptr() == value.data_ptr()
            given = before if is_own and value is not None and value.shape == self.shape else _ordinary(value)
            _TORCHS.grad.__set__(self, given)


def note_slice(parameter: nn.Parameter, name: str, dim: int) -> None:
    """This rank has a slice of a parameter along a dimension."""
    _support_foreach()
    _slices[parameter] = name, dim
    between_steps(parameter, SliceParameter)


@functools.cache
def _support_foreach() -> None:
    """Optimizers choose by the class."""
    optimizer._foreach_supported_types.append(SliceParameter)


def _alias(seen: dict[int, Tensor], value: Any) -> Any:
    if not isinstance(value, SliceParameter):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        alias = _seen(value, value.detach())
    seen[id(alias)] = value
    return alias


def _seen(parameter: Tensor, alias: Tensor) -> Tensor:
    found = _slices.get(parameter)
    if found is None or type(alias) is not Tensor or alias.layout is not torch.strided or alias.dim() <= found[1]:
        return alias
    name, dim = found
    return seen_as(alias, OfSlice.of(name, dim, alias))


def _ordinary(value: Any) -> Any:
    if isinstance(value, SliceValues):
        check_whole(value)
        return plain(value)
    return value


def _is_script() -> bool:
    """Whether the code that uses a parameter is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code is handle_torch_function.__code__:
        frame = frame.f_back and frame.f_back.f_back  # a function of torch's that is written in Python asks by this
    module: str = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.partition(".")[0] not in _OWN
