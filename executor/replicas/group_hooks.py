"""Reduces gradients over a tensor-, context- or expert-parallel group, once a step, around the reduction over replicas.

`TensorReplicas` reduces over a tensor-parallel group, after the average over replicas:

    a parameter of a distributed module     acts on the samples of the whole group, and its gradient sums over them: divided by the size
                                            of the group where each rank has samples of its own, so that it averages the ranks' losses
    any other parameter                     is held by every rank of the group and saw its samples alone: averaged over the group

The group's part is one all-reduce for each dtype. Where replicas hold parts of parameters, the ranks of a group hold the same part of each.
A parameter without a gradient on one rank counts there as zero; without one on all ranks, it stays without.

Hooks of replicas in a training step: the interpreter calls them, and knows nothing else of data parallelism.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from smpc.errors import StepError
from smpc.executor.collectives import TensorGroup, sum_over
from smpc.executor.replicas.data_parallel import broadcast
from smpc.executor.replicas.forward_writes import ForwardWrites
from smpc.sharding.dtensors import local
from smpc.sharding.whole_parameters import average_gradients


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


class GroupHooks(ABC):
    """The hooks of an interpreter for stages over a group of ranks.

    `inner` are the hooks that average over replicas, in the last backward of a step; the group's own part comes at the end of the step.
    `backward_passes_per_step`: gradients accumulate locally over that many steps.
    """

    def __init__(self, group: TensorGroup, inner: StepHooks | None, backward_passes_per_step: int) -> None:
        self._group, self.inner = group, inner
        self._passes, self._num_steps = backward_passes_per_step, 0
        self._add = partial(sum_over, group=group)

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


class TensorReplicas(GroupHooks):
    """See `GroupHooks`.

    `scaled`: parameters of distributed modules; `others`: the other ones, with their names; `whole`: parameters and buffers that all
    ranks of the group hold: construction copies them from the group's first rank; `own_samples`: whether each rank has its own.
    """

    def __init__(
        self,
        scaled: Iterable[nn.Parameter],
        others: Iterable[tuple[str, nn.Parameter]],
        whole: Iterable[Tensor],
        group: TensorGroup,
        inner: StepHooks | None,
        *,
        own_samples: bool,
        backward_passes_per_step: int = 1,
    ) -> None:
        super().__init__(group, inner, backward_passes_per_step)
        assert group.process_group is not None, "one rank alone has nothing to average"
        others = list(others)
        self._scaled = [parameter for parameter in scaled if parameter.requires_grad]
        self._others = [(name, parameter) for name, parameter in others if parameter.requires_grad]
        self._own_samples = own_samples
        self._writes = ForwardWrites(others if own_samples else (), group.process_group)
        self._scaled_already: dict[int, Tensor] = {}
        broadcast([local(tensor.detach()) for tensor in whole], group.process_group)

    def start_of_step(self) -> None:
        """Also see what evaluations have written."""
        super().start_of_step()
        self._writes.begin()

    def end_of_step(self) -> None:
        """Also see what forwards have written."""
        super().end_of_step()
        self._writes.end()

    def _set_aside(self) -> None:
        if self._own_samples and self._is_complete:
            self._scaled_already = {id(p): local(p.grad).clone() for p in self._scaled if p.grad is not None}

    def did_not_train(self) -> None:
        """The step that has ended did no backward: it does not count, and what it may have scaled is not scaled again."""
        self._set_aside()
        super().did_not_train()

    def _combine(self) -> None:
        if self._own_samples:
            self._scale()
        self._average()

    def _scale(self) -> None:
        for parameter in self._scaled:
            if parameter.grad is not None:
                old, own = self._scaled_already.pop(id(parameter), None), local(parameter.grad)
                if old is None:
                    own.div_(self._group.size)
                else:
                    own.sub_(old).div_(self._group.size).add_(old)

    def _average(self) -> None:
        """Average whole gradients: what earlier steps left is the same on all ranks, and stays so."""
        for name, parameter in self._others:
            _check_dense(name, parameter)
        average_gradients([parameter for _, parameter in self._others], self._add, self._group.size)


def _check_dense(name: str, parameter: nn.Parameter) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise StepError(
            f"parameter {name!r} is held by several tensor-parallel ranks, so its gradient must be dense, found {parameter.grad.layout}; "
            "use sparse=False"
        )
