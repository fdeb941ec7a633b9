"""The state of a model that lies on several ranks, under the names and in the order of its `state_dict`.

Terms
    key         a key of `module.state_dict()`; a tied parameter has several
    partial     a state dict with the keys of one rank only, marked by the key `_smp_is_partial`
    full        a state dict with all keys, the same as that of the module in one process
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smpc.errors import CheckpointError
from smpc.v1.control import Control
from smpc.v1.merge import Item, merge, survey
from smpc.v1.placement import Placement

PARTIAL = "_smp_is_partial"


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict(strict=False)` found; as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ModelState:
    """Reads and writes the state of `module`. `control` is None where one rank has all of it."""

    def __init__(self, module: nn.Module, placement: Placement, control: Control | None) -> None:
        self._module, self._placement, self._control = module, placement, control

    def local(self) -> dict[str, Any]:
        """Keys and detached values of this rank."""
        local = self._local_keys()
        return {
            key: value.detach() if isinstance(value, Tensor) else value
            for key, value in self._entries().items()
            if key in local
        }

    def full(self, *, only_on_rank_0: bool) -> dict[str, Any]:
        """All keys, tensors on the CPU; {} on other ranks than 0 if only rank 0 wants them. Collective."""
        assert self._control is not None, "one rank has all of its state"
        part = self.local()
        items = survey(part, self._control, "the model's state")
        wanted = not only_on_rank_0 or self._control.rank == 0
        merged = merge(part, items, self._control, lambda key: wanted)
        state = self._module.state_dict()
        if not wanted:
            state.clear()
        for key in state:
            state[key] = merged[key]
        return state

    def parameters_and_buffers(self) -> dict[str, Tensor]:
        """Every parameter and buffer by its canonical name, on the CPU. Collective."""
        assert self._control is not None, "one rank has all of its state"
        part = {name: tensor.detach() for name, tensor in self._named() if self._placement.is_local(name)}
        return merge(part, survey(part, self._control, "the model's state"), self._control, lambda key: True)

    def load(self, state: Mapping[str, Any], *, strict: bool) -> IncompatibleKeys:
        """Load a full state dict, or the whole part of this rank.

        Raises CheckpointError, before anything is written, listing all keys that are missing, unexpected, or of another shape or dtype.
        """
        given = {key: value for key, value in state.items() if key != PARTIAL}
        result = self._check({key: Item(0, value, isinstance(value, Tensor)) for key, value in given.items()}, strict)
        self._write(given)
        return result

    def load_own_part(self, part: Mapping[str, Any], *, strict: bool) -> IncompatibleKeys:
        """Load a partial state dict that was saved by this rank under the same partition."""
        given = {key: value for key, value in part.items() if key != PARTIAL}
        result = self._check({k: Item(0, v, isinstance(v, Tensor)) for k, v in given.items()}, strict, only_local=True)
        self._write(given)
        return result

    def load_parts(self, part: Mapping[str, Any], *, strict: bool) -> IncompatibleKeys:
        """Load the partial state dicts of all ranks, whatever partition they come from. Collective."""
        assert self._control is not None, "one rank has all of its state"
        given = {key: value for key, value in part.items() if key != PARTIAL}
        items = survey(given, self._control, "the state dict to load")
        result = self._check(items, strict)
        self._write(merge(given, items, self._control, self._local_keys().__contains__))
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

    def _check(self, items: Mapping[str, Item], strict: bool, *, only_local: bool = False) -> IncompatibleKeys:
        entries = self._entries()
        local = self._local_keys()
        expected = [key for key in entries if not only_local or key in local]
        missing = [key for key in expected if key not in items]
        unexpected = [key for key in items if key not in entries]
        wrong = [f"missing: {key}" for key in missing] + [f"unexpected: {key}" for key in unexpected]
        wrong = wrong if strict else []
        names = self._names()
        for key, item in items.items():
            if id(entries.get(key)) in names:
                wrong.extend(self._mismatch(key, entries[key], names[id(entries[key])], item, strict))
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

    def _mismatch(self, key: str, own: Tensor, name: str, item: Item, strict: bool) -> list[str]:
        if not item.is_tensor:
            return [f"{key}: expected a tensor, found {type(item.value).__name__}"]
        shape = self._placement.shape(name)
        if tuple(item.value.shape) != tuple(shape):
            return [f"shape of {key}: expected {list(shape)}, found {list(item.value.shape)}"]
        dtype = str(item.value.dtype).removeprefix("torch.")
        if strict and dtype != str(own.dtype).removeprefix("torch."):
            return [f"dtype of {key}: expected {own.dtype}, found torch.{dtype}"]
        return []

    def _write(self, values: Mapping[str, Any]) -> None:
        entries, names, local = self._entries(), self._names(), self._local_keys()
        with torch.no_grad():
            for key, value in values.items():
                if key not in local:
                    continue
                if id(entries[key]) in names:
                    entries[key].copy_(value)
                else:
                    self._module.get_submodule(key.rpartition(".")[0]).set_extra_state(value)
