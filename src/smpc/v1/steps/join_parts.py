"""`model.join()` where replicas hold parts of parameters (`fully_shard`): ranks that are over go on gathering, and updating their parts.

    phase         ranks that train                       ranks that are over
    --------------------------------------------------------------------------------------------------------------
    STEP          gather, compute, reduce                gather and reduce with zeros, as the others come to it
    EVALUATION    gather, compute                        gather
    ACT           optimizer.step(), zero_grad(),         the same with their parts, by the options (learning rates) of the
                  clip_grad_norm_, ...                   source's groups, and with gradients where the source has some

So in the end all parts, and their optimizer state, are those of the last replica's steps.

A rank that is over does not run the script. What that does to parameters or gradients by itself (`p.grad.mul_(0.5)`) reaches the parts of
ranks that train alone: they notice by digests, which are taken after each step and act, and all ranks raise StepError at the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpc.errors import StepError, UsageError
from smpc.executor.replicas.fully_shard import Joined, ModuleShards, StageShards
from smpc.executor.replicas.group_hooks import StepHooks, innermost
from smpc.mesh import Axis
from smpc.sharding.tensors import digest, local
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.join import Join, JoinOptions, JoinPhase, SharedOptimizer
from smpc.v1.steps.results import agree


@dataclass(frozen=True, slots=True)
class _Told:
    """The state of the source for ranks that are over: of each parameter, of each group of the optimizer; the act that comes."""

    has_gradients: list[bool]
    are_trained: list[bool]
    options: list[dict[str, Any]]
    act: tuple[Any, ...]


class Follow(Protocol):
    """Takes part in what the others gather in a step."""

    def __call__(self, *, trains: bool) -> None:
        """Collective over the replicas."""


class JoinOfParts(Join):
    """See above. `hooks`: of training steps, with the parts; None before the partition. `follow`: takes part in the calls of a step on a
    rank without a batch; None with a pipeline, which gathers before it calls anything."""

    holds_parts = True

    def __init__(
        self,
        context: StepContext,
        hooks: Callable[[], StepHooks | None],
        follow: Follow | None,
        partition: Callable[[], None] | None,
        options: JoinOptions,
    ) -> None:
        super().__init__(context, partition, options)
        self._hooks, self._follow_calls = hooks, follow
        self._seen: list[int | None] | None = None  # digests after the last step or act
        self.is_followed = self._acts = False

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the steps of the script. Steps after it are without followers."""
        try:
            with super().around():
                self.note()
                yield
        finally:
            shards = self._shards()
            if shards is not None:
                shards.join(Joined())

    def begin_step(self, *, trains: bool) -> None:
        """Before a step, or an evaluation: both gather parts."""
        phase = JoinPhase.STEP if trains else JoinPhase.EVALUATION
        self._guarded(lambda: self._begin(phase))

    def note(self) -> None:
        """What the script has now is what ranks that are over have, too."""
        self._seen = self._digests()

    @contextlib.contextmanager
    def act(self, name: str, *arguments: Any) -> Iterator[None]:
        """Around an act of the script (`_repeat`); within another one, it is part of that.

        Raises UsageError for a closure, which ranks that are over do not have.
        """
        if self._acts or self._shards() is None:
            yield
            return
        if any(callable(argument) for argument in arguments):
            raise UsageError(
                f"join: expected optimizer.{name} without a closure, as replicas that ran out of data repeat it with fully_shard, found "
                "one; run the step function first, then optimizer.step()"
            )
        self._guarded(lambda: self._begin(JoinPhase.ACT, name, *arguments))
        self._acts = True
        try:
            yield
        finally:
            self._acts = False
        self.note()

    def clipping(self, parameters: Sequence[Tensor], *how: Any) -> contextlib.AbstractContextManager[None]:
        """Around `clip_grad_norm_` of parameters, which have the same numbers on all replicas."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters())}
        return self.act("clip_grad_norm_", [numbers[id(p)] for p in parameters if id(p) in numbers], *how)

    # -- ranks that train ----------------------------------------------------------------------------------------------

    def _begin(self, phase: JoinPhase, *act: Any) -> None:
        phases = self._announce(phase)
        if self._error is None:
            self._lead(phases, *act)

    def _lead(self, phases: list[int], *act: Any) -> tuple[Any, ...]:
        """What ranks that are over need for a phase; the act that the source has told. May leave an `error`. Collective."""
        active = {r for r, phase in zip(self._replica_of, phases, strict=True) if phase != JoinPhase.OVER}
        self.is_followed = any(phase == JoinPhase.OVER for phase in phases)
        if self.is_followed:
            self._check_unchanged()
            if self._error is not None:
                return act
            act = self._share(max(active), is_over=phases[self._position] == JoinPhase.OVER, act=act)
        shards = self._shards()
        if shards is not None:
            divisor = None if self._divides_by_all or not self.is_followed else len(active)
            shards.join(Joined(max(active), divisor, self.is_followed))
        return act

    def _check_unchanged(self) -> None:
        """Leave an error on all ranks if the script of some has changed parts by itself. Collective."""
        own = self._changed() if not self._has_shadowed else ""
        if any(self._exchange(int(bool(own)))):
            self._error = StepError(
                "join: with fully_shard, replicas that ran out of data update their parts as the others do: expected step, zero_grad and "
                "clipping of smp.DistributedOptimizer, and torch.nn.utils.clip_grad_norm_, found that the script has changed "
                f"{own or 'parameters or gradients of another rank'} otherwise since the last step, which they do not see; leave that out, "
                "or give all replicas as many batches"
            )

    def _changed(self) -> str:
        found = self._digests()
        if self._seen is None or len(self._seen) != len(found):
            return ""
        every = list(zip(self._watched(), self._seen, found, strict=True))
        first_master = len(every) - 2 * len(self._masters())
        for number, ((what, _), before, now) in enumerate(every):
            is_told = now is None and number < first_master  # ranks that are over drop such a gradient, too
            if before != now and not is_told:
                return what
        return ""

    def _watched(self) -> list[tuple[str, Tensor | None]]:
        names = {id(p): name for name, p in self._context.module.named_parameters()}
        held = [(names.get(id(p), "a parameter"), p) for p in self._parameters()]
        held += [("a master", master) for master in self._masters()]
        return [each for what, p in held for each in ((what, p.detach()), (f"the gradient of {what}", p.grad))]

    def _masters(self) -> list[nn.Parameter]:
        optimizer: Any = self._context.script.optimizer
        return list(optimizer.masters) if optimizer is not None and optimizer.has_masters else []

    def _digests(self) -> list[int | None]:
        found = [None if tensor is None else digest(local(tensor)) for _, tensor in self._watched()]
        there = [each for each in found if each is not None]
        numbers = iter(torch.stack(there).tolist() if there else ())
        return [None if each is None else next(numbers) for each in found]

    def _share(self, source: int, *, is_over: bool, act: tuple[Any, ...]) -> tuple[Any, ...]:
        """The act of the replica `source`; ranks that are over take its options, and have gradients where it has. Collective."""
        parameters, optimizer = self._parameters(), self._context.script.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        message = [
            _Told(
                [p.grad is not None for p in parameters],
                [p.requires_grad for p in parameters],
                [{key: value for key, value in group.items() if key != "params"} for group in groups],
                act,
            )
        ]
        replicas = self._session.groups[Axis.RDP]
        dist.broadcast_object_list(message, group=replicas, group_src=source, device=self._session.message_device)
        told = message[0]
        if is_over:
            if len(groups) != len(told.options):
                raise StepError(
                    f"join: expected as many groups of the optimizer on all ranks, found {len(groups)} on this one, which ran out of data, "
                    f"and {len(told.options)} on others; add groups before join, on all ranks"
                )
            for parameter, has, is_trained in zip(parameters, told.has_gradients, told.are_trained, strict=True):
                parameter.requires_grad_(is_trained)
                if not has:
                    parameter.grad = None
            for group, options in zip(groups, told.options, strict=True):
                group.update(options)
        return told.act

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
            name, *arguments = act
            self._acts = True
            try:
                self._repeat(name, arguments)
            finally:
                self._acts = False
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

    def _repeat(self, name: str, arguments: list[Any]) -> None:
        if name == "clip_grad_norm_":
            numbers, max_norm, norm_type, raises = arguments
            every = self._parameters()
            with contextlib.suppress(RuntimeError) if raises else contextlib.nullcontext():  # the others raise it
                torch.nn.utils.clip_grad_norm_([every[number] for number in numbers], max_norm, norm_type, raises)
            return
        optimizer: Any = self._context.script.optimizer
        if optimizer is None:
            raise StepError(
                f"join: expected a DistributedOptimizer on all ranks, found none on this one, and {name} of one on others"
            )
        acts = {
            "step": optimizer.step,
            "zero_grad": optimizer.zero_grad,
            "clip_master_grads": optimizer.clip_master_grads,
            "update_master_grads": optimizer.update_master_grads,
        }
        acts[name](*arguments)

    def _finish(self, optimizer: SharedOptimizer | None) -> None:
        """Once all are over: the last replica's buffers for all."""
        last = self._exchange(int(not self._has_shadowed))
        if self.is_followed:
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
