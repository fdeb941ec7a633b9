"""Tensor-parallel ranks call the same layers, in the same order, or a StepError says which rank calls which. Without a pipeline.

A layer that ranks have slices of acts on the batches of all of them, each rank with its slices. One that has come to another layer gives
its slices of that:

    rank 0    heads.0: its batch and rank 1's, by slice 0 of heads.0       a head for each task, chosen by each rank's own batch
    rank 1    heads.1: its batch and rank 0's, by slice 1 of heads.1

Over gloo ranks tell each other which layer comes next; over other backends, which came, at the end of the model's forward.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from smpc.errors import StepError
from smpc.nn.parallel import DistributedModule
from smpc.sharding.backwards import is_in_backward


class SameLayers:
    """See above. `group`: the ranks that have slices of one model; `names`: of the layers, by what is told."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._group, self._depth = group, 0
        self._tells_each = "gloo" in str(dist.get_backend_config(group))
        self._called: list[int] = []
        self.names = ["the end of the model"]
        for name, layer in model.named_modules():
            if isinstance(layer, DistributedModule) and not layer.is_container:
                layer.register_forward_pre_hook(partial(self._enter, len(self.names)), prepend=True)
                layer.register_forward_hook(self._leave, always_call=True)
                self.names.append(name)
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        if not is_in_backward():
            self._depth = 0
            self._called.clear()

    def _enter(self, number: int, *_: Any) -> None:
        if is_in_backward():
            return
        self._depth += 1
        if self._depth == 1:  # those inside of it are its own
            self._called.append(number)
            if self._tells_each:
                self._tell(number)

    def _leave(self, *_: Any) -> None:
        if not is_in_backward():
            self._depth -= 1

    def _end(self, *_: Any) -> None:
        if not is_in_backward():
            self._tell(0 if self._tells_each else zlib.crc32(repr(self._called).encode()))

    def _tell(self, own: int) -> None:
        device = torch.device("cpu") if self._tells_each else torch.accelerator.current_accelerator()
        found = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self._group.size())]
        dist.all_gather(found, torch.full_like(found[0], own), group=self._group)
        told = [int(each) for each in found]
        if any(number != own for number in told):
            self._refuse(told)

    def _refuse(self, told: Sequence[int]) -> NoReturn:
        ranks = dist.get_process_group_ranks(self._group)
        names = [self.names[number] if self._tells_each else f"the calls {number:x}" for number in told]
        found = ", ".join(f"rank {rank}: {name}" for rank, name in zip(ranks, names, strict=True))
        raise StepError(
            "tensor parallelism: expected ranks that have slices of one model to call the same layers in the same order, since each "
            f"layer acts on the batches of all of them; found {found}; give these ranks batches that take the same way, or leave the "
            "layer out of tensor parallelism"
        )
