"""Gradients of experts that ranks divide among them: averaged over the ranks that hold the same ones.

    inner      averages everything else over all replicas (`StageReplicas(..., apart=experts)`)
    group      ranks that hold the same experts: one of every so many replicas

What comes back to an expert is divided by the number of ranks that send it tokens already (`smpc.experts.stacked`), so the average over
this group is that over all replicas. An expert without a gradient on one rank counts there as zero, on all of them it stays without.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from smpc.executor.collectives import TensorGroup, sum_over
from smpc.executor.replicas.data_parallel import broadcast
from smpc.executor.replicas.group_hooks import GroupHooks, sum_together
from smpc.executor.replicas.step_hooks import StepHooks
from smpc.sharding.wide_gradients import gradient_dtype


class ExpertReplicas(GroupHooks):
    """See `GroupHooks`. Construction gives all ranks of the group the experts of its first one."""

    def __init__(
        self,
        experts: Iterable[nn.Parameter],
        group: TensorGroup,
        inner: StepHooks | None,
        backward_passes_per_step: int = 1,
    ) -> None:
        super().__init__(group, inner, backward_passes_per_step)
        held = list(experts)
        self._experts = [parameter for parameter in held if parameter.requires_grad]
        if group.process_group is not None and group.size > 1:
            broadcast([parameter.detach() for parameter in held], group.process_group)

    def _set_aside(self) -> None:
        """Gradients that are there are averages, alike on all ranks, and stay so."""

    def _combine(self) -> None:
        if self._group.size == 1 or not self._experts:
            return
        present = torch.tensor([p.grad is not None for p in self._experts], dtype=torch.int32)
        anywhere = sum_over(present.to(self._experts[0].device), self._group).tolist()
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for parameter, count in zip(self._experts, anywhere, strict=True):
            if not count:
                continue
            dtype = gradient_dtype(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            kinds.setdefault(dtype, []).append(parameter.grad)
        for grads in kinds.values():
            sum_together(grads, self._group, divided_by=self._group.size)
