"""Data parallelism: replicas of a pipeline average the gradients of their stages.

Each stage module is wrapped in a DistributedDataParallel whose forward is never called. Its reducer gets to
work in the last backward of the stage in a step; earlier backwards accumulate locally.

The anchor. DDP starts to reduce when the first gradient hook fires, so replicas hang when a stage's last
backward reaches no parameter on one of them. Therefore each wrapper has one more parameter, a zero, whose
gradient (zero) is a root of the last backward: its hook always fires, and everything that was not reached is
then reduced with what it has. A parameter that no replica used keeps the gradient None.

With `overlapping=False` the anchor alone is differentiated at the end of the step: everything is reduced at
once, there.

Example: `Interpreter(program, stages, transport, hooks=StageReplicas(stages, group))`, with `group` the ranks
that have the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class _Replica(nn.Module):
    """A stage and its anchor, which is last so that it belongs to the first bucket."""

    def __init__(self, stage: nn.Module, like: nn.Parameter) -> None:
        super().__init__()
        self.stage = stage
        self.anchor = nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))


class StageReplicas:
    """Averages gradients over `group`; the hooks of an interpreter.

    Construction broadcasts the parameters and buffers of the group's rank 0. A parameter that several of
    these stages share is reduced with the first of them, whose backward comes last. `broadcast_buffers`: rank
    0's buffers replace the others' at the start of every training step. `backward_passes_per_step`: gradients
    accumulate locally over that many steps before they are averaged. The other options are DDP's.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        group: dist.ProcessGroup,
        *,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        overlapping: bool = True,
        backward_passes_per_step: int = 1,
    ) -> None:
        assert backward_passes_per_step >= 1, "gradients must be averaged at some time"
        self._group = group
        self._overlapping = overlapping
        self._passes = backward_passes_per_step
        self._num_steps = 0
        self._buffers_of = [stages[index] for index in sorted(stages)] if broadcast_buffers else []
        self._replicas: dict[int, DistributedDataParallel] = {}
        self._anchors: dict[int, nn.Parameter] = {}
        owned: set[int] = set()
        for index in sorted(stages):
            stage = stages[index]
            broadcast_from_first([*stage.parameters(), *stage.buffers()], group)
            trainable = [p for p in stage.parameters() if p.requires_grad and id(p) not in owned]
            if trainable:
                replica = _Replica(stage, trainable[0])
                _ignore(replica, owned)
                self._anchors[index] = replica.anchor
                self._replicas[index] = DistributedDataParallel(
                    replica,
                    process_group=group,
                    bucket_cap_mb=bucket_cap_mb,
                    gradient_as_bucket_view=gradient_as_bucket_view,
                    find_unused_parameters=True,
                    init_sync=False,
                )
                owned.update(id(parameter) for parameter in trainable)

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Replace the all-reduce of every stage: see DistributedDataParallel.register_comm_hook."""
        for replica in self._replicas.values():
            replica.register_comm_hook(state, hook)

    def start_of_step(self) -> None:
        """Count the step, broadcast buffers."""
        self._num_steps += 1
        for stage in self._buffers_of:
            broadcast_from_first(stage.buffers(), self._group)

    @property
    def _averages(self) -> bool:
        return self._num_steps % self._passes == 0

    def before_last_backward(self, stage: int, roots: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Arm the stage's reducer for the backward that follows; returns the anchor as a further root."""
        if not self._averages or not self._overlapping or stage not in self._replicas:
            return None
        return self._arm(stage, roots)

    def _arm(self, stage: int, roots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        anchor = self._anchors[stage]
        with torch.enable_grad():
            root = anchor.view_as(anchor)
        # What DDP.forward does at its end; torch.distributed.pipelining reaches in at the same place.
        self._replicas[stage].reducer.prepare_for_backward([*roots, root])
        return root, torch.zeros_like(anchor)

    def end_of_step(self) -> None:
        """Reduce everything, unless the backwards have done so."""
        if self._averages and not self._overlapping:
            for stage in sorted(self._replicas, reverse=True):
                root, grad = self._arm(stage, [])
                torch.autograd.backward([root], [grad])


def _ignore(replica: _Replica, owned: set[int]) -> None:
    names = [name for name, p in replica.named_parameters(remove_duplicate=False) if id(p) in owned]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(replica, names)  # type: ignore[no-untyped-call]


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Replace tensors by those of the group's rank 0: one broadcast for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for same in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            dist.broadcast(flat, group=group, group_src=0)
            if group.rank() != 0:
                for tensor, part in zip(same, torch.split(flat, [t.numel() for t in same]), strict=True):
                    tensor.copy_(part.view(tensor.shape))
