"""Gradients of experts that ranks divide among them: averaged over the ranks that hold the same ones.

    inner      averages everything else over all replicas (`StageReplicas(..., apart=experts)`)
    group      ranks that hold the same experts: one of every so many replicas
    dividing   ranks that divide experts among them, where some are wholly on one of these: others have none of their rows

What comes back to an expert is divided by the number of ranks that send it tokens already (`smpc.experts.stacked`), so the average over
this group is that over all replicas. An expert without a gradient on one rank counts there as zero, on all of them it stays without. Of an
expert that others hold, a rank has a gradient without rows if they have one: so all speak of the same parameters in norms.
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
        dividing: TensorGroup | None = None,
    ) -> None:
        super().__init__(group, inner, backward_passes_per_step)
        held, self._dividing = list(experts), dividing
        self._experts = [parameter for parameter in held if parameter.requires_grad]
        if group.process_group is not None and group.size > 1:
            broadcast([parameter.detach() for parameter in held], group.process_group)

    def _set_aside(self) -> None:
        """Gradients that are there are averages, alike on all ranks, and stay so."""

    def _combine(self) -> None:
        if not self._experts or (self._group.size == 1 and self._dividing is None):
            return
        present = torch.tensor([p.grad is not None for p in self._experts], dtype=torch.int32)
        counts = sum_over(present.to(self._experts[0].device), self._group)
        anywhere = (counts if self._dividing is None else sum_over(counts, self._dividing)).tolist()
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for parameter, count in zip(self._experts, anywhere, strict=True):
            if not count:
                continue
            dtype = gradient_dtype(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            kinds.setdefault(dtype, []).append(parameter.grad)
        for grads in kinds.values() if self._group.size > 1 else ():
            sum_together(grads, self._group, divided_by=self._group.size)
