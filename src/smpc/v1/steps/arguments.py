"""Step arguments on their way from pipeline rank 0 to the last pipeline rank.

Only pipeline rank 0's tensors count, while the step function runs where the model ends. So the tensors of rank 0's arguments, wherever
they lie in containers, take the place of whatever the last rank was given there; its other arguments (model, optimizer, flags) are its own.

Terms
    form        rank 0's arguments that hold tensors, with a `Slot` for every tensor and a `Plain` for every other leaf
    merged      the last rank's arguments with those of the form put in

    rank 0:  train_step(model, {"x": tensor, "n": 3}, True)     form: {"batch": {"x": Slot(0), "n": Plain(3)}}
    last:    train_step(model, None, True)                      merged: model, {"x": tensor, "n": 3}, True

Where the last rank passes a container of the same shape, plain leaves are its own; otherwise rank 0's, if they can be sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smpc.errors import StepError
from smpc.executor.transport.layout import WireFormat
from smpc.tracer.ir import TensorSpec
from smpc.tracer.literals import is_constant, normalise
from smpc.v1.steps.microbatch import map_leaves
from smpc.v1.steps.step_body import Arguments


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor; `index` is its place among those that are sent."""

    index: int


@dataclass(frozen=True, slots=True)
class Plain:
    """Any other leaf. `sent`: `value` is rank 0's; otherwise it has none that can be sent."""

    value: Any = None
    sent: bool = False


@dataclass(frozen=True)
class ArgumentForm:
    """The form of rank 0's arguments, with the specs of the tensors."""

    skeleton: Arguments
    specs: tuple[TensorSpec, ...]

    @property
    def formats(self) -> tuple[WireFormat, ...]:
        """How the tensors travel."""
        return tuple(WireFormat.of(f"tensor argument {i}", spec) for i, spec in enumerate(self.specs))


def form_of(arguments: Arguments) -> tuple[ArgumentForm, list[Tensor]]:
    """The form of rank 0's arguments, and the tensors to send; one that occurs twice is sent once."""
    tensors: list[Tensor] = []
    slots: dict[int, Slot] = {}

    def replace(leaf: Any, path: str) -> Any:
        if not isinstance(leaf, Tensor):
            leaf = normalise(leaf)
            return Plain(leaf, sent=True) if is_constant(leaf) else Plain()
        if id(leaf) not in slots:
            slots[id(leaf)] = Slot(len(tensors))
            tensors.append(leaf)
        return slots[id(leaf)]

    skeleton: Arguments = {}
    for name, value in arguments.items():
        replaced = map_leaves(value, replace, name)
        if _has_slot(replaced):
            skeleton[name] = replaced
    return ArgumentForm(skeleton, tuple(TensorSpec.of(tensor.detach()) for tensor in tensors)), tensors


def merge_arguments(form: ArgumentForm, own: Arguments, tensors: list[Tensor]) -> Arguments:
    """The last rank's arguments with rank 0's tensors in their places.

    Raises StepError for a leaf that only rank 0 has and that cannot be sent.
    """

    def put(name: str) -> Any:
        leaves: dict[str, Any] = {}
        map_leaves(own.get(name), lambda leaf, path: leaves.setdefault(path, leaf), name)

        def fill(leaf: Any, path: str) -> Any:
            if isinstance(leaf, Slot):
                return tensors[leaf.index]
            if path in leaves and not isinstance(leaves[path], Tensor):
                return leaves[path]
            if not leaf.sent:
                raise StepError(
                    f"argument {path}: pipeline rank 0 has an object there that cannot be sent to the rank of the "
                    "last stage, and that rank passes nothing in its place; pass it as an argument of its own"
                )
            return leaf.value

        return map_leaves(form.skeleton[name], fill, name)

    # Rank 0's order where both have the argument; the function is called by name, so order means nothing else.
    return {**own, **{name: put(name) for name in form.skeleton}}


def _has_slot(value: Any) -> bool:
    found: list[Slot] = []

    def note(leaf: Any, path: str) -> Any:
        if isinstance(leaf, Slot):
            found.append(leaf)
        return leaf

    map_leaves(value, note, "")
    return bool(found)
