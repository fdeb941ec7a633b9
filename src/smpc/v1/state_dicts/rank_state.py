"""The state of a model that is spread over several ranks, under the names and in the order of its `state_dict`.

Terms
    key         a key of `module.state_dict()`; a tied parameter has several
    partial     a state dict with the keys of one rank only, marked by the key `_smp_is_partial`; of parameters that tensor-parallel
                ranks share it has this rank's slices
    full        a state dict with all keys and whole values, the same as the module's in one process

Hooks of modules on their state dicts run as `hooks` beside this says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smpc import checkpoint
from smpc.checkpoint.format.regular_file import printable
from smpc.checkpoint.stateful import LocalStateDict, held
from smpc.errors import CheckpointError
from smpc.nn.parallel import ParameterSlice
from smpc.nn.script_writes.compare_writes import compare_scripts
from smpc.sharding.dtensors import local, own_part_of_sharded, whole
from smpc.v1.layout.placement import Placement, Slices, place
from smpc.v1.session.precision import loads_as
from smpc.v1.session.step_messages import Control
from smpc.v1.state_dicts.hooks import (
    Given,
    IncompatibleKeys,
    after_loading,
    changing,
    collect,
    finish,
    forgives,
)
from smpc.v1.state_dicts.merge_ranks import MergedItem, fill, merge, stream, survey

__all__ = ["PARTIAL", "IncompatibleKeys", "ModelState"]

PARTIAL = "_smp_is_partial"


class ModelState:
    """Reads and writes the state of `module`, which the ranks of `control` hold together; None if one rank has all of it.

    `half`: the dtype that parameters were cast to; states of other floating dtypes are then loaded as well.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        slices: Slices,
        control: Control | None,
        half: torch.dtype | None,
    ) -> None:
        self._module, self._placement, self._slices, self._control = module, placement, slices, control
        self.half = half

    def local(self) -> dict[str, Any]:
        """Keys and detached values of this rank; with `fully_shard` whole ones, which the replicas gather."""
        self.before_saving()
        left = changing(self._module, loading=False)
        if left:
            warnings.warn(
                f"{_listed_keys(left)}: state-dict hooks after saving do not run on a partial state dict, which is not theirs to change; "
                "state_dict() runs them",
                stacklevel=3,
            )
        kept = self._local_keys()
        return {
            key: whole(value.detach()) if isinstance(value, Tensor) else value
            for key, value in self._entries().items()
            if key in kept
        }

    def own_whole(self) -> dict[str, Any]:
        """The module's own state dict, if one rank has all of it; sharded values are gathered from the replicas."""
        if not any(isinstance(parameter, DTensor) for parameter in self._module.parameters()):
            return dict(self._module.state_dict())
        entries = collect(self._module, run_hooks=True)
        values = {key: whole(v.detach()) if isinstance(v, Tensor) else v for key, v in entries.values.items()}
        return finish(self._module, entries, values)

    def full(self, *, wanted: bool = True) -> dict[str, Any]:
        """All keys, tensors on the CPU; {} if they are not `wanted`. Collective."""
        assert self._control is not None, "one rank has all of its state"
        self.check_written()
        entries, names = collect(self._module, run_hooks=True), self._names()
        part = {
            key: whole(value.detach()) if isinstance(value, Tensor) else value
            for key, value in entries.values.items()
            if id(value) not in names or self._placement.is_local(names[id(value)])
        }
        items = survey(part, self._control, "the model's state", self._slicer(entries.values))
        merged = merge(part, items, self._control, lambda key: wanted)
        return finish(self._module, entries, merged) if wanted else {}

    def held(self) -> LocalStateDict:
        """This rank's tensors, by key, for torch.distributed.checkpoint to save or to fill. Views, not copies."""
        self._placement.draw()
        self.before_saving()
        names, kept, found = self._names(), self._local_keys(), LocalStateDict()
        for key, value in self._entries().items():
            name = names.get(id(value))
            own = value if name is None else held(place("model", key, value, self._slices.get(name)))
            if key in kept and own is not None:
                found[key] = own
        return found

    def load_held(self, state: LocalStateDict) -> IncompatibleKeys:
        """After torch has filled the tensors: the extra state."""
        self.load_extra(state)
        self.loaded_in_parts()
        return IncompatibleKeys([], [])

    def check_written(self) -> None:
        """UsageError on all ranks if scripts have written into slices, or stages, what one process would not. Collective."""
        compare_scripts(self._module)
        if self._placement.writes is not None:
            self._placement.writes.compare()

    def before_saving(self) -> None:
        """Run the hooks before saving."""
        collect(self._module, run_hooks=True)

    def shards(self) -> list[checkpoint.Shard]:
        """This rank's state for a checkpoint: its parameters and persistent buffers, by canonical name. Views, not copies.

        Replicas update buffers by their own samples: the first one's count, which the others take in the next step.
        """
        self._placement.draw()
        saved = {id(value) for value in self._entries().values()}
        return [
            replace(part, varies=not isinstance(tensor, nn.Parameter))
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

    def all_parts(self) -> dict[str, Tensor]:
        """Every parameter and buffer by its canonical name, whole, on the CPU, gathered from stages and slices. Collective."""
        assert self._control is not None, "one rank has all of its state"
        part = {name: tensor.detach() for name, tensor in self._named() if self._placement.is_local(name)}
        items = survey(part, self._control, "the model's state", lambda name, value: self._slices.get(name))
        return merge(part, items, self._control, lambda key: True)

    def load(self, state: Mapping[str, Any], *, strict: bool) -> IncompatibleKeys:
        """Load a full state dict.

        Raises CheckpointError, before anything is written, listing all keys that are missing, unexpected, or of another shape or dtype.
        """
        self._placement.draw()
        entries, given = collect(self._module), Given.of(self._module, state, strict=strict)
        if given.errors:
            raise CheckpointError(
                "\n".join(["a hook before loading refuses the state dict, nothing was loaded", *given.errors])
            )
        values = _without_mark(given.values)
        # If hooks may forgive missing keys, they run afterwards, as in torch.
        asks = strict and forgives(self._module)
        items = {key: MergedItem.of(value) for key, value in values.items()}
        found = self._check(items, strict, entries=entries.values, allows_keys=asks)
        names = self._names()
        with torch.no_grad():
            for key, target in self._targets(values, entries.values).items():
                if target is None:
                    self._set_extra(key, values[key])
                else:
                    part = self._slices.own_part(names[id(target)], values[key], target.shape)
                    local(target).copy_(own_part_of_sharded(target, part))
        result = after_loading(self._module, entries, *found, given)
        if asks or any((*given.missing.values(), *given.unexpected.values())):
            self._refuse_keys(result, strict)
        return result

    def _refuse_keys(self, found: IncompatibleKeys, strict: bool) -> None:
        wrong = [f"missing: {printable(key)}" for key in found.missing_keys]
        wrong += [f"unexpected: {printable(key)}" for key in found.unexpected_keys]
        if strict and wrong:
            raise CheckpointError(
                "\n".join(
                    [
                        f"the state dict does not fit {type(self._module).__name__}, whose hooks were asked; the keys that do were loaded "
                        "(strict=False allows missing and unexpected keys)",
                        *wrong,
                    ]
                )
            )

    def load_own_part(self, part: Mapping[str, Any], *, strict: bool) -> IncompatibleKeys:
        """Load a partial state dict that was saved by this rank under the same partition."""
        given = _without_mark(part)
        result = self._check({key: MergedItem.of(value) for key, value in given.items()}, strict, only_own=True)
        with torch.no_grad():
            for key, target in self._targets(given).items():
                if target is None:
                    self._set_extra(key, given[key])
                else:
                    local(target).copy_(own_part_of_sharded(target, given[key]))
        self.loaded_in_parts()
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
                    fill(wholes[key], self._slices.get(names[id(target)]), piece, value)
                    local(target).copy_(own_part_of_sharded(target, wholes[key]))
                elif target is not None and piece is not None:
                    fill(target, self._slices.get(names[id(target)]), piece, value)
                elif key in targets:
                    self._set_extra(key, value)
                del value  # before the next one comes
        self.loaded_in_parts()
        return result

    def loaded_in_parts(self) -> None:
        """Run the hooks after loading, without missing keys, and name modules whose other state-dict hooks did not run."""
        left = changing(self._module, loading=True)
        if left:
            warnings.warn(
                f"{_listed_keys(left)}: register_load_state_dict_pre_hook was not heeded, as no "
                "rank has the whole state dict that the hook is for; load a full one with load_state_dict if it is needed",
                stacklevel=3,
            )
        after_loading(self._module, collect(self._module))

    # ------------------------------------------------------------------------------------------------------------------

    def _entries(self) -> Mapping[str, Any]:
        return collect(self._module).values

    def _named(self) -> list[tuple[str, Tensor]]:
        return [*self._module.named_parameters(), *self._module.named_buffers()]

    def _names(self) -> dict[int, str]:
        """Canonical names by identity; read afresh, since a model may rebind its buffers."""
        return {id(tensor): name for name, tensor in self._named()}

    def _local_keys(self) -> frozenset[str]:
        """Keys of this rank. Extra state (neither parameter nor buffer) is on every rank."""
        names, is_local = self._names(), self._placement.is_local
        return frozenset(
            key for key, value in self._entries().items() if id(value) not in names or is_local(names[id(value)])
        )

    def _slicer(self, entries: Mapping[str, Any] | None = None) -> Callable[[str, Tensor], ParameterSlice | None]:
        """The slice of a whole that a tensor of this rank is: by its shape, since it may come from another job."""
        entries, names = self._entries() if entries is None else entries, self._names()

        def slice_of(key: str, value: Tensor) -> ParameterSlice | None:
            name = names.get(id(entries.get(key)))
            own = name is not None and tuple(value.shape) == tuple(self._placement.shape(name))
            return self._slices.get(name) if own and name is not None else None

        return slice_of

    def _check(
        self,
        items: Mapping[str, MergedItem],
        strict: bool,
        *,
        only_own: bool = False,
        entries: Mapping[str, Any] | None = None,
        allows_keys: bool = False,
    ) -> IncompatibleKeys:
        entries = self._entries() if entries is None else entries
        local = self._local_keys()
        expected = [key for key in entries if not only_own or key in local]
        missing = [key for key in expected if key not in items]
        unexpected = [key for key in items if key not in entries]
        wrong = [f"missing: {printable(key)}" for key in missing] + [
            f"unexpected: {printable(key)}" for key in unexpected
        ]
        wrong = wrong if strict and not allows_keys else []
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

    def _mismatch(self, key: str, own: Tensor, name: str, item: MergedItem, strict: bool, only_own: bool) -> list[str]:
        if not item.is_tensor:
            return [f"{printable(key)}: expected a tensor, found {type(item.value).__name__}"]
        shape: tuple[int, ...] = tuple(self._placement.shape(name))
        if not only_own:
            shape = self._slices.whole_shape(name, shape)
        if item.shape != shape:
            return [f"shape of {printable(key)}: expected {list(shape)}, found {list(item.shape)}"]
        dtype = item.dtype.removeprefix("torch.")
        is_same = dtype == str(own.dtype).removeprefix("torch.")
        if strict and not is_same and not loads_as(getattr(torch, dtype), own.dtype, self.half):
            return [f"dtype of {printable(key)}: expected {own.dtype}, found torch.{dtype}"]
        return []

    def _targets(self, keys: Iterable[str], entries: Mapping[str, Any] | None = None) -> dict[str, Tensor | None]:
        """This rank's tensors among keys; None for extra state."""
        entries, names, is_local = (
            self._entries() if entries is None else entries,
            self._names(),
            self._placement.is_local,
        )
        own = {key: names.get(id(entries[key])) for key in keys if key in entries}
        return {
            key: None if name is None else entries[key] for key, name in own.items() if name is None or is_local(name)
        }

    def _set_extra(self, key: str, value: Any) -> None:
        self._module.get_submodule(key.rpartition(".")[0]).set_extra_state(value)


def _listed_keys(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"


def _without_mark(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != PARTIAL}
