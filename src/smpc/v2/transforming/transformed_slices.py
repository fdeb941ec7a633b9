"""The slices of a transformed model on a tensor-parallel rank: how ranks agree on them, and how wrappers exchange whole tensors.

FSDP1    parameters are slices, which it shards as if each were the whole
FSDP2    parameters are DTensors of (replica, shard, tensor), as torch makes them for tensor parallelism. A slice that cannot be one is
         sharded as if it were the whole

Full state dicts of either have whole tensors (`full_state`), and checkpoints do (`as_boxes`).

`agree_on_weights` and `keep_slices`: the ranks of a tensor- or expert-parallel group agree on the weights, and each keeps its slices.

load_state_dict_from_rank0    sources                    who has weights afterwards
False                         None                       all ranks that had some: the first rank's of each group, in slices
True                          the ranks that have some   the groups whose first rank is a source; others wait for `sync_module_states`

From rank 0 its expert-parallel group gets weights, of which each rank has experts of its own; from each of these its tensor-parallel group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from smpc.checkpoint.format.draft_content import Shard as HeldShard
from smpc.checkpoint.stateful import HeldTensor
from smpc.codegen.rewrite.tensor_parallel.layouts import Layout
from smpc.errors import CheckpointError
from smpc.executor.collectives import Pieces, TensorGroup, gathered, pieces_of
from smpc.executor.parameter_slices import replacement, slice_parameters, whole_of
from smpc.in_place.model_copy import plain_name, unwrapped
from smpc.nn.init.note_slices import NotedCut, note_cuts
from smpc.nn.script_writes.between_steps import notice_again

Box = tuple[tuple[int, ...], Tensor]  # where it begins in the whole tensor, and what the rank has of it

_SLICES = "_smpc_slices"  # of a transformed model


@dataclass(frozen=True, slots=True)
class SliceCut:
    """How the ranks of a group slice a tensor of this shape in the layout. `is_even`: slices have one size. `owner`: who has all of it."""

    layout: Layout
    shape: tuple[int, ...]
    group: TensorGroup
    is_even: bool = True
    owner: int | None = None

    @property
    def pieces(self) -> Pieces:
        """The pieces of the dimension that is cut, as they are on this rank."""
        layout, size = self.layout, self.shape[self.layout.dim]
        if self.owner is not None:
            return ((0, size if self.group.rank == self.owner else 0),)
        if not self.is_even:
            return ((self.group.start(size), self.group.share(size)),)
        return pieces_of(self.group.rank, size, self.group.size, layout.blocks, layout.mirrored)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        dim = self.layout.dim
        return (*self.shape[:dim], sum(length for _, length in self.pieces), *self.shape[dim + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """This rank's slice of a whole tensor, outside autograd."""
        return torch.cat([whole.detach().narrow(self.layout.dim, *piece) for piece in self.pieces], self.layout.dim)

    def whole(self, own: Tensor) -> Tensor:
        """The whole tensor of the slices of all ranks of the group. Collective."""
        size, dim = self.shape[self.layout.dim], self.layout.dim
        if self.owner is not None:
            found = own.detach().contiguous() if self.group.rank == self.owner else own.new_empty(self.shape)
            assert self.group.process_group is not None
            dist.broadcast(found, dist.get_global_rank(self.group.process_group, self.owner), self.group.process_group)
            return found
        if self.is_even:
            return whole_of(own, self.layout, self.group)
        shares = self.group.shares(size)
        padded = torch.cat((own, own.new_zeros(max(shares) - len(own), *own.shape[1:])))
        parts = gathered(padded, dim, self.group).chunk(self.group.size)
        return torch.cat([part[:share] for part, share in zip(parts, shares, strict=True)])

    def boxes(self, boxes: Iterator[Box]) -> Iterator[Box]:
        """Boxes of the slice as boxes of the whole tensor."""
        dim = self.layout.dim
        for start, shard in boxes:
            begin = 0  # of a piece in the slice
            for place, length in self.pieces:
                first = max(begin, start[dim])
                last = min(begin + length, start[dim] + shard.shape[dim])
                if first < last:
                    at = (*start[:dim], place + first - begin, *start[dim + 1 :])
                    yield at, shard.narrow(dim, first - start[dim], last - first)
                begin += length


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A rank's part of a parameter: a slice, or a slice of a slice. Expert-parallel ranks cut before tensor-parallel ones.

    `is_expert`: of experts, which ranks divide that have other samples. `is_inside`: it is used by a module that is called whole, whose
    own Python computes with plain tensors.
    """

    cuts: tuple[SliceCut, ...]
    is_expert: bool = False
    is_inside: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.cuts[0].shape

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the rank's part."""
        return self.cuts[-1].own_shape

    @property
    def group(self) -> TensorGroup:
        """One of the groups whose ranks have the other slices."""
        return self.cuts[0].group

    @property
    def num_holders(self) -> int:
        """How many ranks together have the parameter once."""
        return math.prod(cut.group.size for cut in self.cuts)

    @property
    def is_regular(self) -> bool:
        """Whether it can be a DTensor."""
        return not self.is_expert and not self.is_inside and all(cut.layout.is_plain for cut in self.cuts)

    def is_whole(self, value: Tensor) -> bool:
        """Whether a value is a DTensor that knows of all ranks: of experts, one knows of those that have the same."""
        return isinstance(value, DTensor) and tuple(value.shape) == self.shape and not self.is_expert

    def may_be(self, value: object) -> bool:
        """Whether a value may be this rank's part: alike on all ranks, of which one may have all of it, and others nothing."""
        shapes = (self.own_shape,) if self.cuts[0].owner is None else (self.own_shape, self.shape)
        return isinstance(value, Tensor) and tuple(value.shape) in shapes

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, outside autograd."""
        return functools.reduce(lambda tensor, cut: cut.of(tensor), self.cuts, whole)

    def whole(self, own: Tensor) -> Tensor:
        """The whole tensor of the parts of all ranks. Collective."""
        return functools.reduce(lambda tensor, cut: cut.whole(tensor), reversed(self.cuts), own)

    def boxes(self, boxes: Iterator[Box]) -> Iterator[Box]:
        """Boxes of the rank's part as boxes of the whole tensor."""
        return functools.reduce(lambda found, cut: cut.boxes(found), reversed(self.cuts), boxes)


class PartsByName(dict[str, ParameterPart]):
    """By the names of parameters that this rank has a part of, the part."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PartsByName:
        return self


def device_for(group: TensorGroup, value: Tensor) -> torch.device:
    """Where a value travels between the ranks of a group."""
    assert group.process_group is not None
    if value.is_cpu and dist.get_backend(group.process_group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return value.device


_transformed: list[weakref.ref[nn.Module]] = []  # of this session, in the same order on all ranks


def transformed_models() -> list[nn.Module]:
    """The models of this session that ranks have slices of, the oldest first."""
    return [model for model in (each() for each in _transformed) if model is not None]


def forget_models() -> None:
    """No model of this session is known any more: its groups have ended."""
    _transformed.clear()


def note_slices(model: nn.Module, slices: PartsByName) -> None:
    """Registers this rank's slices of a model; a slice of an earlier part is a part of that part."""
    known = vars(model).setdefault(_SLICES, PartsByName())
    for name, part in slices.items():
        before = known.get(name)
        known[name] = part if before is None else dataclasses.replace(before, cuts=(*before.cuts, *part.cuts))
    if all(model is not each for each in transformed_models()):
        _transformed.append(weakref.ref(model))


def note_writes(model: nn.Module, layouts: Mapping[str, Layout], group: TensorGroup) -> None:
    """Scripts may write into slices that ranks of `group` have, the last that were cut: see `smpc.nn.script_writes`, `smpc.nn.init`."""
    parts = slices_of(model) or PartsByName()

    def noted(name: str) -> NotedCut:
        part = parts[name]
        groups = tuple(cut.group for cut in part.cuts)
        return NotedCut(layouts[name].dim, part.shape, part.own_shape, part.of, groups)

    note_cuts(model, {name: noted(name) for name in layouts}, group)


def notice_writes() -> None:
    """The same after parameters of the session's models have been exchanged for others."""
    for model in transformed_models():
        notice_again(model)


def slices_of(model: nn.Module) -> PartsByName | None:
    """This rank's slices of a model, whatever wraps it; None if it has all of it."""
    found: PartsByName | None = vars(unwrapped(model)).get(_SLICES)
    return found


def is_sliced(module: nn.Module) -> bool:
    """Whether a module belongs to a transformed model of which this rank has slices."""
    return _model_of(module) is not None


def make_distributed(module: nn.Module, mesh: DeviceMesh) -> None:
    """Makes DTensors of the slices of the model that a module belongs to. `mesh`: of the tensor-parallel ranks.

    These stay unchanged: fused weights, whose parts are cut separately, and parameters of modules that are called whole.
    """
    model = _model_of(module)
    slices = None if model is None else slices_of(model)
    if model is None or slices is None:
        return
    made: dict[int, nn.Parameter] = {}
    for name, found in slices.items():
        owner, _, own = name.rpartition(".")
        held = model.get_submodule(owner)._parameters
        part = held[own]
        if part is None or isinstance(part, DTensor) or not found.is_regular:
            continue
        if id(part) not in made:
            (cut,) = found.cuts
            whole = DTensor.from_local(part.detach(), mesh, [Shard(cut.layout.dim)], run_check=False)
            made[id(part)] = replacement(part, whole)
        held[own] = made[id(part)]


def _model_of(module: nn.Module) -> nn.Module | None:
    return next((model for model in transformed_models() if any(module is each for each in model.modules())), None)


@dataclass(frozen=True, slots=True)
class _HeldParameter:
    """What a model has under a name: its part, None if it is whole here; the parameter, None if FSDP1 has put it into a flat one, or what
    FSDP1 has on this rank of all its elements, in one dimension."""

    part: ParameterPart | None
    parameter: Tensor | None

    @property
    def key(self) -> Any:
        """Equal for what is cut alike."""
        cuts = () if self.part is None else self.part.cuts
        return [(cut.layout, cut.shape, cut.is_even, cut.owner, cut.group.process_group) for cut in cuts]

    def fits(self, value: Tensor | ShardedTensor, *, is_whole: bool) -> bool:
        """Whether a value can be what this rank has of it, or with `is_whole` all of it."""
        if self.part is None or (isinstance(self.parameter, DTensor) and not is_whole):
            return self.parameter is not None and value.shape == self.parameter.shape
        return tuple(value.shape) == (self.part.shape if is_whole else self.part.own_shape)

    def is_in(self, value: Tensor | ShardedTensor) -> bool:
        """Whether a value is the parameter's memory."""
        if self.parameter is None:
            return False
        own, found = (_local(each).untyped_storage().data_ptr() for each in (self.parameter, value))
        return own == found != 0


def map_parts(state: Any, change: Callable[[str, Any, ParameterPart], Any], *, is_whole: bool = False) -> Any:
    """A state dict with `change(path, value, part)` in place of values of parameters that this rank has parts of.

    `is_whole`: the state dict has whole tensors, otherwise what this rank has. Dicts and lists are copied; other objects are the same.
    CheckpointError for values of which nothing tells what model they belong to, where several models have parameters of the same name and
    slice them otherwise.
    """
    held: dict[str, list[_HeldParameter]] = {}
    for model in transformed_models():
        parts = dict(slices_of(model) or {})
        parameters = {plain_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}
        for name in {**parts, **parameters}:
            held.setdefault(name, []).append(_HeldParameter(parts.get(name), parameters.get(name)))
    held = {name: each for name, each in held.items() if any(one.part is not None for one in each)}

    def changed(value: Any, path: str) -> Any:
        part = _part_of(value, path, _held_at(plain_name(path), held), is_whole=is_whole)
        return value if part is None else change(path, value, part)

    return _mapped_parts(state, "", changed) if held else state


def _mapped_parts(value: Any, path: str, changed: Callable[[Any, str], Any]) -> Any:
    """A state with every tensor changed."""
    if isinstance(value, Stateful):
        value = value.state_dict()
    if isinstance(value, dict):
        return {key: _mapped_parts(each, f"{path}.{key}", changed) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped_parts(each, f"{path}.{number}", changed) for number, each in enumerate(value)]
    return changed(value, path) if isinstance(value, (Tensor, ShardedTensor)) else value


def _part_of(
    value: Tensor | ShardedTensor, path: str, held: Sequence[_HeldParameter], *, is_whole: bool
) -> ParameterPart | None:
    """The part that a value is of: models may have the same names."""
    if len(held) > 1:
        own = [each for each in held if each.is_in(value)]
        held = own or [each for each in held if each.fits(value, is_whole=is_whole)]
    if any(each.key != held[0].key for each in held):
        raise CheckpointError(
            f"{path.removeprefix('.')}: expected one model with a parameter of this name, or models that are sliced alike, found "
            f"{len(held)} whose slices differ; give their parameters different names: put one of them into a module before transform"
        )
    return held[0].part if held else None


def as_boxes(state: Any) -> Any:
    """A state dict for planners: this rank's slices become boxes of the whole tensors, in the same memory."""
    return map_parts(state, _boxed_part)


def take_over(target: Any, found: Any) -> None:
    """Put loaded values that are not tensors into the script's state dict."""
    for key, value in found.items():
        old = target.get(key)
        if hasattr(old, "load_state_dict") and hasattr(old, "state_dict"):
            old.load_state_dict(value)
        elif isinstance(old, dict):
            take_over(old, value)
        elif not hasattr(value, "untyped_storage"):
            target[key] = value


def _boxed_part(path: str, value: Tensor | ShardedTensor, part: ParameterPart) -> Any:
    """The boxes of a part of a weight."""
    if tuple(value.shape) != part.own_shape:
        return value
    boxes = {at: box.detach() for at, box in part.boxes(_shards(value)) if box.numel()}
    shards = [HeldShard.of("tensor", path, box, part.shape, at) for at, box in boxes.items()]
    return HeldTensor.like(_local(value), part.shape, shards)


def _held_at(path: str, held: Mapping[str, Sequence[_HeldParameter]]) -> Sequence[_HeldParameter]:
    """What models have under the longest name that a path goes through: `optimizer.state.lm_head.weight.exp_avg`."""
    steps = path.split(".")
    for length in range(len(steps), 0, -1):
        for first in range(len(steps) - length + 1):
            found = held.get(".".join(steps[first : first + length]))
            if found is not None:
                return found
    return ()


def _shards(value: Tensor | ShardedTensor) -> Iterator[Box]:
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor
    elif isinstance(value, DTensor):
        _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        yield tuple(start), value.to_local()
    else:
        yield (0,) * value.dim(), value


def _local(value: Tensor | ShardedTensor) -> Tensor:
    return next((shard for _, shard in _shards(value)), torch.empty(0))


FIRST_RANK: tuple[int, ...] = (0,)  # the source of all weights


def keep_slices(
    model: nn.Module, layouts: Mapping[str, Layout], group: TensorGroup, sources: Sequence[int] | None
) -> None:
    """Replaces parameters by this rank's slices. Collective over the group."""
    agree_on_weights(model, group, sources)
    slice_parameters(model, dict(layouts), group)


def agree_on_weights(model: nn.Module, group: TensorGroup, sources: Sequence[int] | None) -> None:
    """Gives all ranks of the group its first rank's weights; with `sources`, none if that rank is not a source. Collective."""
    assert group.process_group is not None
    if sources is not None and dist.get_global_rank(group.process_group, 0) not in sources:
        _to_meta(model)
        return
    if sources is not None and group.rank:
        _make_room(model)
    _agree_in_group(model, group)


@torch.no_grad()
def _agree_in_group(model: nn.Module, group: TensorGroup) -> None:
    """Everything is what the group's first rank has; what is on the meta device there has no values to agree on."""
    assert group.process_group is not None
    first = dist.get_global_rank(group.process_group, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            _broadcast_weight(tensor, first, group.process_group)


def _broadcast_weight(tensor: Tensor, first: int, group: dist.ProcessGroup) -> None:
    """A weight of the first rank of a group, to all of it."""
    if tensor.is_contiguous():
        dist.broadcast(tensor, first, group)
    else:
        packed = tensor.contiguous()
        dist.broadcast(packed, first, group)
        tensor.copy_(packed)


def _to_meta(model: nn.Module) -> None:
    for module in model.modules():
        for _name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                parameter.data = parameter.data.to("meta")


def _make_room(model: nn.Module) -> None:
    """Replaces tensors on the meta device by empty ones; shared tensors stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    empty = torch.empty_like(tensor, device="cpu")
                    room = replacement(tensor, empty) if isinstance(tensor, nn.Parameter) else empty
                    held[name] = made.setdefault(id(tensor), room)  # type: ignore[assignment]
