"""Parameters of sharded models that have nothing to divide: no dimension (CLIP's `logit_scale`), or no element.

    wholes = WholeParameters([model], groups)
    shard(model, ..., ignored=wholes.all())        every rank has them whole
    wholes.average()                               after a backward, or several: their gradients are those of the ranks' mean loss

Gradients that were averaged before stay what they are, as all ranks have the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpc.sharding.wide_gradients import gradient_dtype


def stays_whole(parameter: Tensor) -> bool:
    """Whether there is nothing to divide."""
    return not parameter.dim() or not parameter.numel()


class WholeParameters:
    """See above. `groups`: over which gradients are averaged, one after the other, as those of a mesh's dimensions. `left`:
    parameters that each rank has for itself."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        groups: Sequence[dist.ProcessGroup],
        left: Collection[nn.Parameter] = (),
    ) -> None:
        held = {id(p): p for module in modules for p in module.parameters() if stays_whole(p) and p not in left}
        self._parameters, self._groups = list(held.values()), groups

    def all(self) -> frozenset[nn.Parameter]:
        """What is not divided."""
        return frozenset(self._parameters)

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients. One that a rank does not have counts there as zero; if no rank has it, none gets it. Collective."""
        if not self._parameters:
            return
        present = [parameter.grad is not None for parameter in self._parameters]
        anywhere = self._sum(torch.tensor(present, dtype=torch.int32, device=self._parameters[0].device)).tolist()
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for parameter, count in zip(self._parameters, anywhere, strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            if count and parameter.grad is not None:
                kinds.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        num_ranks = math.prod(group.size() for group in self._groups)
        for grads in kinds.values():
            flat = self._sum(torch.cat([grad.reshape(-1) for grad in grads])).div_(num_ranks)
            for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def _sum(self, own: Tensor) -> Tensor:
        for group in self._groups:
            dist.all_reduce(own, group=group)
        return own
