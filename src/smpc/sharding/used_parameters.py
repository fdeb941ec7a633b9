"""Which parameters of sharded units a step has used: the same on all ranks, though their batches have not used the same ones.

torch reduces the gradients that a rank has, unit by unit, one message for each. Ranks whose batches take other branches (a head for each
task, a layer for some batches) would send messages of other sizes, or gradients of one parameter in the place of another's:

    rank 0    body, head a     --.
    rank 1    body, head b     --+--> body, head a, head b: what a rank has no gradient of counts there as zero

    uses = Uses(units, group)
    uses.begin()                     a step begins
    ...                              what is reduced in its backwards has a gradient of each parameter
    uses.end()                       is there something left to reduce? Parameters that no rank has used have no gradient again

As in DistributedDataParallel, a parameter that some rank has used is averaged over all, and one that none has used keeps the gradient None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from smpc.sharding.dtensors import local


class Uses:
    """See above. `group`: all ranks that the units are reduced over."""

    def __init__(self, units: Iterable[FSDPModule], group: dist.ProcessGroup) -> None:
        found = (unit._get_fsdp_state()._fsdp_param_group for unit in units)
        self._groups: list[Any] = [group for group in found if group is not None]
        self._process_group = group
        self._is_open = False
        self._used: set[int] = set()  # of this step on this rank, by identity
        self._had: set[int] = set()  # a gradient before this step, alike on all ranks
        # Whether this rank has something to tell at the end of a step beside its uses.
        self.tells: Callable[[], bool] = lambda: False
        self._is_told = False
        # Called with a parameter, in parts, and its whole gradient, before that is reduced.
        self.looks: Callable[[Tensor, Tensor], None] | None = None
        for each in self._groups:
            each.post_backward = functools.partial(self._reduce, each, each.post_backward)

    @property
    def is_open(self) -> bool:
        """Whether a step has begun."""
        return self._is_open

    def reached(self, reach: Callable[[Node], bool]) -> bytes:
        """Which parameters have gradients that wait to be reduced, or get some from a backward. `reach`: whether it comes to a node."""
        return bytes(2 * has_gradient(each) + _gets_gradient(each, reach) for each in self._parameters())

    def begin(self) -> None:
        """A step begins."""
        self._is_open = True
        self._used.clear()
        self._had = {id(p) for p in self._parameters() if p.sharded_param.grad is not None}

    def note(self, parameter: Tensor) -> None:
        """A parameter, in parts, gets its gradient elsewhere than in its unit's backward."""
        self._used.update(id(each) for each in self._parameters() if each.sharded_param is parameter)

    def end(self) -> bool:
        """All backwards are done. Whether some rank has gradients that wait to be reduced: then all have the same ones. Collective."""
        if not self._is_open:
            return False
        self._is_open = False
        every = self._parameters()
        if not every:
            return False
        self._look(every)
        used = [id(each) in self._used or has_gradient(each) or self._has_got(each) for each in every]
        waits = [any(has_gradient(each) for each in _trained(group)) for group in self._groups]
        counts = torch.tensor([*used, *waits, self.tells()], dtype=torch.int32, device=self._groups[0].device)
        dist.all_reduce(counts, group=self._process_group)
        *found, self._is_told = [bool(count) for count in counts.tolist()]
        is_used = {id(each): count for each, count in zip(every, found[: len(every)], strict=True)}
        for group, waiting in zip(self._groups, found[len(every) :], strict=True):
            if waiting:
                _complete([each for each in _trained(group) if is_used[id(each)]])
        for each in every:
            if not is_used[id(each)] and id(each) not in self._had:
                each.sharded_param.grad = None
        return any(found[len(every) :])

    def _has_got(self, parameter: Any) -> bool:
        """Whether a part has got a gradient from elsewhere, such as another stage that shares it: what is completed has zeros."""
        grad = parameter.sharded_param.grad
        return grad is not None and id(parameter) not in self._had and bool(local(grad).any())

    def take_told(self) -> bool:
        """Whether some rank `tells`, as of the last `end`; then no more."""
        found, self._is_told = self._is_told, False
        return found

    def _parameters(self) -> list[Any]:
        return [each for group in self._groups for each in _trained(group)]

    def _reduce(self, group: Any, original: Callable[..., None], *unused: Any) -> None:
        """In place of torch's own end of a unit's backward."""
        if self._is_open and group.reduce_grads and group._training_state is not TrainingState.IDLE:
            trained = _trained(group)
            self._used.update(id(each) for each in trained if has_gradient(each))
            self._look(trained)
            _complete(trained)
        original(*unused)

    def _look(self, parameters: Iterable[Any]) -> None:
        if self.looks is None:
            return
        for each in parameters:
            whole = getattr(each, "_unsharded_param", None)
            for grad in (each.unsharded_accumulated_grad, None if whole is None else whole.grad):
                if grad is not None:
                    self.looks(each.sharded_param, grad)


def _trained(group: Any) -> list[Any]:
    return [each for each in group.fsdp_params if each.sharded_param.requires_grad]


def _gets_gradient(parameter: Any, reach: Callable[[Node], bool]) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and reach(get_gradient_edge(whole).node)


def has_gradient(parameter: Any) -> bool:
    """Whether torch's parameter has a gradient that is not reduced yet: in its own dtype, or in the dtype of sums."""
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def _complete(parameters: Iterable[Any]) -> None:
    """Give those without a gradient zeros. torch reduces gradients of one dtype together: all are sums if one of them is."""
    there = [each for each in parameters if hasattr(each, "_unsharded_param")]
    sums = next((s.dtype for each in there if (s := each.unsharded_accumulated_grad) is not None), None)
    for each in there:
        whole: Tensor = each._unsharded_param
        if not has_gradient(each):
            whole.grad = torch.zeros_like(whole)
        if sums is not None and each.unsharded_accumulated_grad is None and whole.grad is not None:
            each.unsharded_accumulated_grad, whole.grad = whole.grad.to(sums), None
