"""Parameters of which a rank has a slice: scripts that write into them between steps get values that know it (`slice_values`, beside).

    note_slices(model, {"layers.0.weight": 0}, group, whole=["layers.0.bias"])

    with torch.no_grad(): weight[3] = 0        in code that is neither torch's nor smpc's: SliceValues are asked
    weight.data, weight.grad                   SliceValues, in such code

    note_own(model, ["layers.0.weight"])       this pipeline rank's; other ranks' are absent (`smpc.absent`), and have
    without_rows("layers.1.weight", ...)       SliceValues without rows, so that what is summed up over all is known to be partial

Between steps such a parameter has a class of its own (`between_steps`, beside). Where gradients are recorded, it behaves as ever. A slice
may be in parts on replicas (a DTensor), and of a slice that one group has, another may have slices.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened
from torch.distributed.tensor import DTensor
from torch.optim import optimizer
from torch.utils._pytree import tree_map

from smpc.executor.collectives import TensorGroup
from smpc.nn.script_writes.between_steps import PlaceOfParameter, after_steps, between_steps
from smpc.nn.script_writes.callers import is_script
from smpc.nn.script_writes.compare_writes import Writes
from smpc.nn.script_writes.data_aliases import CountedParameter, assign_data, read_data
from smpc.nn.script_writes.script_collectives import is_collective
from smpc.nn.script_writes.slice_provenance import OfSlice, OfWhole, Ranks, computes, plain
from smpc.nn.script_writes.slice_sizes import WithSizes
from smpc.nn.script_writes.slice_values import (
    SlicePartValues,
    SliceValues,
    answer,
    are_asked_first,
    check_whole,
    communicate,
    is_writing,
    known_result,
    note_write,
    told,
)
from smpc.nn.script_writes.uncompiled import leave_to_python
from smpc.nn.script_writes.undifferentiated import undifferentiated

_SLICE_OF = "_smpc_slice_of"  # of a parameter: its name, its place, and the dimension
_TORCHS: Any = nn.Parameter
_WITHOUT_GRADIENTS = ("detach", "rand_like", "randn_like", "randint_like")
_VIEWS = ("T", "mT", "H", "mH", "real", "imag")


class SliceParameter(WithSizes, CountedParameter):
    """See above."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Of what scripts compute without gradients, detach, and draw alike, SliceValues decide."""
        if are_asked_first(types):
            return NotImplemented
        name = getattr(func, "__name__", "")
        is_recorded = torch.is_grad_enabled() and name not in _WITHOUT_GRADIENTS
        if is_collective(func):
            return communicate(func, *tree_map(functools.partial(_alias, {}), (tuple(args), dict(kwargs or {}))))
        if is_recorded or name == "__get__" or not is_script():
            with torch._C.DisableTorchFunctionSubclass():
                if is_recorded and is_script() and _reads_values(func, name, kwargs or {}):
                    args, kwargs = tree_map(_looked_at, (tuple(args), dict(kwargs or {})))
                return func(*args, **(kwargs or {}))
        if not computes(func):
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
                if any(result is each for each in args):
                    return result
                values, named = tree_map(functools.partial(_alias, {}), (tuple(args), dict(kwargs or {})))
                return known_result(name, func, values, named, result)
        return answered(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """An alias of the memory."""
        found = read_data(self)
        return _seen(self, found) if is_script() else found

    @data.setter
    def data(self, value: Tensor) -> None:
        ordinary = _ordinary(value)
        if is_script():
            _note_write(self, "copy_", value)
        assign_data(self, ordinary)

    def _sized_as(self) -> OfSlice | None:
        with torch._C.DisableTorchFunctionSubclass():
            found = _known(self, self.detach())
        return found if isinstance(found, OfSlice) else None

    @property
    def grad(self) -> Tensor | None:
        """The gradient itself, which knows that it is one of a slice."""
        with torch._C.DisableTorchFunctionSubclass():
            found = super().grad
            of = vars(self).get(_SLICE_OF) if found is None and self.requires_grad else None
            if isinstance(of, _SliceOf) and is_script() and of.has_gradient:
                found = torch.empty_like(self.detach())
            known = None if found is None else _known(self, found)
        return found if found is None or known is None else told(found, known)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            check_whole(value, "weight.grad = ...")
            if is_script():
                _note_write(self, "copy_", value)
        with torch._C.DisableTorchFunctionSubclass():
            _TORCHS.grad.__set__(self, value)


class SlicePartParameter(SliceParameter, DTensor):
    """The same of a slice that replicas have in parts."""

    @property
    def data(self) -> Tensor:
        """An alias of the parts."""
        found: Tensor = vars(DTensor)["data"].__get__(self)
        return _seen(self, found) if is_script() else found

    @data.setter
    def data(self, value: Tensor) -> None:
        ordinary = _ordinary(value)
        if is_script():
            _note_write(self, "copy_", value)
        vars(DTensor)["data"].__set__(self, ordinary)


def answered(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a script gets of a function of torch's, of parameters too."""
    seen: dict[int, Tensor] = {}  # by id of the alias, the parameter
    values, named = tree_map(functools.partial(_alias, seen), (tuple(args), dict(kwargs)))
    result = answer(func, values, named)
    return seen.get(id(result), result)


def note_slices(
    model: nn.Module,
    dims: Mapping[str, int],
    group: TensorGroup,
    prefix: str = "",
    whole: Iterable[str] = (),
    of_one: Iterable[str] = (),
    guesses: bool = False,
    are_replicas: bool = False,
) -> None:
    """Ranks of `group` have slices of these parameters, by name, along these dimensions. Before anything puts the slices into parts.

    `prefix`: of the model, in names that messages have. `whole`: names of parameters that all of them have whole; `of_one`: of those that
    one of them has whole, and the others without rows. `guesses`: these do not know whether that one has a gradient. `are_replicas`: FSDP1
    may give each of them other elements of what all have whole, so that nothing is to be compared.
    """
    if group.process_group is None or group.size == 1:
        return
    _support()
    ranks = _ranks_of(group.process_group)
    writes = Writes(model, group)
    found: list[_SliceOf | _WholeOf] = []
    for name in whole:
        place, known_as = Place.of(model, name), f"{prefix}.{name}".lstrip(".")
        found.append(_WholeOf(known_as, place, writes, are_replicas=are_replicas))
    for name in of_one:
        place, known_as = Place.of(model, name), f"{prefix}.{name}".lstrip(".")
        parameter = place()
        if parameter is not None and parameter.numel():
            found.append(_WholeOf(known_as, place, writes, is_everywhere=False))
        elif parameter is not None:
            others = weakref.ref(model) if guesses else None
            found.append(_SliceOf(known_as, place, (0,), (ranks,), writes, parameter.shape, others))
    for name, dim in dims.items():
        place = Place.of(model, name)
        found.append(_SliceOf(f"{prefix}.{name}".lstrip("."), place, (dim,), (ranks,), writes).beside(place()))
    _note(model, found)


def note_own(model: nn.Module, names: Mapping[str, Ranks], writes: Writes) -> None:
    """This rank has these parameters whole, and not all of the model's. `names`: for each name, all ranks that have it, if this rank is not
    the first of several. `writes`: where writes of scripts are noted."""
    _support()
    _note(model, [_WholeOf(name, Place.of(model, name), writes, False, again) for name, again in names.items()])


def without_rows(
    name: str,
    parameter: Tensor,
    values: Tensor,
    ranks: Ranks,
    holders: str,
    hide: Callable[[str], Exception] | None = None,
    writes: Writes | None = None,
) -> SliceValues:
    """What a script sees of `values`, which have no rows, in the place of a parameter that `holders` among these ranks have, or of its
    gradient. `hide`: the error for reading what is computed of them, by what reads it. `writes`: as above."""
    found = OfSlice.of(name, lambda: parameter, (0,), (ranks,), values)
    return told(values, replace(found, is_held=True, holders=holders, hide=hide, writes=writes))


def _note(model: nn.Module, known: Sequence[_SliceOf | _WholeOf]) -> None:
    """Now, and after each step."""

    def note() -> None:
        for of in known:
            parameter = of.place()
            if parameter is None or (of.is_in_parts and not isinstance(parameter, DTensor)):
                continue  # not there, or gathered for a while, such as in a backward that runs a module again
            of.is_in_parts = isinstance(parameter, DTensor)
            of.note(parameter)

    after_steps(model, note, [of.place.at for of in known])


def _ranks_of(group: dist.ProcessGroup) -> Ranks:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:  # torch.distributed has not made it, and scripts cannot call its functions with it
        return tuple(range(group.size()))


@dataclass(slots=True)
class _SliceOf:
    """What is known of a parameter. `shape`: of the slice, once there is one. `model`: of one without rows, where to look for gradients.
    `is_in_parts`: on replicas, between steps."""

    name: str
    place: Place
    dims: tuple[int, ...]
    groups: tuple[Ranks, ...]
    writes: Writes
    shape: torch.Size | None = None
    model: Callable[[], nn.Module | None] | None = None
    is_in_parts: bool = False

    @property
    def has_gradient(self) -> bool:
        """Whether a script finds a gradient without rows where there is none: others of the model have one."""
        model = None if self.model is None else self.model()
        return model is not None and any(_TORCHS.grad.__get__(each) is not None for each in model.parameters())

    def like(self, tensor: Tensor) -> OfSlice | None:
        """What a tensor of the slice's layout is to know."""
        if tensor.layout is not torch.strided or tensor.shape != self.shape:
            return None
        found = OfSlice.of(self.name, self.place, self.dims, self.groups, tensor)
        return found if len(self.groups) > 1 else replace(found, writes=self.writes, is_held=found.is_empty)

    def note(self, parameter: nn.Parameter) -> None:
        """Have a parameter of this place know it, if it is the slice: what others have made of it is theirs."""
        if self.shape is None and not isinstance(parameter, DTensor) and parameter.numel():
            self.shape = parameter.shape
        if parameter.shape == self.shape:
            vars(parameter)[_SLICE_OF] = self
            between_steps(parameter, SlicePartParameter if isinstance(parameter, DTensor) else SliceParameter)

    def beside(self, parameter: nn.Parameter | None) -> _SliceOf:
        """The same of a slice of which another group has slices already."""
        other = None if parameter is None else vars(parameter).get(_SLICE_OF)
        if not isinstance(other, _SliceOf):
            return self
        groups = tuple(dict.fromkeys((*other.groups, *self.groups)))
        return replace(self, dims=tuple(dict.fromkeys((*other.dims, *self.dims))), groups=groups)


@dataclass(slots=True)
class _WholeOf:
    """What is known of a parameter that this rank has whole."""

    name: str
    place: Place
    writes: Writes | None
    is_everywhere: bool = True
    again: Ranks = ()
    is_in_parts: bool = False
    are_replicas: bool = False

    def note(self, parameter: nn.Parameter) -> None:
        """Have a parameter of this place know it, unless it is known as a slice, or others compare what is written into it."""
        known_as = vars(parameter).get(_SLICE_OF)
        if known_as is None or (isinstance(known_as, _WholeOf) and known_as.writes is None):
            vars(parameter)[_SLICE_OF] = self
            between_steps(parameter, SlicePartParameter if isinstance(parameter, DTensor) else SliceParameter)

    def like(self, tensor: Tensor) -> OfWhole:
        """What an alias, or the gradient, is to know."""
        return OfWhole(self.name, self.place, self.writes, self.is_everywhere, self.again)


class Place:
    """Where a module has a parameter, whatever wraps the module. Copies of it, in files, are nowhere."""

    def __init__(self, module: nn.Module, own: str) -> None:
        self._module, self._own = weakref.ref(module), own

    @classmethod
    def of(cls, model: nn.Module, name: str) -> Place:
        """The place that has a name in a model."""
        path, _, own = name.rpartition(".")
        return cls(model.get_submodule(path), own)

    @property
    def at(self) -> PlaceOfParameter:
        """The module, and its own name for the parameter."""
        return self._module, self._own

    def __call__(self) -> nn.Parameter | None:
        """What is there now."""
        module = self._module()
        return None if module is None else module._parameters.get(self._own)

    def __reduce__(self) -> Any:
        return Place, (nn.Module(), self._own)


@functools.cache
def _support() -> None:
    """Optimizers choose by the class, and `nn.Parameter(weight.data * 2)` would be of the class of its values."""
    leave_to_python(__package__, SliceValues, SlicePartValues, SliceParameter, SlicePartParameter)
    optimizer._foreach_supported_types += [SliceParameter, SlicePartParameter]
    torchs = nn.Parameter.__new__

    @functools.wraps(torchs)
    def make(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        return torchs(cls, _ordinary(data, "nn.Parameter"), *args, **kwargs)

    nn.Parameter.__new__ = make  # type: ignore[method-assign]


def _reads_values(func: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function computes of what it is given, and leaves it as it is."""
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _VIEWS  # type: ignore[attr-defined]
    return computes(func) and not is_writing(name, kwargs)


def _looked_at(value: Any) -> Any:
    """What a script may compute of a parameter where gradients are recorded."""
    of = vars(value).get(_SLICE_OF) if isinstance(value, SliceParameter) and value.requires_grad else None
    return undifferentiated(value, of.name) if isinstance(of, _SliceOf) else value


def _alias(seen: dict[int, Tensor], value: Any) -> Any:
    if not isinstance(value, SliceParameter):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        alias = _seen(value, value.detach())
    seen[id(alias)] = value
    return alias


def _note_write(parameter: Tensor, what: str, value: Tensor) -> None:
    """A script exchanges the values of a slice, or of its gradient, for others."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        with torch._C.DisableTorchFunctionSubclass():
            alias = _seen(parameter, parameter.detach())
            note_write(what, alias, (alias, value), {})


def _seen(parameter: Tensor, alias: Tensor) -> Tensor:
    known = _known(parameter, alias)
    return alias if known is None else told(alias.detach(), known)


def _known(parameter: Tensor, tensor: Tensor) -> OfSlice | OfWhole | None:
    """What a tensor of the parameter's layout is to know."""
    of: _SliceOf | _WholeOf | None = vars(parameter).get(_SLICE_OF)
    if isinstance(of, _WholeOf) and of.are_replicas and _is_fsdp_flattened(parameter):
        of = replace(of, writes=None)
    return None if of is None or type(tensor) not in (Tensor, DTensor) else of.like(tensor)


def _ordinary(value: Any, what: str = "weight.data = ...") -> Any:
    if isinstance(value, SliceValues):
        check_whole(value, what)
        return plain(value)
    return value
