"""`model.join()` where ranks divide experts (`expert_parallel_degree`): ranks that are over run the steps of the source, with its batch.

    phase         ranks that train                       ranks that are over
    --------------------------------------------------------------------------------------------------------------
    STEP          run a step function                    run the same one with the arguments of the source; their gradients are zero
    ACT           see `smpc.v1.steps.join.script_actions`

So experts of ranks that are over serve the tokens of the others, and are updated as ever; in the end all have the parameters, buffers and
optimizer state of the last replica's steps. Within a step no phases are exchanged: all ranks do the same.

The arguments come from the source rank by rank, as each rank of a replica was given them. Tensors and other values that can be pickled are
copied; the model itself is the rank's own.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smpc.errors import NonFiniteLossError, StepError, UsageError
from smpc.executor import StageReplicas
from smpc.executor.replicas.fully_shard import Joined, ModuleShards, StageShards
from smpc.executor.replicas.group_hooks import StepHooks, innermost
from smpc.experts.routers import joined_losses_scaled
from smpc.v1.steps.arguments import StepBody, map_leaves
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.join.join import JoinOptions, JoinPhase, SharedOptimizer
from smpc.v1.steps.join.script_actions import JoinOfActs


class _OwnModel:
    """Stands for the model among the arguments of a step function."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a step function, and what is around it. `modes`: whether each module of the model trains."""

    number: int
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    modes: list[bool]
    has_gradients: bool
    is_inference: bool
    autocast: torch.dtype | None


class JoinOfExperts(JoinOfActs):
    """See above. `hooks`: of training steps, None before the partition. `run`: a step function with its arguments."""

    def __init__(
        self,
        context: StepContext,
        hooks: Callable[[], StepHooks | None],
        run: Callable[[StepBody, tuple[Any, ...], Mapping[str, Any]], Any],
        options: JoinOptions,
    ) -> None:
        super().__init__(context, None, options, "with expert_parallel_degree above 1")
        self._hooks, self._run = hooks, run
        self._repeats = False
        self._source = 0  # whose buffers count
        self._left: NonFiniteLossError | None = None

    @contextlib.contextmanager
    def calling(self, body: StepBody, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Around a step function: ranks that are over run it as well."""
        if not self._repeats:
            self._guarded(lambda: self._begin(JoinPhase.STEP, body, args, kwargs))
        with joined_losses_scaled(1 / self.divisor):
            yield

    def begin_partition(self) -> None:
        """Nothing: ranks that are over run the whole step."""

    def begin_batch(self) -> None:
        """Nothing."""

    def begin_step(self, *, trains: bool) -> None:
        """Averages are there now, the first time, too."""
        averaging, looks = innermost(self._hooks()), None
        if self._repeats:
            names = {id(parameter): name for name, parameter in self._context.module.named_parameters()}
            looks = functools.partial(_check_zeros, names)
        if isinstance(averaging, StageReplicas):
            averaging.join(self._source, None, looks)
        elif isinstance(averaging, StageShards | ModuleShards):
            averaging.join(Joined(self._source, looks=looks))

    def end_step(self, *, did_backward: bool) -> None:
        """Nothing."""

    def _prepare(self, active: set[int]) -> None:
        alike = dict(zip(self._replica_of, self._alike, strict=True))
        self.divisor = 1.0
        if not self._divides_by_all:
            self.divisor = len({alike[replica] for replica in active}) / len(set(self._alike))
        self._source = max(active)

    def _as_told(self, act: tuple[Any, ...]) -> tuple[Any, ...]:
        """For a step, the pickled call; where that fails, why."""
        if not isinstance(act[0], StepBody):
            return act
        body, args, kwargs = act
        device = self._session.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        call = _Call(
            body.number,
            body.name,
            tuple(map_leaves(value, self._leaf_as_told, "") for value in args),
            {name: map_leaves(value, self._leaf_as_told, "") for name, value in kwargs.items()},
            [module.training for module in self._context.module.modules()],
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
        )
        try:
            return pickle.dumps(call), ""
        except Exception as error:  # whatever a value raises that cannot be copied
            return b"", f"{body.name}: {type(error).__name__}: {error}"

    def _leaf_as_told(self, value: Any, _: str) -> Any:
        if value is self._context.script.model or value is self._context.module:
            return _OwnModel()
        return value.detach().cpu().clone() if isinstance(value, Tensor) else value

    def _parameters(self) -> list[nn.Parameter]:
        model = self._context.script.model
        return list(model.local_parameters()) if model is not None and self._context.is_cut else []

    # -- ranks that are over -------------------------------------------------------------------------------------------

    def _take_part(self, phase: int, phases: list[int]) -> None:
        act = self._lead(phases)
        if self._error is not None:
            return
        if phase == JoinPhase.ACT:
            self._repeat_act(act)
        else:
            call: _Call = pickle.loads(act[0])
            self._then = lambda: self._repeat_call(call)

    def _lead(self, phases: list[int], *act: Any) -> tuple[Any, ...]:
        found = super()._lead(phases, *act)
        if self._error is None and self._has_followers and isinstance(found[0], bytes) and found[1]:
            self._error = StepError(
                "join: with expert_parallel_degree above 1, replicas that ran out of data run the step function of the others: expected "
                f"arguments that can be copied to their ranks (tensors, numbers, containers), found others in a call of {found[1]}; leave "
                "them out, or give all replicas as many batches"
            )
        return found

    def _repeat_call(self, call: _Call) -> None:
        body = StepBody.known.get(call.number)
        if body is None:
            raise StepError(
                f"join: expected the step function {call.name} on all ranks, found none on this one, which ran out of data; decorate the "
                "same functions on all of them, before join"
            )
        modules = list(self._context.module.modules())
        before = [module.training for module in modules]
        self._set_modes(modules, call.modes)
        self._repeats, self.divisor = True, math.inf
        try:
            with _around_call(call, self._session.device.type):
                self._run(body, self._own(call.args), {name: self._own(value) for name, value in call.kwargs.items()})
        except NonFiniteLossError as error:
            self._left = error
        except StepError:
            pass  # the others raise it, and go on or leave
        finally:
            self._repeats = False
            self._set_modes(modules, before)

    def _own(self, value: Any) -> Any:
        model = self._context.script.model
        return map_leaves(value, lambda leaf, _: model if isinstance(leaf, _OwnModel) else leaf, "")

    @staticmethod
    def _set_modes(modules: list[nn.Module], modes: list[bool]) -> None:
        for module, trains in zip(modules, modes, strict=True):
            module.training = trains

    def _not_finite(self) -> NonFiniteLossError:
        return super()._not_finite() if self._left is None else self._left

    def _finish(self, optimizer: SharedOptimizer | None) -> None:
        """Once all are over: the last replica's buffers for all."""
        last = self._exchange(int(not self._has_shadowed))
        if self._has_followers:
            self._check_unchanged()
        averaging = innermost(self._hooks())
        if self._error is None and isinstance(averaging, StageReplicas):
            averaging.synchronize(self._last_of(last))
        elif self._error is None and isinstance(averaging, StageShards | ModuleShards):
            averaging.share_buffers(self._last_of(last))

    def _end(self) -> None:
        self.divisor = 1.0
        averaging = innermost(self._hooks())
        if isinstance(averaging, StageShards | ModuleShards):
            averaging.join(Joined())


def _check_zeros(names: Mapping[int, str], parameter: Tensor, gradient: Tensor) -> None:
    """Check the gradient of a parameter that all replicas have, on a rank that repeats the step of another."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if torch.count_nonzero(values.nan_to_num(0.0, 0.0, 0.0)):
        raise UsageError(
            "join: with expert_parallel_degree above 1, replicas that ran out of data run the step of the others once more, with gradients "
            f"of zero: expected zeros for {names.get(id(parameter), 'a parameter')}, found others, which would count that batch twice; a "
            "function of autograd makes gradients of its own, or a hook does: add what it is for to the loss, or with "
            "smpc.experts.join_loss, or give all replicas as many batches"
        )


@contextlib.contextmanager
def _around_call(call: _Call, device: str) -> Iterator[None]:
    """The script's modes around a call."""
    is_cast = call.autocast is not None
    with (
        torch.inference_mode(call.is_inference),
        torch.set_grad_enabled(call.has_gradients),
        torch.autocast(device, call.autocast, enabled=True) if is_cast else contextlib.nullcontext(),
    ):
        yield
