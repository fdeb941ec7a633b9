"""The state of a whole model, from and to ranks that hold some of its experts.

`ExpertHoldings` are made before experts are cut, and know the names, in their order, that the whole model's state has. Experts' tensors are
gathered expert by expert along a new first dimension, or along the one that they have; everything else is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup, gathered
from smpc.experts.dispatch import owned
from smpc.experts.find_experts import Found, Stacked

Value = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tensors of experts. `names`: one for each expert, or, if `is_stacked`, the one name of the tensor that has all of them."""

    names: tuple[str, ...]
    num_experts: int
    is_stacked: bool


@dataclass(frozen=True, slots=True)
class ExpertHoldings:
    """What a rank holds of a model. `first`: by the names in the state dict, the name that stands for all of the same tensor."""

    group: TensorGroup
    first: Mapping[str, str]
    rows: tuple[_Rows, ...]

    @classmethod
    def of(cls, model: nn.Module, found: Sequence[Found], group: TensorGroup) -> ExpertHoldings:
        """For experts that are about to be cut."""
        seen: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        first = {name: seen.setdefault(id(tensor), name) for name, tensor in state.items()}
        rows = [_Rows(names, count, is_stacked) for one in found for names, count, is_stacked in _expert_tensors(one)]
        return cls(group, first, tuple(rows))

    def own(self) -> dict[str, slice | None]:
        """The tensors of experts that this rank has part of: by name, the part of the first dimension; None: all of it."""
        found: dict[str, slice | None] = {}
        for rows in self.rows:
            mine = owned(rows.num_experts, self.group)
            if rows.is_stacked:
                found[rows.names[0]] = slice(mine.start, mine.stop)
            else:
                found.update(dict.fromkeys(rows.names[mine.start : mine.stop]))
        return found

    def whole(self, tensors: Mapping[str, Tensor], value: Value) -> dict[str, Tensor]:
        """`value` of every tensor of the whole model, on every rank; without those for which it is None. All ranks must call it."""
        experts: dict[str, Tensor] = {}
        inside = {name for rows in self.rows for name in rows.names}
        for rows in self.rows:
            experts.update(self._gathered(rows, tensors, value))
        found = {}
        for name, first in self.first.items():
            own = experts.get(first) if first in inside else value(tensors[first]) if first in tensors else None
            if own is not None:
                found[name] = own.detach()
        return found

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copies this rank's part of a whole model's state. UsageError if it does not fit, before anything is copied."""
        own, wrong, parts = self.own(), [], {}
        absent = {name for rows in self.rows for name in rows.names} - set(own)
        for name in dict.fromkeys(self.first.values()):
            if name in absent or name not in tensors:
                continue
            given = next((state[key] for key, first in self.first.items() if first == name and key in state), None)
            if given is None:
                wrong.append(f"{name}: expected it in the state, found nothing")
                continue
            part = given if own.get(name) is None else given[own[name]]
            if part.shape != tensors[name].shape:
                wrong.append(f"{name}: expected shape {tuple(tensors[name].shape)}, found {tuple(part.shape)}")
            parts[name] = part
        if wrong:
            raise UsageError("the state does not fit the model: " + "; ".join(wrong))
        with torch.no_grad():
            for name, part in parts.items():
                tensors[name].copy_(part)

    def _gathered(self, rows: _Rows, tensors: Mapping[str, Tensor], value: Value) -> dict[str, Tensor]:
        group, mine = self.group, owned(rows.num_experts, self.group)
        if rows.is_stacked:
            tensor = tensors[rows.names[0]]
            own = value(tensor)
            has = [own is not None] * len(mine)
            stack = torch.zeros_like(tensor) if own is None else own
        else:
            members = [tensors[name] for name in rows.names[mine.start : mine.stop]]
            values = [value(member) for member in members]
            has = [own is not None for own in values]
            stack = torch.stack(
                [torch.zeros_like(m) if own is None else own for m, own in zip(members, values, strict=True)]
            )
        room = max(group.shares(rows.num_experts))
        flags = torch.tensor(has + [False] * (room - len(has)), dtype=torch.uint8, device=stack.device)
        is_there = _without_gaps(gathered(flags, 0, group), rows.num_experts, group)
        padded = torch.cat((stack.detach(), stack.new_zeros(room - len(mine), *stack.shape[1:])))
        every = _without_gaps(gathered(padded, 0, group), rows.num_experts, group)
        if rows.is_stacked:
            return {rows.names[0]: every} if bool(is_there.any()) else {}
        return {
            name: own for name, own, there in zip(rows.names, every.unbind(), is_there.tolist(), strict=True) if there
        }


def _expert_tensors(found: Found) -> list[tuple[tuple[str, ...], int, bool]]:
    """The names of the tensors of experts, their number, and whether one tensor has them all."""
    if isinstance(found, Stacked):
        return [((_joined_whole_name(found.name, name),), found.num_experts, True) for name in found.parameters]
    members = [_joined_whole_name(found.name, key) for key in found.keys]
    names = list(found.members[0].state_dict())
    return [(tuple(f"{member}.{name}" for member in members), len(members), False) for name in names]


def _joined_whole_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _without_gaps(tensor: Tensor, num_experts: int, group: TensorGroup) -> Tensor:
    """[E, ..] of [ranks x room, ..], where each rank's part fills only as much of the room as it has experts."""
    shares = group.shares(num_experts)
    if len(set(shares)) == 1:
        return tensor
    parts = tensor.chunk(group.size)
    return torch.cat([part[:share] for part, share in zip(parts, shares, strict=True)])
