"""What forward leaves in the containers of its inputs, for the script that goes on with them.

    def forward(self, batch, losses):
        batch["x"] = self.embed(batch["x"])
        losses.append(batch["x"].square().mean())

A recording runs on containers of its own, and so do stages. So a trace says what the inputs are after the run, in the form of its output:
`Trace.left`, a structure like `Trace.inputs`, and for each leaf a node, a constant, or `SameInput`. `LeftInputs` brings that to the
script's own containers, in place, so that whoever else holds them sees it, and so it brings what forward has written into tensors of
its inputs (`smpc.codegen.rewrite.outputs`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from smpc.errors import StepError
from smpc.tracer.constants import SameInput
from smpc.tracer.structure import LEAF, Structure, containers_of, flatten


def left_in(
    inputs: Any, before: Sequence[Any], structure: Structure, reference: Callable[[Any], Any]
) -> tuple[Structure | None, tuple[Any, ...]]:
    """What forward has left in its inputs, whose leaves and structure are given: a structure and its leaves; None: the same as before."""
    after, left = flatten(inputs)
    if left == structure and all(one is other for one, other in zip(before, after, strict=True)):
        return None, ()
    left.check_classes()
    positions = {id(leaf): position for position, leaf in enumerate(before)}
    return left, tuple(SameInput(positions[id(leaf)]) if id(leaf) in positions else reference(leaf) for leaf in after)


@dataclass(frozen=True, slots=True)
class LeftInputs:
    """What forward has left in its inputs in one run.

    `structure`: theirs before it. `left`, `leaves`: of their containers after it, if it changed them. `written`: tensors of the
    inputs, by position among the leaves, with what forward has written into them.
    """

    structure: Structure
    left: Structure | None
    leaves: Sequence[Any]
    written: Sequence[tuple[int, torch.Tensor]] = ()

    def put_into(self, inputs: Any) -> list[torch.Tensor]:
        """Change a call's inputs, in place, as forward has changed those that it was given; the tensors that were written into.

        Raises StepError for inputs of another structure, and for a container that is among them twice.
        """
        before, structure = flatten(inputs)
        if structure != self.structure:
            raise StepError(
                f"the model's forward changes its inputs: expected them to be {self.structure.paths()} still, found {structure.paths()}; "
                "make what it changes anew for each call of the model, or have it return what it puts there"
            )
        targets = []
        for position, values in self.written:
            write_into(before[position], values)
            targets.append(before[position])
        if self.left is not None:
            _check_reached_once(inputs)
            leaves = (before[leaf.position] if isinstance(leaf, SameInput) else leaf for leaf in self.leaves)
            _merged(inputs, self.left.unflatten(leaves))
        return targets


def _check_reached_once(inputs: Any) -> None:
    """StepError for a container that can be changed and that the inputs hold twice: the recording had two."""
    seen = set[int]()
    for container in containers_of(inputs):
        if not isinstance(container, (tuple, frozenset, slice)):
            if id(container) in seen:
                raise StepError(
                    f"the model's forward changes containers of its inputs: expected each of them once, found a "
                    f"{type(container).__name__} that they hold twice; give the model a copy of it in one of these places"
                )
            seen.add(id(container))


def write_into(target: torch.Tensor, values: torch.Tensor) -> None:
    """`target.copy_(values)`, for tensors of inference mode, too."""
    with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
        target.copy_(values)


def _merged(old: Any, new: Any) -> Any:
    """What takes the place of `old`: itself, with what `new` holds, where it is a container of the same kind that can be changed."""
    if old is new or type(old) is not type(new) or isinstance(old, (torch.Tensor, nn.Module)):
        return new
    if isinstance(old, list):
        old[:] = [_merged(*pair) for pair in zip(old, new, strict=False)] + new[len(old) :]
        return old
    if isinstance(old, MutableMapping):
        for key in [key for key in old if key not in new]:
            del old[key]
        for key, value in new.items():
            merged = _merged(old[key], value) if key in old else value
            if key not in old or merged is not old[key]:
                old[key] = merged
        return old
    if isinstance(old, set):
        old.clear()
        old.update(new)
        return old
    if isinstance(old, tuple):
        items = [_merged(*pair) for pair in zip(old, new, strict=False)] + list(new[len(old) :])
        return old if list(map(id, items)) == list(map(id, old)) else tuple.__new__(type(old), items)
    return _merged_object(old, new)


def _merged_object(old: Any, new: Any) -> Any:
    names = _attributes(new)
    if not names:
        return new
    for name in names:
        before = getattr(old, name, _ABSENT)
        after = getattr(new, name)
        merged = after if before is _ABSENT else _merged(before, after)
        if merged is not before:
            object.__setattr__(old, name, merged)
    for name in set(_attributes(old)) - set(names):
        object.__delattr__(old, name)
    return old


_ABSENT = object()


def _attributes(value: Any) -> list[str]:
    """Of an object that `flatten` opens; none of any other."""
    _, structure = flatten(value)
    if structure.kind == LEAF:
        return []
    own = [each.name for each in fields(value) if hasattr(value, each.name)] if is_dataclass(value) else []
    return list(dict.fromkeys((*own, *getattr(value, "__dict__", ()))))
