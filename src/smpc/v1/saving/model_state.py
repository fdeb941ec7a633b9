"""The state of a model that lies on several ranks, under the names and in the order of its `state_dict`.

Terms
    key         a key of `module.state_dict()`; a tied parameter has several
    partial     a state dict with the keys of one rank only, marked by the key `_smp_is_partial`; of parameters that tensor-parallel
                ranks share it has this rank's slices
    full        a state dict with all keys and whole values, the same as that of the module in one process
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smpc import checkpoint
from smpc.errors import CheckpointError
from smpc.executor.sharded_tensor import local, own_part, whole
from smpc.nn.parallel import Shard
from smpc.v1.models.placement import Placement
from smpc.v1.optimization.precision import loads_as
from smpc.v1.saving.merge import Item, fill, merge, stream, survey
from smpc.v1.saving.slices import Slices, place
from smpc.v1.steps.control import Control

PARTIAL = "_smp_is_partial"


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict(strict=False)` found; as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ModelState:
    """Reads and writes the state of `module`, which lies on the ranks of `control`; None where one rank has all of it."""

    def __init__(self, module: nn.Module, placement: Placement, slices: Slices, control: Control | None) -> None:
        self._module, self._placement, self._slices, self._control = module, placement, slices, control

    def local(self) -> dict[str, Any]:
        """Keys and detached values of this rank; with `fully_shard` whole ones, which the replicas gather."""
        kept = self._local_keys()
        return {
            key: whole(value.detach()) if isinstance(value, Tensor) else value
            for key, value in self._entries().items()
            if key in kept
        }

    def full(self, *, only_on_rank_0: bool) -> dict[str, Any]:
        """All keys, tensors on the CPU; {} on other ranks than 0 if only rank 0 wants them. Collective."""
        assert self._control is not None, "one rank has all of its state"
        part = self.local()
        items = survey(part, self._control, "the model's state", self._slicer())
        wanted = not only_on_rank_0 or self._control.rank == 0
        merged = merge(part, items, self._control, lambda key: wanted)
        state = self._module.state_dict()
        if not wanted:
            state.clear()
        for key in state:
            state[key] = merged[key]
        return state

    def shards(self) -> list[checkpoint.Shard]:
        """What a checkpoint holds of this rank: its parameters and persistent buffers, by canonical name. Views, not copies."""
        self._placement.draw()
        saved = {id(value) for value in self._entries().values()}
        return [
            part
            for name, tensor in self._named()
            if id(tensor) in saved and self._placement.is_local(name)
            for part in place("model", name, tensor, self._slices.get(name))
        ]

    def saved_names(self) -> frozenset[str]:
        """Canonical names of the parameters and persistent buffers of all ranks."""
        saved = {id(value) for value in self._entries().values()}
        return frozenset(name for name, tensor in self._named() if id(tensor) in saved)

    def aliases(self) -> dict[str, str]:
        """Keys of the state dict that are other names of a parameter or buffer, and its canonical name."""
        names = self._names()
        keys = {key: names.get(id(value), key) for key, value in self._entries().items()}
        return {key: name for key, name in keys.items() if key != name}

    def extra(self) -> dict[str, Any]:
        """Extra state, which every rank has, by key."""
        names = self._names()
        return {key: value for key, value in self._entries().items() if id(value) not in names}

    def load_extra(self, values: Mapping[str, Any]) -> None:
        """Set extra state; keys that the module does not have are left out."""
        there = self.extra()
        for key, value in values.items():
            if key in there:
                self._set_extra(key, value)

    def all_stages(self, pipeline: Control) -> dict[str, Tensor]:
        """Every parameter and buffer by its canonical name, on the CPU, whatever stage it is on; of slices, this rank's. Collective."""
        part = {name: tensor.detach() for name, tensor in self._named() if self._placement.is_local(name)}
        return merge(part, survey(part, pipeline, "the model's state"), pipeline, lambda key: True)

    def load(self, state: Mapping[str, Any], *, strict: bool) -> IncompatibleKeys:
        """Load a full state dict.

        Raises CheckpointError, before anything is written, listing all keys that are missing, unexpected, or of another shape or dtype.
        """
        self._placement.draw()
        given = _without_mark(state)
        result = self._check({key: Item.of(value) for key, value in given.items()}, strict)
        names = self._names()
        with torch.no_grad():
            for key, target in self._targets(given).items():
                if target is None:
                    self._set_extra(key, given[key])
                else:
                    part = self._slices.own_part(names[id(target)], given[key], target.shape)
                    local(target).copy_(own_part(target, part))
        return result

    def load_own_part(self, part: Mapping[str, Any], *, strict: bool) -> IncompatibleKeys:
        """Load a partial state dict that was saved by this rank under the same partition."""
        given = _without_mark(part)
        result = self._check({key: Item.of(value) for key, value in given.items()}, strict, only_own=True)
        with torch.no_grad():
            for key, target in self._targets(given).items():
                if target is None:
                    self._set_extra(key, given[key])
                else:
                    local(target).copy_(own_part(target, given[key]))
        return result

    def load_parts(self, part: Mapping[str, Any], *, strict: bool) -> IncompatibleKeys:
        """Load the partial state dicts of all ranks, whatever partition they come from. Collective."""
        assert self._control is not None, "one rank has all of its state"
        given = _without_mark(part)
        items = survey(given, self._control, "the state dict to load", self._slicer())
        result = self._check(items, strict)
        targets, names = self._targets(items), self._names()
        wholes: dict[str, Tensor] = {}  # of sharded parameters; pieces may be cut along other dimensions
        with torch.no_grad():
            for key, piece, value in stream(given, items, self._control):
                target = targets.get(key)
                if isinstance(target, DTensor) and piece is not None:
                    if key not in wholes:
                        wholes = {key: torch.empty(target.shape, dtype=value.dtype)}
                    fill(wholes[key], None, piece, value)
                    local(target).copy_(own_part(target, wholes[key]))
                elif target is not None and piece is not None:
                    fill(target, self._slices.get(names[id(target)]), piece, value)
                elif key in targets:
                    self._set_extra(key, value)
                del value  # before the next one comes
        return result

    # ------------------------------------------------------------------------------------------------------------------

    def _entries(self) -> dict[str, Any]:
        return dict(self._module.state_dict(keep_vars=True))

    def _named(self) -> list[tuple[str, Tensor]]:
        return [*self._module.named_parameters(), *self._module.named_buffers()]

    def _names(self) -> dict[int, str]:
        """Canonical names by identity; read afresh, since a model may rebind its buffers."""
        return {id(tensor): name for name, tensor in self._named()}

    def _local_keys(self) -> frozenset[str]:
        """Keys of this rank. What is neither parameter nor buffer (extra state) is on every rank."""
        names, is_local = self._names(), self._placement.is_local
        return frozenset(
            key for key, value in self._entries().items() if id(value) not in names or is_local(names[id(value)])
        )

    def _slicer(self) -> Callable[[str, Tensor], Shard | None]:
        """Says which slice of a whole a tensor of this rank is: by its shape, as it may come from another job."""
        entries, names = self._entries(), self._names()

        def slice_of(key: str, value: Tensor) -> Shard | None:
            name = names.get(id(entries.get(key)))
            own = name is not None and tuple(value.shape) == tuple(self._placement.shape(name))
            return self._slices.get(name) if own and name is not None else None

        return slice_of

    def _check(self, items: Mapping[str, Item], strict: bool, *, only_own: bool = False) -> IncompatibleKeys:
        entries = self._entries()
        local = self._local_keys()
        expected = [key for key in entries if not only_own or key in local]
        missing = [key for key in expected if key not in items]
        unexpected = [key for key in items if key not in entries]
        wrong = [f"missing: {key}" for key in missing] + [f"unexpected: {key}" for key in unexpected]
        wrong = wrong if strict else []
        names = self._names()
        for key, item in items.items():
            if id(entries.get(key)) in names:
                wrong.extend(self._mismatch(key, entries[key], names[id(entries[key])], item, strict, only_own))
        if wrong:
            raise CheckpointError(
                "\n".join(
                    [
                        f"the state dict does not fit {type(self._module).__name__}, nothing was loaded "
                        "(strict=False allows missing and unexpected keys and casts dtypes)",
                        *wrong,
                    ]
                )
            )
        return IncompatibleKeys(missing, unexpected)

    def _mismatch(self, key: str, own: Tensor, name: str, item: Item, strict: bool, only_own: bool) -> list[str]:
        if not item.is_tensor:
            return [f"{key}: expected a tensor, found {type(item.value).__name__}"]
        shape: tuple[int, ...] = tuple(self._placement.shape(name))
        if not only_own:
            shape = self._slices.whole_shape(name, shape)
        if item.shape != shape:
            return [f"shape of {key}: expected {list(shape)}, found {list(item.shape)}"]
        dtype = item.dtype.removeprefix("torch.")
        if strict and dtype != str(own.dtype).removeprefix("torch.") and not loads_as(getattr(torch, dtype), own.dtype):
            return [f"dtype of {key}: expected {own.dtype}, found torch.{dtype}"]
        return []

    def _targets(self, keys: Iterable[str]) -> dict[str, Tensor | None]:
        """This rank's tensors among keys; None for extra state."""
        entries, names, local = self._entries(), self._names(), self._local_keys()
        return {key: entries[key] if id(entries[key]) in names else None for key in keys if key in local}

    def _set_extra(self, key: str, value: Any) -> None:
        self._module.get_submodule(key.rpartition(".")[0]).set_extra_state(value)


def _without_mark(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != PARTIAL}
