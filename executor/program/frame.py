"""What the handlers of a bound program work on: a `Frame` of tensors for each stage and microbatch, and the `StepInputs`.

A frame has the tensors of one stage and one microbatch on a rank, from the first value received until the last gradient is sent:

    inputs     values in the order of StageCode.inputs; put there by RECV and MOVE, taken by F
    leaves     F leaves here those inputs that want a gradient; B reads their .grad
    outputs    values in the order of StageCode.outputs that SEND and MOVE still have to take
    edges      by output: where in the autograd graph its gradient enters. Not the tensor itself: if nothing
               saved it for backward, its memory is free as soon as it has been sent
    roots      what B starts from: (edge, gradient), in the order in which the gradients arrived
    grads      gradients of the inputs that SEND_GRAD and MOVE_GRAD still have to take
    pending    what a split backward has left for W: see `smpc.executor.split_backward.deferred_calls`
    kept       between F and OFFLOAD: what checkpointed regions keep and may be moved
    stay       ... and the addresses of storages that must not be
    away       between OFFLOAD and RELOAD: what is moved, see `smpc.executor.program.host_copies`
    loaded     on CUDA, between RELOAD and B: when it is back

An input that the stage passes on is one tensor, both input and output: its edge is the leaf itself, so
autograd adds the gradient that comes from further down first and the stage's own contributions after it, as
in an unsplit run.

A `StepInputs` has the inputs that the caller of a step passes to the handlers. A `Handler` is an instruction with its operands looked up.
It reads everything that differs from step to step from its program's `StepInputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from smpc.codegen.program import Instruction
from smpc.executor.program.host_copies import Away, restore_sizes
from smpc.executor.split_backward.deferred_calls import Pending

if TYPE_CHECKING:
    from smpc.executor.program.channels import Inbox

Root: TypeAlias = tuple[Tensor | GradientEdge, Tensor | None]


class Frame:
    """State of one (stage, microbatch); empty before and after its part of a step."""

    __slots__ = ("away", "edges", "grads", "inputs", "kept", "leaves", "loaded", "outputs", "pending", "roots", "stay")

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.inputs: list[Tensor | None] = [None] * num_inputs
        self.leaves: list[Tensor | None] = [None] * num_inputs
        self.grads: list[Tensor | None] = [None] * num_inputs
        self.outputs: list[Tensor | None] = [None] * num_outputs
        self.edges: list[Tensor | GradientEdge | None] = [None] * num_outputs
        self.roots: list[Root] = []
        self.pending = Pending()
        self.kept: list[Tensor] = []
        self.stay: frozenset[int] = frozenset()
        self.away: list[Away] = []
        self.loaded: torch.cuda.Event | None = None

    def clear(self) -> None:
        """Let go of everything."""
        for slots in (self.inputs, self.leaves, self.grads, self.outputs, self.edges):
            slots[:] = [None] * len(slots)
        self.roots = []
        self.pending.clear()
        self.kept = []
        if self.loaded is not None:
            self.loaded.synchronize()
            self.loaded = None
        restore_sizes(self.away)


Inputs = Sequence[Mapping[str, Tensor]]
OnOutput = Callable[[int, tuple[Tensor, ...]], Sequence[tuple[Tensor, Tensor | None]] | None]


@dataclass(slots=True)
class StepInputs:
    """The inputs of a step."""

    inputs: Inputs | None = None
    on_output: OnOutput | None = None
    state: dict[int, frozenset[int]] = field(default_factory=dict)  # stage -> addresses of its buffers' storages


@dataclass(frozen=True, slots=True)
class Handler:
    """A bound instruction. `inbox`: it first takes the next delivery from there."""

    run: Callable[[], None]
    instruction: Instruction
    inbox: Inbox | None = None
