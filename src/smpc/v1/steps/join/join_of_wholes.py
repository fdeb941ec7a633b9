"""`model.join()` where all replicas hold whole parameters: see `smpc.v1.steps.join.join`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.executor import StageReplicas
from smpc.mesh import Axis
from smpc.v1.session.process_state import Session
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.join.join import Join, JoinOptions, JoinPhase, SharedOptimizer
from smpc.v1.steps.results import agree


class JoinOfWholes(Join):
    """Replicas that hold whole parameters. `replicas`: this rank's averaging of gradients, None before the partition."""

    def __init__(
        self,
        context: StepContext,
        replicas: Callable[[], StageReplicas | None],
        partition: Callable[[], None] | None,
        options: JoinOptions,
    ) -> None:
        super().__init__(context, partition, options)
        self._replicas = replicas

    def begin_step(self, *, trains: bool) -> None:
        """Before a step. Ranks that are over have no part in one that does not train."""
        if trains:
            self._guarded(self._begin_step)

    def note(self) -> None:
        """Nothing: in the end all get what the last one has, whatever its script has done."""

    def _begin_step(self) -> None:
        phases = self._announce(JoinPhase.STEP)
        if self._error is None:
            self._lead(phases)

    def _take_part(self, phase: int, phases: list[int]) -> None:
        has_pipeline = self._has_pipeline
        if phase == JoinPhase.PARTITION:
            self._partition_too()
            return
        replicas = self._replicas()
        assert replicas is not None, "there are other replicas, and the model is partitioned"
        if phase == JoinPhase.STEP:
            self._lead(phases)
            replicas.start_of_step()
            if has_pipeline:
                replicas.shadow()
            return
        if phase == JoinPhase.UNTRAINED:
            replicas.did_not_train()
        elif not has_pipeline:
            replicas.shadow()
        if has_pipeline or phase == JoinPhase.TRAINED:
            self._verdict = agree(0, None, self._session)

    def _finish(self, optimizer: SharedOptimizer | None) -> None:
        """Once all are over: the state of the last replica for all."""
        last = self._exchange(int(not self._has_shadowed))
        source = self._last_of(last)
        replicas = self._replicas()
        if replicas is None:
            return  # no replica has made a step
        replicas.synchronize(source)
        if optimizer is not None and not all(last):
            share_state(optimizer, self._session.groups[Axis.RDP], source, self._session)
            optimizer.replicate(self._session.groups[Axis.RDP], source)

    def _lead(self, phases: list[int]) -> None:
        """The information about participants that this step needs."""
        count: dist.Work | None = None
        if not self._divides_by_all:
            own = torch.tensor([int(phases[self._position] != JoinPhase.OVER)], device=self._session.message_device)
            count = dist.all_reduce(own, group=self._session.groups[Axis.RDP], async_op=True)
        replicas = self._replicas()
        assert replicas is not None, "there are other replicas, and the model is partitioned"
        replicas.join(self._last_of(phases), count)


def share_state(optimizer: SharedOptimizer, group: dist.ProcessGroup, source: int, session: Session) -> None:
    """Give all replicas the optimizer state of one of them. The options of its groups (learning rates) are not part of it."""
    parameters = [parameter for param_group in optimizer.param_groups for parameter in param_group["params"]]
    own = [optimizer.state.get(parameter, {}) for parameter in parameters]
    described: list[Any] = [[{key: _describe(value) for key, value in items.items()} for items in own]]
    dist.broadcast_object_list(described, group=group, group_src=source, device=session.message_device)
    is_source = group.rank() == source
    for parameter, items, known in zip(parameters, own, described[0], strict=True):
        received: dict[str, Any] = {}
        for key, value in known.items():
            if not isinstance(value, _TensorLike):
                received[key] = value
                continue
            payload = items[key].to(session.device) if is_source else value.empty(session.device)
            dist.broadcast(payload, group=group, group_src=source)
            received[key] = payload.to(value.device)
        if received and not is_source:
            optimizer.state[parameter] = received


class _TensorLike:
    """The description of a tensor for other ranks."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device.type

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _describe(value: Any) -> Any:
    return _TensorLike(value) if isinstance(value, Tensor) else value
