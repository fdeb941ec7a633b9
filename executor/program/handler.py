"""The bound form of a program: handlers, and the inputs that the caller of a step passes to them.

A `Handler` is an instruction with its operands looked up. It reads everything that differs from step to step from its program's `Step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from smpc.codegen.program import Instruction
from smpc.executor.program.inbox import Inbox

Inputs = Sequence[Mapping[str, Tensor]]
OnOutput = Callable[[int, tuple[Tensor, ...]], Sequence[tuple[Tensor, Tensor | None]] | None]


@dataclass(slots=True)
class Step:
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
