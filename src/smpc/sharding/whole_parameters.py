"""Parameters of sharded models that have nothing to divide: no dimension (CLIP's `logit_scale`), or no element.

    wholes = WholeParameters([model], groups)
    shard(model, ..., ignored=wholes.all())        every rank has them whole
    wholes.average()                               after a backward, or several: their gradients are now of the ranks' mean loss

Gradients that were averaged before stay what they are, as all ranks have the same. `average_gradients` and `sum_together` do so for any
parameters that ranks have whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpc.sharding.dtensors import local
from smpc.sharding.wide_gradients import gradient_dtype

# Bytes: of a gradient that is summed in place, and of a message of smaller ones at most. `smpc.partitioner.costs.named_optimizers` predicts
# both.
ALONE, TOGETHER = 1 << 20, 1 << 25
Add = Callable[[Tensor], Tensor]  # sums a contiguous tensor over ranks, in place, and returns it


def stays_whole(parameter: Tensor) -> bool:
    """Whether there is nothing to divide."""
    return not parameter.dim() or not parameter.numel()


class WholeParameters:
    """See above. `groups`: over which gradients are averaged, one after the other, such as the groups of a mesh's dimensions. `left`:
    parameters that each rank has for itself."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        groups: Sequence[dist.ProcessGroup],
        left: Collection[nn.Parameter] = (),
    ) -> None:
        held = {id(p): p for module in modules for p in module.parameters() if stays_whole(p) and p not in left}
        self._parameters, self._groups = list(held.values()), groups
        self._divisor: int | None = None
        self._before: dict[nn.Parameter, Tensor] = {}  # gradients that are the same on all ranks

    def all(self) -> frozenset[nn.Parameter]:
        """What is not divided."""
        return frozenset(self._parameters)

    def begin(self, divisor: int | None = None) -> None:
        """Before gradients come; they are divided by `divisor`, by default the number of ranks."""
        self._divisor = divisor
        there = {} if divisor is None else {p: p.grad for p in self._parameters if p.grad is not None}
        self._before = {parameter: grad.detach().clone() for parameter, grad in there.items()}

    def average(self) -> None:
        """Average the gradients (`average_gradients`). Collective."""
        every = math.prod(group.size() for group in self._groups)
        with torch.no_grad():
            for parameter, before in self._before.items():
                if parameter.grad is not None:
                    parameter.grad.sub_(before)
            average_gradients(self._parameters, self._add, self._divisor or every)
            for parameter, before in self._before.items():
                if parameter.grad is not None:
                    parameter.grad.add_(before)
        self._before.clear()

    def _add(self, own: Tensor) -> Tensor:
        for group in self._groups:
            dist.all_reduce(own, group=group)
        return own


def sum_together(grads: Sequence[Tensor], add: Add, divided_by: int = 1) -> None:
    """Replaces gradients of one dtype by their sums over ranks, divided by a number: small ones in messages, others in place.

    The division comes first, as in DistributedDataParallel: a sum may be beyond float16 whose average is not.
    """
    for together in _messages(grads):
        _sum_in_one(together, add, divided_by)


def _sum_in_one(grads: Sequence[Tensor], add: Add, divided_by: int) -> None:
    """In one message; what is sent is a copy, unless one gradient is contiguous."""
    flat = torch.cat([grad.reshape(-1) for grad in grads]) if grads[1:] else grads[0].contiguous().view(-1)
    add(flat if divided_by == 1 else flat.div_(divided_by))
    for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        if part.data_ptr() != grad.data_ptr():
            grad.copy_(part.view(grad.shape))


def _messages(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The messages, chosen by the sizes of gradients alone, which are the same on all ranks."""
    small: list[Tensor] = []
    num_bytes = 0
    for grad in grads:
        if grad.nbytes >= ALONE:
            yield [grad]
            continue
        if num_bytes + grad.nbytes > TOGETHER:
            yield small
            small, num_bytes = [], 0
        small.append(grad)
        num_bytes += grad.nbytes
    if small:
        yield small


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], add: Add, num_ranks: int) -> None:
    """Replaces gradients of whole parameters by their averages over ranks. Collective.

    A parameter without a gradient on one rank counts there as zero; without one on all of them, it stays without.
    """
    if not parameters:
        return
    present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    anywhere = add(present.to(parameters[0].device)).tolist()
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for parameter, count in zip(parameters, anywhere, strict=True):
        if count:
            dtype = gradient_dtype(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            kinds.setdefault(dtype, []).append(local(parameter.grad))
    for grads in kinds.values():
        sum_together(grads, add, divided_by=num_ranks)
