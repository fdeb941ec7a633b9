"""Notes that parameters of a model are slices, and the whole tensor behind each, for `smpc.nn.init.nn_init_on_slices`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, Layout, LayoutKind
from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup
from smpc.executor.parameter_slices import slice_of
from smpc.executor.shared_draws import draw_as_first
from smpc.nn.init.nn_init_on_slices import WholeTensor, fill_whole
from smpc.nn.parallel import DistributedModule, own_part_of, whole_shape
from smpc.nn.script_writes.dtensor_writes import write_parts_as_wholes
from smpc.nn.script_writes.slice_parameters import Place, note_slices
from smpc.sharding.dtensors import local, own_part_of_sharded, sharded_like

_rows: weakref.WeakKeyDictionary[nn.Module, tuple[Mapping[str, tuple[int, range]], TensorGroup]] = (
    weakref.WeakKeyDictionary()
)  # of models whose rows one group has, before another cuts these
ShapeOf = Callable[[str, Tensor], tuple[torch.Size, bool] | None]


def _as_it_is(name: str, parameter: Tensor) -> tuple[torch.Size, bool]:
    return parameter.shape, True


def note_sliced(
    model: nn.Module, layouts: Mapping[str, Layout], group: TensorGroup, shape_of: ShapeOf = _as_it_is
) -> None:
    """Ranks of `group` have slices of a model's parameters, by name; of others all. `shape_of`: a slice, and whether this rank has it; None
    once nobody knows. It must not keep the model, which is kept here no longer than elsewhere.
    """

    def whole_of(name: str, tensor: Tensor) -> WholeTensor | None:
        found = shape_of(name, tensor)
        if found is None:
            return None
        shape, has_part = found
        layout = layouts.get(name, REPLICATED)

        def cut(whole: Tensor) -> Tensor:
            return _own_part(tensor, slice_of(whole, layout, group))

        return WholeTensor(torch.Size(layout.whole_shape(shape, group.size)), cut if has_part else None)

    _note(model, whole_of, group)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if group.size > 1:
        sliced = {name: layouts[name] for name in names if name in layouts}
        dims = {name: each.dim for name, each in sliced.items() if each.kind is LayoutKind.SHARDED}
        note_slices(model, dims, group, whole=_others(model, [n for n, each in layouts.items() if each != REPLICATED]))


def note_distributed(model: nn.Module, group: TensorGroup) -> None:
    """Ranks of `group` have slices of the parameters of a model's distributed modules; of others all."""
    seen = weakref.ref(model)

    def whole_of(name: str, tensor: Tensor) -> WholeTensor | None:
        prefix, _, own = name.rpartition(".")
        owner = cast(nn.Module, seen()).get_submodule(prefix)  # which has the tensor
        shard = owner.shards.get(own) if isinstance(owner, DistributedModule) else None
        if not tensor.numel():
            return None  # it is on other ranks

        def cut(whole: Tensor) -> Tensor:
            return _own_part(tensor, own_part_of(whole, shard, tensor.shape))

        return WholeTensor(torch.Size(whole_shape(tensor, shard)), cut)

    _note(model, whole_of, group)
    if group.size > 1:
        owners = ((prefix, each) for prefix, each in model.named_modules() if isinstance(each, DistributedModule))
        shards = {f"{prefix}.{own}".lstrip("."): shard for prefix, each in owners for own, shard in each.shards.items()}
        note_slices(model, {n: each.dim for n, each in shards.items()}, group, whole=_others(model, shards))


def _others(model: nn.Module, sliced: Collection[str]) -> list[str]:
    """The names of the parameters that all ranks have whole; one may have several names, of which `sliced` has one."""
    named = [*model.named_parameters(remove_duplicate=False)]
    taken = {id(each) for name, each in named if name in sliced}
    return [name for name, each in named if id(each) not in taken]


def note_rows(
    model: nn.Module,
    rows: Mapping[str, tuple[int, range]],
    group: TensorGroup,
    prefix: str = "",
    *,
    of_one: Collection[str] = (),
    whole: Collection[str] = (),
    guesses: bool = False,
) -> None:
    """Ranks of `group` have rows of a model's parameters. `rows`: by name, how many there are, and which this rank has; others have the
    rest.

    `prefix`: of the names in messages. `of_one`: parameters of which one rank has all rows; `guesses`: the others do not know of their
    gradients. `whole`: what all ranks have whole.
    """

    def whole_of(name: str, tensor: Tensor) -> WholeTensor | None:
        if name not in rows:
            return None
        count, mine = rows[name]

        def cut(whole: Tensor) -> Tensor:
            return _own_part(tensor, whole[mine.start : mine.stop])

        return WholeTensor(torch.Size((count, *tensor.shape[1:])), cut)

    _note(model, whole_of, group)
    _rows[model] = rows, group
    divided = dict.fromkeys((name for name in rows if name not in of_one), 0)
    note_slices(model, divided, group, prefix, whole, of_one, guesses)


@dataclass(frozen=True, slots=True)
class NotedCut:
    """How a parameter of this shape is sliced: this rank has `own_shape` of it, which is `cut` of the whole, and ranks of `groups` have the
    others. The last group has cut along `dim`."""

    dim: int
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    cut: Callable[[Tensor], Tensor]
    groups: tuple[TensorGroup, ...]


def note_cuts(model: nn.Module, cuts: Mapping[str, NotedCut], group: TensorGroup) -> None:
    """Ranks of `group`, the last that has cut, have slices of a model's parameters, by name. The model may be wrapped afterwards."""
    places = {name: Place.of(model, name) for name in cuts}

    def find(tensor: Tensor) -> WholeTensor | None:
        name = next((name for name, place in places.items() if _is_held(tensor, place())), None)
        if name is None or tuple(tensor.shape) != cuts[name].own_shape:
            return None
        found = cuts[name]
        whole = torch.Size(found.shape)
        return WholeTensor(
            whole, lambda values: _own_part(tensor, found.cut(values)), lambda: _draw_alike(tensor, found.groups)
        )

    weakref.finalize(model, fill_whole(find))
    note_slices(model, {name: each.dim for name, each in cuts.items()}, group)


def _is_held(tensor: Tensor, parameter: nn.Parameter | None) -> bool:
    """Whether a tensor is a parameter, or all of its memory."""
    if parameter is None or isinstance(tensor, nn.Parameter):
        return tensor is parameter
    own, other = local(parameter), local(tensor)
    if own.is_meta or other.is_meta or not own.numel() or own.shape != other.shape or own.stride() != other.stride():
        return False
    return own.data_ptr() == other.data_ptr()


@functools.cache
def note_parts() -> None:
    """Ranks have parts (DTensors) of parameters that `fully_shard` has divided; what knows more of one comes first. What scripts write into
    parts is written as into wholes (`smpc.nn.script_writes.dtensor_writes`)."""

    def find(tensor: Tensor) -> WholeTensor | None:
        if not isinstance(tensor, DTensor) or not any(isinstance(place, Shard) for place in tensor.placements):
            return None
        return WholeTensor(tensor.shape, lambda whole: _own_part(tensor, whole), lambda: _draw_alike(tensor, ()))

    fill_whole(find, comes_last=True)
    write_parts_as_wholes()


def _note(model: nn.Module, whole_of: Callable[[str, Tensor], WholeTensor | None], group: TensorGroup) -> None:
    seen = weakref.ref(model)

    def find(tensor: Tensor) -> WholeTensor | None:
        model = seen()
        name = None if model is None else named_as(tensor, model)
        found = None if name is None else whole_of(name, tensor)
        if model is None or name is None or found is None:
            return None
        rows, others = _rows.get(model, ({}, group))
        if name in rows and group is not others:
            return replace(_of_all_rows(found, *rows[name]), begin=lambda: _draw_alike(tensor, (group, others)))
        return replace(found, begin=lambda: _draw_alike(tensor, (group,)))

    if group.size > 1:
        weakref.finalize(model, fill_whole(find))


def _of_all_rows(found: WholeTensor, count: int, mine: range) -> WholeTensor:
    """Of what is all of some rows, what it is of all."""
    cut = found.cut
    whole = None if cut is None else lambda values: cut(values[mine.start : mine.stop])
    return WholeTensor(torch.Size((count, *found.shape[1:])), whole)


def _draw_alike(tensor: Tensor, groups: Sequence[TensorGroup]) -> None:
    """Ranks draw as the first of those that have the other slices and parts of a tensor."""
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    parts = [] if mesh is None else [TensorGroup.of(mesh.get_group(dim)) for dim in reversed(range(mesh.ndim))]
    for group in (*parts, *groups):
        draw_as_first(group, local(tensor).device)


def _own_part(tensor: Tensor, whole: Tensor) -> Tensor:
    return sharded_like(tensor, own_part_of_sharded(tensor, whole))


def named_as(tensor: Tensor, model: nn.Module) -> str | None:
    """The name of the parameter that a tensor is, or whose memory it has (`weight.data`). UsageError for a part of one's memory."""
    if isinstance(tensor, nn.Parameter):
        return next((name for name, parameter in model.named_parameters() if parameter is tensor), None)
    memory = local(tensor).untyped_storage().data_ptr()
    for name, parameter in model.named_parameters():
        own = local(parameter)
        if own.is_meta or not own.numel() or own.untyped_storage().data_ptr() != memory:
            continue
        if tensor.shape == parameter.shape and tensor.stride() == parameter.stride():
            return name
        raise UsageError(
            f"{name}: expected random numbers for all of a parameter of which this rank has {list(own.shape)}, as what one process draws "
            f"is drawn and cut, found them for a part of shape {list(tensor.shape)}; fill a whole tensor, and load it with load_state_dict"
        )
    return None
