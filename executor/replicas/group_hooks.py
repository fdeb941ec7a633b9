"""Reduces gradients over a tensor-, context- or expert-parallel group, once a step, around the reduction over replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from smpc.executor.collectives import TensorGroup, sum_over
from smpc.executor.replicas.step_hooks import StepHooks


class GroupHooks(ABC):
    """The hooks of an interpreter for stages over a group of ranks.

    `inner` are the hooks that average over replicas, in the last backward of a step; the group's own part comes at the end of the step.
    `backward_passes_per_step`: gradients accumulate locally over that many steps.
    """

    def __init__(self, group: TensorGroup, inner: StepHooks | None, backward_passes_per_step: int) -> None:
        self._group, self.inner = group, inner
        self._passes, self._num_steps = backward_passes_per_step, 0

    def start_of_step(self) -> None:
        """Count the step. Gradients that earlier steps left have been combined already."""
        self._set_aside()
        self._num_steps += 1
        if self.inner is not None:
            self.inner.start_of_step()

    def did_not_train(self) -> None:
        """The step that has ended did no backward: it does not count."""
        self._num_steps -= 1
        if self.inner is not None:
            self.inner.did_not_train()

    def before_last_backward(self, stage: int, roots: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """What the replicas' hooks add."""
        return None if self.inner is None else self.inner.before_last_backward(stage, roots)

    def end_of_step(self) -> None:
        """Combine gradients over the group, after the last of the steps that accumulate."""
        if self.inner is not None:
            self.inner.end_of_step()
        if self._is_complete:
            with torch.no_grad():
                self._combine()

    @property
    def _is_complete(self) -> bool:
        """Whether no gradients wait that steps have accumulated locally."""
        return self._num_steps % self._passes == 0

    @abstractmethod
    def _set_aside(self) -> None:
        """Called before a step is counted: what is there is combined already, where no gradients wait."""

    @abstractmethod
    def _combine(self) -> None:
        """Called after the last of the steps that accumulate."""


def innermost(hooks: StepHooks | None) -> StepHooks | None:
    """What replicas do, without the groups around it."""
    while isinstance(hooks, GroupHooks):
        hooks = hooks.inner
    return hooks


def sum_together(grads: Sequence[Tensor], group: TensorGroup, divided_by: int = 1) -> None:
    """Replaces gradients of one dtype by their sums over the group, divided by a number, in one message.

    The division comes first, as in DistributedDataParallel: a sum may be beyond float16 whose average is not.
    """
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    flat = sum_over(flat if divided_by == 1 else flat / divided_by, group)
    for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view(grad.shape))
