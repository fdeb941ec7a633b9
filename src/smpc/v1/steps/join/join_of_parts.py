"""`model.join()` where replicas hold parts of parameters (`fully_shard`): ranks that are over go on gathering, and updating their parts.

    phase         ranks that train                       ranks that are over
    --------------------------------------------------------------------------------------------------------------
    STEP          gather, compute, reduce                gather and reduce with zeros, as the others come to it
    EVALUATION    gather, compute                        gather
    ACT           see `smpc.v1.steps.join.script_actions`

So in the end all parts, and their optimizer state, are as after the last replica's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from smpc.executor.replicas.fully_shard import Joined, ModuleShards, StageShards
from smpc.executor.replicas.group_hooks import StepHooks, innermost
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.join.join import JoinOptions, JoinPhase, SharedOptimizer
from smpc.v1.steps.join.script_actions import JoinOfActs
from smpc.v1.steps.results import agree


class Follow(Protocol):
    """Takes part in what the others gather in a step."""

    def __call__(self, *, trains: bool) -> None:
        """Collective over the replicas."""


class JoinOfParts(JoinOfActs):
    """See above. `hooks`: of training steps, with the parts; None before the partition. `follow`: takes part in the calls of a step on a
    rank without a batch; None with a pipeline, which gathers before it calls anything."""

    def __init__(
        self,
        context: StepContext,
        hooks: Callable[[], StepHooks | None],
        follow: Follow | None,
        partition: Callable[[], None] | None,
        options: JoinOptions,
    ) -> None:
        super().__init__(context, partition, options, "with fully_shard")
        self._hooks, self._follow_calls = hooks, follow

    @property
    def is_followed(self) -> bool:
        """Whether ranks that are over follow the gathers of this step."""
        return self._has_followers

    def begin_step(self, *, trains: bool) -> None:
        """Before a step, or an evaluation: both gather parts."""
        phase = JoinPhase.STEP if trains else JoinPhase.EVALUATION
        self._guarded(lambda: self._begin(phase))

    def _prepare(self, active: set[int]) -> None:
        shards = self._shards()
        if shards is not None:
            divisor = None if self._divides_by_all or not self._has_followers else len(active)
            shards.join(Joined(max(active), divisor, self._has_followers))

    def _end(self) -> None:
        shards = self._shards()
        if shards is not None:
            shards.join(Joined())

    # -- ranks that are over -------------------------------------------------------------------------------------------

    def _take_part(self, phase: int, phases: list[int]) -> None:
        if phase == JoinPhase.PARTITION:
            self._partition_too()
        elif phase in (JoinPhase.STEP, JoinPhase.EVALUATION, JoinPhase.ACT):
            act = self._lead(phases)
            if self._error is None:
                self._follow_phase(phase, act)
        else:
            self._end_followed(phase)

    def _follow_phase(self, phase: int, act: tuple[Any, ...]) -> None:
        if phase == JoinPhase.ACT:
            self._repeat_act(act)
        elif phase == JoinPhase.EVALUATION:
            self._follow(trains=False)
        else:
            hooks = self._own_hooks()
            hooks.start_of_step()
            self._follow(trains=True)
            if self._has_pipeline:
                hooks.end_of_step()

    def _follow(self, *, trains: bool) -> None:
        shards = self._shards()
        assert shards is not None, "others gather parts"
        (self._follow_calls or shards.follow)(trains=trains)

    def _end_followed(self, phase: int) -> None:
        if phase == JoinPhase.UNTRAINED:
            self._own_hooks().did_not_train()
        elif not self._has_pipeline:
            self._own_hooks().end_of_step()
        if self._has_pipeline or phase == JoinPhase.TRAINED:
            self._verdict = agree(0, None, self._session)
        if self._verdict:  # the others drop their gradients
            for parameter in self._parameters():
                parameter.grad = None
        optimizer = self._context.script.optimizer
        if optimizer is not None:
            optimizer.gradients_changed()

    def _finish(self, optimizer: SharedOptimizer | None) -> None:
        """Once all are over: the last replica's buffers for all."""
        last = self._exchange(int(not self._has_shadowed))
        if self._has_followers:
            self._check_unchanged()
        shards = self._shards()
        if self._error is None and shards is not None:
            shards.share_buffers(self._last_of(last))

    # ------------------------------------------------------------------------------------------------------------------

    def _shards(self) -> StageShards | ModuleShards | None:
        shards = innermost(self._hooks())
        return shards if isinstance(shards, StageShards | ModuleShards) else None

    def _own_hooks(self) -> StepHooks:
        hooks = self._hooks()
        assert hooks is not None, "the model is partitioned"
        return hooks

    def _parameters(self) -> list[nn.Parameter]:
        shards = self._shards()
        return [] if shards is None else shards.parameters()
