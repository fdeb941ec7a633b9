"""Models whose parameters are slices, for `smpc.nn.init.whole_fills`: the whole tensor behind each."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, Layout, LayoutKind
from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup
from smpc.executor.draws import draw_as_first
from smpc.executor.sharded_state import slice_of
from smpc.nn.init.whole_fills import WholeTensor, fill_whole
from smpc.nn.parallel import DistributedModule, own_part_of, whole_shape
from smpc.nn.script_writes.parts import write_parts_as_wholes
from smpc.nn.script_writes.slices import note_slices
from smpc.sharding.tensors import local, own_part_of_sharded, sharded_like

ShapeOf = Callable[[str, Tensor], tuple[torch.Size, bool]]


def _as_it_is(name: str, parameter: Tensor) -> tuple[torch.Size, bool]:
    return parameter.shape, True


def note_sliced(
    model: nn.Module, layouts: Mapping[str, Layout], group: TensorGroup, shape_of: ShapeOf = _as_it_is
) -> None:
    """Ranks of `group` have slices of a model's parameters, by name; of others all. `shape_of`: a slice, and whether this rank has it."""

    def whole_of(name: str, tensor: Tensor) -> WholeTensor:
        shape, has_part = shape_of(name, tensor)
        layout = layouts.get(name, REPLICATED)

        def cut(whole: Tensor) -> Tensor:
            return _own_part(tensor, slice_of(whole, layout, group))

        return WholeTensor(torch.Size(layout.whole_shape(shape, group.size)), cut if has_part else None)

    _note(model, whole_of, group)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if group.size > 1:
        sliced = {name: layouts[name] for name in names if name in layouts}
        note_slices(model, {name: each.dim for name, each in sliced.items() if each.kind is LayoutKind.SHARDED}, group)


def note_distributed(model: nn.Module, group: TensorGroup) -> None:
    """Ranks of `group` have slices of the parameters of a model's distributed modules; of others all."""

    def whole_of(name: str, tensor: Tensor) -> WholeTensor | None:
        prefix, _, own = name.rpartition(".")
        owner = model.get_submodule(prefix)
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
        note_slices(model, {name: shard.dim for name, shard in shards.items()}, group)


def note_rows(model: nn.Module, rows: Mapping[str, tuple[int, range]], group: TensorGroup, prefix: str = "") -> None:
    """Ranks of `group` have rows of a model's parameters, by name: of how many, which this rank has; others are theirs. `prefix`: of the
    names in messages."""

    def whole_of(name: str, tensor: Tensor) -> WholeTensor | None:
        if name not in rows:
            return None
        count, mine = rows[name]

        def cut(whole: Tensor) -> Tensor:
            return _own_part(tensor, whole[mine.start : mine.stop])

        return WholeTensor(torch.Size((count, *tensor.shape[1:])), cut)

    _note(model, whole_of, group)
    note_slices(model, dict.fromkeys(rows, 0), group, prefix)


@functools.cache
def note_parts() -> None:
    """Of parameters that `fully_shard` has divided ranks have parts, DTensors; what knows more of one comes first. What scripts write into
    parts is written as into wholes (`smpc.nn.script_writes.parts`)."""

    def find(tensor: Tensor) -> WholeTensor | None:
        if not isinstance(tensor, DTensor) or not any(isinstance(place, Shard) for place in tensor.placements):
            return None
        mesh = tensor.device_mesh

        def begin() -> None:
            for dim in reversed(range(mesh.ndim)):
                draw_as_first(TensorGroup.of(mesh.get_group(dim)), local(tensor).device)

        return WholeTensor(tensor.shape, lambda whole: _own_part(tensor, whole), begin)

    fill_whole(find, comes_last=True)
    write_parts_as_wholes()


def _note(model: nn.Module, whole_of: Callable[[str, Tensor], WholeTensor | None], group: TensorGroup) -> None:
    seen = weakref.ref(model)

    def find(tensor: Tensor) -> WholeTensor | None:
        model = seen()
        name = None if model is None else named_as(tensor, model)
        found = None if name is None else whole_of(name, tensor)
        return None if found is None else replace(found, begin=lambda: draw_as_first(group, local(tensor).device))

    if group.size > 1:
        weakref.finalize(model, fill_whole(find))


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
