"""Inputs of the model that its forward writes into: all ranks' scripts get what one process would have.

    out = model(x)              forward does x.mul_(2)
    loss = (out - x).mean()     of the doubled x, here and in the batch that x is a part of

Stages compute on copies, and the program returns these (`smpc.codegen.rewrite.outputs`).

    the rank of the last stage     in the step function, as it calls the model: into what it gives the model (`smpc.tracer.left_inputs`)
    all ranks, after the step      `share`: into the arguments of the script's call, wherever it has tensors of rank 0's form
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smpc.tracer.left_inputs import write_into
from smpc.tracer.state.attribute_memory import Extent
from smpc.v1.session.step_messages import Control
from smpc.v1.steps.arguments import ArgumentForm, Arguments, map_leaves, own_tensors
from smpc.v1.steps.results import pack, unpack


class Copies:
    """A microbatch's arguments in memory of their own, for values with a history: views of the batch would take it to the next one."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def made_of(self, arguments: Arguments) -> Arguments:
        """The same arguments, with copies of their tensors."""

        def copied(leaf: Any, path: str) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            self._pairs.append((leaf, leaf.clone()))
            return self._pairs[-1][1]

        return {name: map_leaves(value, copied, name) for name, value in arguments.items()}

    @torch.no_grad()
    def write_back(self, written: Sequence[Tensor]) -> list[Tensor]:
        """Bring what was written to the arguments themselves; those that it has changed."""
        reached = slots_of([copy for _, copy in self._pairs], written)
        for slot in reached:
            write_into(*self._pairs[slot])
        return [self._pairs[slot][0] for slot in reached]


def slots_of(tensors: Sequence[Tensor], written: Sequence[Tensor]) -> list[int]:
    """The positions of the tensors of which written ones are a part."""
    extents = [Extent.of(each.detach()) for each in written if each.numel()]
    return [
        i for i, each in enumerate(tensors) if each.numel() and any(map(Extent.of(each.detach()).overlaps, extents))
    ]


def share(
    control: Control, source: int, form: ArgumentForm, slots: Sequence[int], tensors: Sequence[Tensor], own: Arguments
) -> None:
    """Bring the tensors in these slots of rank 0's form from the rank `source` to all, into this rank's own arguments of the step.

    The other ranks' slots and tensors are not looked at.
    """
    found = control.broadcast_object(list(slots), source)
    specs = [form.specs[slot] for slot in found]
    if control.rank == source:
        payload = pack([tensors[slot] for slot in slots], control.device)
    else:
        payload = torch.empty(sum(spec.num_bytes for spec in specs), dtype=torch.uint8, device=control.device)
    control.broadcast_bytes(payload, source)
    mine = own_tensors(form, own)
    with torch.no_grad():
        for slot, values in zip(found, unpack(payload, specs), strict=True):
            target = mine.get(slot)
            if target is not None and target.shape == values.shape and target.dtype is values.dtype:
                write_into(target, values)
