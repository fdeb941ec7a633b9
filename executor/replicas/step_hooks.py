"""Hooks of replicas in a training step: the interpreter calls them, and knows nothing else of data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class StepHooks(Protocol):
    """The hooks of data parallelism in a step; see `smpc.executor.replicas.data_parallel`."""

    def start_of_step(self) -> None:
        """Before the first instruction of a training step."""

    def before_last_backward(self, stage: int, roots: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Before a stage's last backward, with its root tensors; returns one more (root, gradient), or None."""

    def end_of_step(self) -> None:
        """After the last instruction of a training step."""

    def did_not_train(self) -> None:
        """After that, once it is known that nothing was differentiated."""
