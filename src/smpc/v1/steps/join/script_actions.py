"""`model.join()` where ranks that are over do what the others' scripts do between steps, so that their own parameters are updated, too.

    phase         ranks that train                       ranks that are over
    --------------------------------------------------------------------------------------------------------------
    ACT           optimizer.step(), zero_grad(),         the same with their parameters, by the options (learning rates) of the
                  clip_grad_norm_, ...                   source's groups, and with gradients where the source has some

A rank that is over does not run the script. What the script does to parameters or gradients by itself (`p.grad.mul_(0.5)`) reaches only
ranks that train: ranks notice by digests, which are taken after each step and act, and all raise StepError at the next one.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpc.errors import StepError, UsageError
from smpc.mesh import Axis
from smpc.sharding.dtensors import digest, local
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.join.join import Join, JoinOptions, JoinPhase


@dataclass(frozen=True, slots=True)
class _Told:
    """The state of the source for ranks that are over: of each parameter, of each group of the optimizer; the act that comes."""

    has_gradients: list[bool]
    are_trained: list[bool]
    options: list[dict[str, Any]]
    act: tuple[Any, ...]


class JoinOfActs(Join):
    """See above. `because`: the setting for which they do so."""

    repeats_acts = True

    def __init__(
        self, context: StepContext, partition: Callable[[], None] | None, options: JoinOptions, because: str
    ) -> None:
        super().__init__(context, partition, options)
        self._because = because
        self._seen: list[int | None] | None = None  # digests after the last step or act
        self._has_followers = self._acts = False

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the steps of the script. Steps after it are without followers."""
        try:
            with super().around():
                self.note()
                yield
        finally:
            self._end()

    def note(self) -> None:
        """What the script has now is what ranks that are over have, too."""
        self._seen = self._digests()

    @contextlib.contextmanager
    def act(self, name: str, *arguments: Any) -> Iterator[None]:
        """Around an act of the script (`_repeat`); within another one, it is part of that.

        Raises UsageError for a closure, which ranks that are over do not have.
        """
        if self._acts or not self._parameters():
            yield
            return
        if any(callable(argument) for argument in arguments):
            raise UsageError(
                f"join: expected optimizer.{name} without a closure, as replicas that ran out of data repeat it {self._because}, found "
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

    @abstractmethod
    def _parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank, in one order on all replicas; none before the partition."""

    @abstractmethod
    def _prepare(self, active: set[int]) -> None:
        """Before what the replicas `active` begin."""

    @abstractmethod
    def _end(self) -> None:
        """After the steps of the script: as without `join`."""

    # -- ranks that train ----------------------------------------------------------------------------------------------

    def _begin(self, phase: JoinPhase, *act: Any) -> None:
        phases = self._announce(phase)
        if self._error is None:
            self._lead(phases, *act)

    def _lead(self, phases: list[int], *act: Any) -> tuple[Any, ...]:
        """What ranks that are over need for a phase; the act that the source has told. May leave an `error`. Collective."""
        active = {r for r, phase in zip(self._replica_of, phases, strict=True) if phase != JoinPhase.OVER}
        self._has_followers = any(phase == JoinPhase.OVER for phase in phases)
        if self._has_followers:
            self._check_unchanged()
            if self._error is not None:
                return act
            act = self._share(max(active), is_over=phases[self._position] == JoinPhase.OVER, act=act)
        self._prepare(active)
        return act

    def _as_told(self, act: tuple[Any, ...]) -> tuple[Any, ...]:
        """An act as the source tells it."""
        return act

    def _check_unchanged(self) -> None:
        """Leave an error on all ranks if the script of some has changed parts by itself. Collective."""
        own = self._changed() if not self._has_shadowed else ""
        if any(self._exchange(int(bool(own)))):
            self._error = StepError(
                f"join: {self._because}, replicas that ran out of data update their parameters as the others do: expected step, zero_grad "
                "and clipping of smp.DistributedOptimizer, and torch.nn.utils.clip_grad_norm_, found that the script has changed "
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
                self._as_told(act) if self._session.groups[Axis.RDP].rank() == source else (),
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

    def _repeat_act(self, act: tuple[Any, ...]) -> None:
        name, *arguments = act
        self._acts = True
        try:
            self._repeat(name, arguments)
        finally:
            self._acts = False

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
