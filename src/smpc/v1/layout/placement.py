"""Which pipeline rank holds which parameter and buffer, and giving every rank its own.

Terms
    local       used by a stage of this rank, or by no stage at all: then every rank keeps it
    foreign     used by stages of other ranks only: its memory is given back here. The Parameter objects stay, with empty
                tensors in them, so that optimizers made before keep working: they skip what has no gradient. Others who use
                them are told (`smpc.absent`)
    out of date a buffer of other ranks' stages into which forward writes: its memory stays here, with the values of before, and who
                reads them is told
    skeleton    meta tensors of the original sizes, which replace the parameters when the model is recorded again

Names are the canonical fully qualified names of `named_parameters()` and `named_buffers()`.

Which slices of the whole model's tensors a tensor-parallel rank holds.

    slices = Slices(module)                           names are canonical, as in named_parameters()
    slices.get("head.weight")                         Shard(dim=0, size=50257, start=25129), or None where the rank holds all of it
    slices.whole_shape("head.weight", (25128, 768))   (50257, 768)

A tensor that belongs to a parameter, such as an optimizer moment, is sliced like the parameter if it has the parameter's shape. A tensor of
one element is the same on all ranks. Other tensors (factored moments) have no known place in the whole, and are refused.

Ranks that must have the same tensors compare their `digest_of`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smpc import checkpoint
from smpc.absent.absent_tensors import Absent, AbsentPlace, AbsentTexts, empty, mark, unmark
from smpc.absent.stage_attributes import StageAttributes
from smpc.errors import CheckpointError, PartitionError
from smpc.executor.collectives import TensorGroup
from smpc.nn.init.delayed import draw_delayed
from smpc.nn.parallel import ParameterSlice, distributed_modules
from smpc.nn.script_writes.compare_writes import Writes
from smpc.nn.script_writes.slice_parameters import note_own
from smpc.partitioner.graph.plan import Plan
from smpc.tracer.state.fakes import FakeState, installed, on_meta
from smpc.tracer.state.state_use import StateUse, moved_buffer

_TEXTS = AbsentTexts(
    lack="no values of it",
    advice=(
        "loop over model.local_parameters() or local_named_parameters() for what this rank has. What a loss needs of parameters is "
        "computed in the model's forward; model.state_dict(), called on every rank, has all values"
    ),
    gradients=(
        "For the norm of all, torch.nn.utils.clip_grad_norm_(model.parameters(), float('inf')); for this rank's gradients, "
        "model.local_parameters()"
    ),
)
_OUT_OF_DATE = AbsentTexts(
    lack="its values of before the last step alone",
    advice=(
        "take it from model.state_dict(), called on every rank, which has all values; or read it on a rank that has it "
        "(model.local_named_buffers()), and send it to the others"
    ),
    gradients="",
)


class Slices:
    """The slices of a module's parameters, where ranks hold different ones."""

    def __init__(self, module: nn.Module) -> None:
        found: dict[int, ParameterSlice] = {}
        for _, owner in distributed_modules(module):
            for name, parameter in owner.named_parameters(recurse=False):
                if name in owner.shards and owner.parallel.group.size > 1:
                    found[id(parameter)] = owner.shards[name]
        self._shards = {name: found[id(p)] for name, p in module.named_parameters() if id(p) in found}

    def add(self, name: str, shard: ParameterSlice) -> None:
        """Registers that a parameter has become a slice."""
        self._shards[name] = shard

    def get(self, name: str) -> ParameterSlice | None:
        """The slice of a parameter; None if a rank has all of it."""
        return self._shards.get(name)

    def whole_shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, of which this rank has a slice of shape `own`."""
        shard = self._shards.get(name)
        return tuple(own) if shard is None else whole_shape(shard, own)

    def own_part(self, name: str, whole: Tensor, own: Sequence[int]) -> Tensor:
        """This rank's part, of shape `own`, of a whole value."""
        shard = self._shards.get(name)
        if shard is None:
            return whole
        return self.joined(name, [whole.narrow(shard.dim, at, n) for _, at, n in shard.runs_of(own[shard.dim])])

    def joined(self, name: str, runs: Sequence[Tensor]) -> Tensor:
        """The slice that consists of exactly these runs; if there is one run, the run itself."""
        shard = self._shards.get(name)
        return runs[0] if shard is None or len(runs) == 1 else torch.cat(tuple(runs), shard.dim)

    def of_state(self, name: str, key: str, value: Tensor, own: Sequence[int]) -> ParameterSlice | None:
        """The slice of `value`, the state `key` of a parameter of shape `own`. Raises CheckpointError if it cannot be known."""
        shard = self._shards.get(name)
        if shard is None or tuple(value.shape) == tuple(own):
            return shard
        if value.numel() == 1:
            return None
        raise CheckpointError(
            f"optimizer state {key} of {name}, a parameter that tensor-parallel ranks share, has the shape {list(value.shape)} and the "
            f"parameter {list(own)}: its place in the whole is not known; use an optimizer whose state has the parameters' shapes"
        )


def whole_shape(shard: ParameterSlice, own: Sequence[int]) -> tuple[int, ...]:
    """The shape of the whole tensor of a slice of shape `own`."""
    return tuple(shard.size if dim == shard.dim else size for dim, size in enumerate(own))


def place(kind: str, name: str, tensor: Tensor, shard: ParameterSlice | None) -> list[checkpoint.Shard]:
    """A tensor of this rank, the slice `shard` of a whole tensor, in a checkpoint's form: a part for every run.

    For a DTensor: this rank's part of the slice, divided by runs. CheckpointError for a DTensor of other ranks.
    """
    own = checkpoint.shard_of(kind, name, tensor)
    if own is None:
        raise CheckpointError(f"{kind} {name}: a DTensor of other ranks than this one")
    if shard is None:
        return [own]
    whole, offsets = whole_shape(shard, own.global_shape), own.offsets
    if not shard.runs:
        moved = tuple(o + shard.start if dim == shard.dim else o for dim, o in enumerate(offsets))
        return [checkpoint.Shard.of(kind, name, own.tensor, whole, moved)]
    found: list[checkpoint.Shard] = []
    first = offsets[shard.dim]
    end = first + own.tensor.shape[shard.dim]
    for start, at, length in shard.runs_of(own.global_shape[shard.dim]):
        low, high = max(start, first), min(start + length, end)
        if low < high or (not found and start + length >= end):  # an empty part has a place, too
            moved = tuple(at + low - start if dim == shard.dim else o for dim, o in enumerate(offsets))
            part = own.tensor.narrow(shard.dim, min(low - first, end - first), max(0, high - low))
            found.append(checkpoint.Shard.of(kind, name, part, whole, moved))
    return found


def digest_of(tensor: Tensor) -> str:
    """Equal for tensors of equal type, shape and bytes."""
    data = tensor.detach().cpu().contiguous()
    content = data.view(torch.uint8).numpy().tobytes() if data.dim() else repr(data.item()).encode()
    return hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode() + content).hexdigest()


class Placement:
    """The holders of a model's state, and its original sizes. Grows when later programs use more parameters and buffers.

    `slices`: the parameters of which tensor-parallel ranks hold slices. `ranks`: of the pipeline, among all; `group`: theirs, None if there
    is one. `is_spread`: whether every rank holds only its own tensors, on its device. `writes`: what scripts have written into these, and
    would have into others', for ranks of the pipeline to compare.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        device: torch.device,
        slices: Slices,
        ranks: Sequence[int] = (),
        group: TensorGroup | None = None,
    ) -> None:
        self._model = model
        self._rank = rank
        self._ranks = tuple(ranks)
        self._noted: frozenset[str] = frozenset()  # local parameters, of which scripts' writes are noticed
        self._device = device
        self._tensor_slices = slices
        self.is_spread = False
        self._seed = torch.initial_seed()  # of delayed parameters
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._holders: dict[str, tuple[int, ...]] = {}
        self.writes = None if group is None else Writes(None, group, self._holders)
        self._asked: dict[str, None] = {}
        self._written: frozenset[str] = frozenset()  # buffers, by any program
        self.out_of_date: tuple[str, ...] = ()  # of these, the ones that other ranks write
        self.attributes = StageAttributes(model, rank)
        self._slices: dict[str, tuple[ParameterSlice, torch.Size]] = {}
        self._skeleton = {name: _meta(tensor) for name, tensor in self._state().items()}

    def add(self, plan: Plan, asked: Collection[str], use: StateUse) -> None:
        """Apply a program's plan. Raises PartitionError if a parameter, or a buffer that is written, would have to move.

        Buffers in `asked`, whose values pipeline rank 0 reads before steps, are local to all ranks. `use`: the state that
        the program uses.
        """
        self._asked |= dict.fromkeys(asked)
        named = {name: ranks for name, ranks in holders(plan).items() if name not in self._asked}
        found = use.counting(self._holders, named)
        self._written |= use.written
        for name in asked:
            self._holders.pop(name, None)
        for name, ranks in found.items():
            known = self._holders.get(name, ranks)
            if name in self._parameters and not set(ranks) <= set(known):
                raise PartitionError(
                    f"with these inputs parameter {name!r} is used on pipeline ranks {list(ranks)}, but the first step put it "
                    f"on {list(known)}; make the first step use the model as later ones do"
                )
        moved = moved_buffer(self._written, self._holders, found)
        if moved:
            raise PartitionError(moved)
        for name, ranks in found.items():
            self._holders.setdefault(name, ranks)
        self.out_of_date = tuple(sorted(name for name in self._written if not self.is_local(name)))

    def is_local(self, name: str) -> bool:
        """Whether this rank holds a parameter or buffer."""
        return self._rank in self._holders.get(name, (self._rank,))

    def is_first(self, parameter: Tensor) -> bool:
        """Whether this rank is the first holder of a parameter; also True if the holder is unknown, or if every rank keeps it."""
        return self._holders.get(self._names.get(id(parameter), ""), (self._rank,))[0] == self._rank

    def shape(self, name: str) -> torch.Size:
        """The shape on the ranks that hold a parameter or buffer: the original one, unless they have slices of it."""
        return self._slices[name][1] if name in self._slices else self._skeleton[name].shape

    @property
    def seed(self) -> int:
        """The names of delayed parameters."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed

    def slice(self, name: str, shard: ParameterSlice, shape: torch.Size, *, is_cut: bool = False) -> None:
        """The ranks that hold a parameter have slices of this shape from now on; a delayed one is drawn as a slice.

        `is_cut`: the model is recorded with the slice, and not with the whole.
        """
        self._slices[name] = shard, shape
        if is_cut:
            self._skeleton[name] = torch.empty(shape, dtype=self._skeleton[name].dtype, device="meta")

    def exchange(self, exchanged: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Some parameters were replaced by others, as with `fully_shard`."""
        self._parameters = {name: exchanged.get(parameter, parameter) for name, parameter in self._parameters.items()}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    def draw(self) -> None:
        """Draw all delayed parameters, because their values are needed before the model is partitioned."""
        draw_delayed(self._model, torch.device("cpu"), self._seed, slices=self._slices)

    def apply(self) -> None:
        """Free foreign parameters, and move local ones to the device. All buffers are kept: they are small, and most are never written."""
        self.release_graphs()
        draw_delayed(self._model, self._device, self._seed, self.is_local, self._slices)
        for name, parameter in self._parameters.items():
            if self.is_local(name):
                parameter.data = parameter.data.to(self._device)
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(self._device)
            else:
                parameter.grad = None
                shape, kind = self.shape(name), type(parameter)
                whole = torch.Size(self._tensor_slices.whole_shape(name, shape))
                parameter.data = empty(parameter, shape, self._device)
                place = AbsentPlace(
                    name, shape if shape.numel() else whole, self._holders[name], self._rank, kind, _TEXTS
                )
                place = dataclasses.replace(place, whole=whole, ranks=self._ranks, have_gradients=self._have_gradients)
                place = dataclasses.replace(place, writes=self.writes)
                mark(parameter, place)
        for name, buffer in self._model.named_buffers():
            if self.is_local(name):
                buffer.data = buffer.data.to(self._device)
        self.is_spread = True
        if self.writes is not None:
            own = [name for name in self._parameters if self.is_local(name)]
            note_own(self._model, {name: self._again(name) for name in own if name not in self._noted}, self.writes)
            self._noted |= {*own}

    def note_written(self) -> None:
        """A step has run: other ranks have written into their buffers, of which this one has the values of before."""
        for name in self.out_of_date:
            owner, _, own = name.rpartition(".")
            buffer = self._model.get_submodule(owner)._buffers.get(own)
            if buffer is not None and not isinstance(buffer, Absent):
                place = AbsentPlace(name, buffer.shape, self._holders[name], self._rank, type(buffer), _OUT_OF_DATE)
                mark(buffer, dataclasses.replace(place, owner=weakref.ref(buffer)))

    def _again(self, name: str) -> tuple[int, ...]:
        """All ranks that hold a parameter which this one does not hold as the first."""
        found = self._holders.get(name, ())
        return tuple(self._ranks[rank] for rank in found) if len(found) > 1 and found[0] != self._rank else ()

    def _have_gradients(self) -> bool:
        return any(p.grad is not None for name, p in self._parameters.items() if self.is_local(name))

    def release_graphs(self) -> None:
        """Takes tensors that modules hold (the weight of `weight_norm`) out of autograd graphs, before parameters get other memory: as long
        as a graph is there, autograd adds gradients up in the sizes that parameters had when it was made.
        """
        for module in self._model.modules():
            held = {
                name: value
                for name, value in vars(module).items()
                if isinstance(value, Tensor) and value.grad_fn is not None
            }
            vars(module).update({name: value.detach() for name, value in held.items()})

    def spread(self) -> None:
        """Give every rank only its own tensors again, after `restore` or a move to the CPU."""
        for name, parameter in self._model.named_parameters():
            own = self.shape(name)
            if self._tensor_slices.get(name) is not None and self.is_local(name) and parameter.shape != own:
                parameter.grad = None
                parameter.data = self._tensor_slices.own_part(name, parameter.data, own).clone()
        self.apply()

    def restore(self, full: Mapping[str, Tensor]) -> None:
        """Give every parameter and buffer, foreign ones too, a whole value: the inverse of `apply`."""
        for name, tensor in self._state().items():
            if name in full:
                unmark(tensor)
                tensor.grad = None
                tensor.data = full[name]

    @contextmanager
    def skeleton(self) -> Iterator[None]:
        """Puts tensors of the original sizes into the model, for recording it."""
        state = FakeState()
        with self.attributes.as_before():
            together = on_meta(self._model)
            state.by_original.update(together)
            for name, tensor in self._state().items():
                if name in self._parameters:
                    meta = self._skeleton[name] if self.is_spread else together.get(id(tensor), self._skeleton[name])
                    stand_in: Tensor = nn.Parameter(meta, requires_grad=tensor.requires_grad)
                else:
                    stand_in = together.get(id(tensor), _meta(tensor))
                stand_in.__dict__ = tensor.__dict__  # attributes set by scripts: guards watch this dict object
                state.by_original[id(tensor)] = stand_in
            with installed(self._model, state):
                yield

    def _state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name; read afresh, since a model may rebind its buffers."""
        return {**self._parameters, **dict(self._model.named_buffers())}


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def holders(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Name -> pipeline ranks whose stages use the parameter or buffer, ascending."""
    found: dict[str, set[int]] = {}
    for stage in plan.stages:
        for name in (*stage.parameters, *stage.buffers):
            found.setdefault(name, set()).add(stage.rank)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}
