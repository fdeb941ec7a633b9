"""Data parallelism: replicas of a pipeline average the gradients of their stages.

Each stage module is wrapped in a DistributedDataParallel whose forward is never called. Its reducer gets to
work in the last backward of the stage in a step; earlier backwards accumulate locally.

The anchor. DDP starts to reduce when the first gradient hook fires, so replicas hang when a stage's last
backward reaches no parameter on one of them. Therefore each wrapper has one more parameter, a zero, whose
gradient (zero) is a root of the last backward: its hook always fires, and everything that was not reached is
then reduced with what it has. A parameter that no replica used keeps the gradient None.

With `overlapping=False` the anchor alone is differentiated at the end of the step: everything is reduced at
once, there.

Uneven inputs. A replica without data can `shadow` the others: it takes part in their reductions with gradients of zero.

Example: `Interpreter(program, stages, transport, hooks=StageReplicas(stages, group))`, with `group` the ranks
that have the same stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from smpc.executor.replicas.forward_writes import ForwardWrites
from smpc.sharding.wide_gradients import is_wide, wide_stand_in


class _Replica(nn.Module):
    """A stage and its anchor, which is last so that it belongs to the first bucket. `sparse`: its parameters whose gradients are sparse.
    DDP takes these from embeddings alone, so each is the weight of one, in front of the stage."""

    def __init__(self, stage: nn.Module, like: nn.Parameter, sparse: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.sparse = nn.ModuleList()
        for parameter in sparse:
            holder = nn.Embedding(1, 1, sparse=True, device="meta")
            holder.weight = parameter
            self.sparse.append(holder)
        self.stage = stage
        self.anchor = nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))


class StageReplicas:
    """Averages gradients over `group`; the hooks of an interpreter.

    Construction broadcasts the parameters and buffers of the group's rank 0. A parameter that several of
    these stages share is reduced with the first of them, which is the last to be reduced. `broadcast_buffers`: rank
    0's buffers replace the others' at the start of every training step. `backward_passes_per_step`: gradients
    accumulate locally over that many steps before they are averaged. `apart`: parameters that the ranks of the group have different values
    of; nothing is done with them here. `sparse`: parameters whose gradients are sparse. The other options are DDP's. The
    gradients of parameters that `smpc.sharding.dtensors` has widened are reduced in fp32, and never during a backward.
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
        apart: Collection[nn.Parameter] = (),
        sparse: Collection[Tensor] = (),
    ) -> None:
        assert backward_passes_per_step >= 1, "gradients must be averaged at some time"
        self._group = group
        self._overlapping = overlapping
        self._passes = backward_passes_per_step
        self._num_steps = 0
        self._source = 0  # whose buffers count
        self._count: dist.Work | None = None
        self._stages = [stages[index] for index in sorted(stages)]
        self._apart = {id(parameter) for parameter in apart}
        self._sparse = {id(parameter) for parameter in sparse}
        self._buffers_of = [stages[index] for index in sorted(stages)] if broadcast_buffers else []
        self._replicas: dict[int, DistributedDataParallel] = {}
        self._anchors: dict[int, nn.Parameter] = {}
        self._stand_ins: dict[int, list[tuple[nn.Parameter, nn.Parameter]]] = {}
        named = [pair for stage in self._stages for pair in stage.named_parameters(remove_duplicate=False)]
        self._writes = ForwardWrites([(name, p) for name, p in named if id(p) not in self._apart], group)
        self._is_joined = False
        self._looks: Callable[[Tensor, Tensor], None] | None = None
        self._looking: list[RemovableHandle] = []
        owned = set(self._apart)
        for index in sorted(stages):
            stage = stages[index]
            broadcast([*(p for p in stage.parameters() if id(p) not in self._apart), *stage.buffers()], group)
            trainable = [p for p in stage.parameters() if p.requires_grad and id(p) not in owned]
            if trainable:
                replica = self._make_replica(index, stage, trainable)
                _ignore_in_data_parallel(replica, owned)
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

    def _make_replica(self, index: int, stage: nn.Module, trainable: Sequence[nn.Parameter]) -> _Replica:
        """What DDP wraps: the stage, or, as its buckets are like parameters, others that are like the gradients."""
        if not any(is_wide(parameter) for parameter in trainable):
            return _Replica(stage, trainable[0], [p for p in trainable if id(p) in self._sparse])
        others = [wide_stand_in(parameter) if is_wide(parameter) else parameter for parameter in trainable]
        self._stand_ins[index] = list(zip(trainable, others, strict=True))
        self._overlapping = False
        sparse = [other for parameter, other in self._stand_ins[index] if id(parameter) in self._sparse]
        return _Replica(nn.ParameterList(others), others[0], sparse)

    @property
    def group(self) -> dist.ProcessGroup:
        """The replicas that gradients are averaged over."""
        return self._group

    @property
    def backward_passes_per_step(self) -> int:
        """The steps whose gradients are averaged together."""
        return self._passes

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Replace the all-reduce of every stage: see DistributedDataParallel.register_comm_hook."""
        for replica in self._replicas.values():
            replica.register_comm_hook(state, hook)

    def start_of_step(self) -> None:
        """Count the step, broadcast buffers."""
        self._num_steps += 1
        for stage in self._buffers_of:
            broadcast(stage.buffers(), self._group, self._source)
        self._writes.begin(compares=not self._is_joined)
        if self._looks is not None:
            found = {id(p): p for stage in self._stages for p in stage.parameters() if p.requires_grad}
            watched = [parameter for key, parameter in found.items() if key not in self._apart]
            self._looking = [_hooked(p, functools.partial(self._looks, p)) for p in watched]

    def _look_no_more(self) -> None:
        for handle in self._looking:
            handle.remove()
        self._looking = []

    def did_not_train(self) -> None:
        """The step that has ended did no backward: it does not count among `backward_passes_per_step`."""
        self._num_steps -= 1
        self._look_no_more()

    def join(self, source: int, count: dist.Work | None, looks: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Until `synchronize`: the buffers of replica `source` count, and gradients are divided by the sum that `count` computes.

        That one is an all-reduce under way, of 1 from each replica that trains; None: they are divided by the number of all. `looks` is
        called with parameters and what each backward of a step adds to their gradients.
        """
        self._source, self._count, self._is_joined, self._looks = source, count, True, looks
        self._look_no_more()
        if count is not None:
            for replica in self._replicas.values():
                replica.reducer._set_forward_pass_work_handle(count, False)

    def shadow(self) -> None:
        """Take part in the reductions of a step that others run. Gradients that were here are lost, as others' are once they are used."""
        if self._averages:
            self._shadow_reductions()
        self._writes.follow()

    def _shadow_reductions(self) -> None:
        for stage in sorted(self._replicas, reverse=True):
            parameters = [p for p in self._replicas[stage].parameters() if p.requires_grad]
            parameters += [parameter for parameter, _ in self._stand_ins.get(stage, [])]
            for parameter in parameters:
                parameter.grad = None
            self._reduce(stage)
            for parameter in parameters:
                parameter.grad = None

    def synchronize(self, source: int) -> None:
        """Give all replicas the parameters of one of them, its buffers if they are shared, and go on as before `join`."""
        for stage in self._stages:
            broadcast([p for p in stage.parameters() if id(p) not in self._apart], self._group, source)
        for stage in self._buffers_of:
            broadcast(stage.buffers(), self._group, source)
        if self._count is not None:
            for replica in self._replicas.values():
                replica.reducer._set_forward_pass_work_handle(self._count, True)
        self._source, self._count, self._is_joined, self._looks = 0, None, False, None
        self._look_no_more()

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
        """Reduce everything, unless the backwards have done so, and see what forwards have written."""
        if self._averages and not self._overlapping:
            for stage in sorted(self._replicas, reverse=True):
                self._reduce(stage)
        self._look_no_more()
        self._writes.end()

    def _reduce(self, stage: int) -> None:
        """All gradients of a stage at once."""
        pairs = self._stand_ins.get(stage, [])
        used = [other for parameter, other in pairs if parameter.grad is not None]
        for parameter, other in pairs:
            other.grad = parameter.grad
        # DDP counts the parameters that backwards reach: they add nothing to existing gradients.
        with torch.enable_grad():
            reached = [other.view_as(other) for other in used]
        nothing = [torch.zeros((), dtype=other.dtype, device=other.device).expand_as(other) for other in used]
        root, grad = self._arm(stage, reached)
        torch.autograd.backward([root, *reached], [grad, *nothing])
        for parameter, other in pairs:
            parameter.grad = other.grad
            if other is not parameter:
                other.grad = None


def _hooked(parameter: nn.Parameter, looks: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_hook(looks)  # type: ignore[no-untyped-call]
    return handle


def _ignore_in_data_parallel(replica: _Replica, owned: set[int]) -> None:
    names = [name for name, p in replica.named_parameters(remove_duplicate=False) if id(p) in owned]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(replica, names)  # type: ignore[no-untyped-call]


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Replace tensors by the values of the group's rank `source`: one broadcast for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for same in kinds.values():
            alone = same[0].reshape(-1)  # large ones come one by one: no copy of a single one
            flat = alone if len(same) == 1 else torch.cat([tensor.reshape(-1) for tensor in same])
            dist.broadcast(flat, group=group, group_src=source)
            if group.rank() != source:
                for tensor, part in zip(same, torch.split(flat, [t.numel() for t in same]), strict=True):
                    tensor.copy_(part.view(tensor.shape))
