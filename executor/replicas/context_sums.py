"""Gradients of parameters of which context-parallel ranks have summands: summed once, at the end of a step.

Every rank of a context-parallel group has the whole model and a part of the sequence, so what its backwards leave in a parameter is a
summand (`ShardedTrace.summed`). `inner` are the hooks that average over replicas. Sums and averages commute:

    inner averages over other ranks                 the group sums what they leave, in one call for each large gradient
    ... over ranks with the whole group among them  times the size of the group that is the sum: nothing is sent

Gradients that exist when a step begins are sums already. They are divided by the size of the group, so that its end restores them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup, summed
from smpc.executor.replicas.data_parallel import StageReplicas
from smpc.executor.replicas.fully_shard import StageShards
from smpc.executor.replicas.group_hooks import GroupHooks, StepHooks, innermost
from smpc.sharding.dtensors import local
from smpc.sharding.whole_parameters import sum_together


class ContextSums(GroupHooks):
    """See `GroupHooks`.

    UsageError where replicas average over some of the group's ranks only.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: TensorGroup, inner: StepHooks | None) -> None:
        own = innermost(inner)
        super().__init__(group, inner, own.backward_passes_per_step if isinstance(own, StageReplicas) else 1)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._is_averaged = _averages_over(inner, group)
        self._is_divided = False

    def _set_aside(self) -> None:
        if not self._is_divided:
            for _, grad in self._gradients():
                grad.div_(self._group.size)
        self._is_divided = True

    def did_not_train(self) -> None:
        """The step that has ended did no backward: it does not count, and gradients are again what they were before it."""
        super().did_not_train()
        if self._is_divided and self._is_complete:
            for _, grad in self._gradients():
                grad.mul_(self._group.size)
            self._is_divided = False

    def _combine(self) -> None:
        self._is_divided = False
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for parameter, grad in self._gradients():
            if self._is_averaged:
                grad.mul_(self._group.size)
            elif grad.is_sparse:
                parameter.grad = summed(grad, self._group)
            else:
                kinds.setdefault(grad.dtype, []).append(grad)
        for grads in kinds.values():
            sum_together(grads, self._add)

    def _gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """What can be changed in place; a sparse tensor that is detached shares no memory with the gradient."""
        found = [(each, each.grad) for each in self._parameters if each.grad is not None]
        return [(each, grad if grad.is_sparse else local(grad).detach()) for each, grad in found]


def _averages_over(hooks: StepHooks | None, group: TensorGroup) -> bool:
    """Whether the hooks average over ranks with all of the group among them."""
    inner = innermost(hooks)
    if not isinstance(inner, StageReplicas | StageShards) or group.process_group is None:
        return False
    replicas = {*dist.get_process_group_ranks(inner.group)}
    own = {*dist.get_process_group_ranks(group.process_group)}
    common = own & replicas
    if 1 < len(common) < len(own):
        raise UsageError(
            f"expected replicas that are averaged over all of the context-parallel ranks {sorted(own)} or over one of them, found "
            f"{sorted(common)} among them; take the groups from one `smpc.mesh.Mesh`"
        )
    return own <= replicas
