"""`@smp.step`: a function that trains or evaluates on one microbatch becomes one that does so on the whole batch.

    @smp.step
    def train_step(model, ids, labels):
        loss = loss_function(model(ids), labels)
        model.backward(loss)
        return loss

    loss_mb = train_step(model, ids, labels)          # on every rank
    loss_mb.reduce_mean()                             # a StepOutput, with the values on every rank

With a pipeline, the tensors of pipeline rank 0 count, whatever the others pass in their place (empty tensors, None). That rank runs the
function up to `model(...)`; the rank of the last stage runs all of it, once for every microbatch; the others run none of it. So a step
function may have no effect but `model.backward` and its result, and calls the model once. Functions without `model.backward` evaluate.

`StepRunner` does the following with every step, with a pipeline or without one:

    before    steps do not nest; a save in the background that has failed; what optimizers tell each other before the first update
    step      `Pipeline` or `Single`
    after     the verdict on losses that are not finite; the optimizer has new gradients; hooks of the script

Source: public SMP v1 API (`smp.step`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from smpc.errors import CheckpointError, ConfigTypeError, NonFiniteLossError, StepError, UsageError
from smpc.observe.observer import StepWatch
from smpc.v1.session.process_state import Script, state
from smpc.v1.session.step_errors import from_script, user_part
from smpc.v1.steps.arguments import Arguments, StepBody
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.model_calls import ModelCalls, autocast_of_step_function
from smpc.v1.steps.results import describe_verdict
from smpc.v1.steps.unpipelined import Single


class StepFunction:
    """A decorated function. It does not bind as a method: stored on a class, it is called without `self`."""

    def __init__(self, body: StepBody) -> None:
        self._body = body
        functools.update_wrapper(self, body.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. Returns the function's result, with a StepOutput for every tensor and a list for any other value."""
        script = state.scripts[0] if len(state.scripts) == 1 else self._script(args, kwargs)
        if script is None or script.model is None:
            raise UsageError(
                f"step function {self._body.name} was called before there is a model; call smp.init and smp.DistributedModel "
                "first, on every rank"
            )
        try:
            if len(state.scripts) == 1:  # which acts anyway
                return script.runner.run(self._body, args, kwargs)
            with state.acting(script):
                return script.runner.run(self._body, args, kwargs)
        except Exception as error:
            cut = user_part if isinstance(error, StepError) else from_script
            error.__traceback__ = cut(error.__traceback__)
            raise

    def _script(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Script | None:
        """The script of the model among the arguments, if there are several models; None if there is none."""
        scripts = state.with_models
        if not scripts:
            return None
        if len(scripts) == 1:
            return scripts[0]
        found = [each for each in scripts if any(value is each.model for value in (*args, *kwargs.values()))]
        if len(found) != 1:
            raise StepError(
                f"step function {self._body.name}: there are {len(scripts)} models, so expected one of them among its arguments, found "
                f"{len(found)}; a step runs one model: run the other in a step function of its own, and pass what it returned as tensors"
            )
        return found[0]

    def __repr__(self) -> str:
        return f"<smp.step {self._body.name}>"


@overload
def step(function: Callable[..., Any]) -> StepFunction: ...


@overload
def step(
    function: None = None,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[Callable[..., Any]], StepFunction]: ...


def step(
    function: Callable[..., Any] | None = None,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> StepFunction | Callable[[Callable[..., Any]], StepFunction]:
    """Decorate a step function; `@smp.step`, or with options `@smp.step(...)`.

    `non_split_inputs`: names of arguments that every microbatch gets whole. `input_split_axes`: name -> axis along which the tensors of
    that argument are split, 0 otherwise. `detach_outputs`: whether returned tensors lose their autograd history.
    Raises StepError for names that the function does not have.
    """
    if function is not None and not callable(function):
        raise ConfigTypeError(f"smp.step: expected a function, found {type(function).__name__} {function!r}")

    def decorate(function: Callable[..., Any]) -> StepFunction:
        return StepFunction(StepBody(function, non_split_inputs or (), input_split_axes or {}, detach_outputs))

    return decorate if function is None else decorate(function)


class Steps(Protocol):
    """`Pipeline` or `Single`."""

    def step(self, body: StepBody, own: Callable[[], Arguments], watch: StepWatch) -> tuple[Any, int]:
        """One step; returns its result and the verdict on its losses."""


class StepRunner:
    """The steps of one model. `single`: its `steps` without a pipeline."""

    def __init__(self, context: StepContext, steps: Steps, single: Single | None) -> None:
        self._context, self._steps, self._single = context, steps, single

    @property
    def single(self) -> Single | None:
        """Its steps without a pipeline."""
        return self._single

    def run(self, body: StepBody, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a step function on the whole batch."""
        context = self._context
        if context.calls is not None:
            raise StepError(f"step function {body.name} was called inside another step; steps do not nest")
        if self._single is None and autocast_of_step_function() is not None:
            raise StepError(
                f"step function {body.name} was called under autocast, which ranks that run none of it do not see; enter autocast in the "
                "step function, around the model and the loss, not around the step function"
            )

        if context.join is None:
            return self._run(body, args, kwargs)
        with context.join.calling(body, args, kwargs):
            result = self._run(body, args, kwargs)
        context.join.note()
        return result

    def _run(self, body: StepBody, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        context = self._context
        own: Callable[[], Arguments] = partial(body.bind, args, kwargs)
        if context.distribution.checks_batch:
            own = partial(self._checked, body, args, kwargs)
        if context.script.job.checkpointer is not None:
            self._check_saving()
        if context.script.untold is not None:
            context.script.untold.tell_others()
        if not context.is_cut:
            context.batch_bytes = _bytes_on(context.session.device, _tensors(args, kwargs))
        observer = context.observer
        watching = observer.step(partial(_tensors, args, kwargs))
        with context.ordinary(), watching as watch:
            result, verdict = self._steps.step(body, own, watch)
            if verdict:
                self._judge(verdict, body)
        optimizer = context.script.optimizer
        if optimizer is not None:
            optimizer.gradients_changed()
        if not context.hooks.have_stepped:
            context.supervision.end_start()
            context.hooks.after_step()
        return result

    def outside(self, what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelCalls:
        """Runs the model outside steps. Raises StepError with a pipeline, and in join."""
        context = self._context
        if self._single is None or context.join is not None:
            why = "there is a pipeline" if self._single is None else "of join"
            raise StepError(
                f"{what} was called outside a step; call it in a function decorated with @smp.step, as {why}"
            )
        if context.script.untold is not None:
            context.script.untold.tell_others()
        self._single.settle()
        if context.distribution.checks_batch:
            given = {f"argument {i}": arg for i, arg in enumerate(args)} | dict(kwargs)
            context.distribution.check_batch(given, "(none)")
        return self._single.direct

    def _checked(self, body: StepBody, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments, which must be equal on the ranks of a tensor-parallel group."""
        arguments = body.bind(args, kwargs)
        self._context.distribution.check_batch(arguments, body.name)
        return arguments

    def _check_saving(self) -> None:
        """Raise the error of a failed background save, on all ranks."""
        try:
            self._context.script.job.checkpointer.check()
        except CheckpointError as error:
            self._context.supervision.report(error)
            raise

    def _judge(self, verdict: int, body: StepBody) -> None:
        """Apply `nan_policy` if a loss is not finite; the verdict is the same on all ranks."""
        for parameter in self._context.module.parameters():
            parameter.grad = None
        session = self._context.session
        text = describe_verdict(verdict, body.name, session)
        if session.config.nan_policy == "raise":
            raise NonFiniteLossError(text)
        if session.rank == 0:
            warnings.warn(text, stacklevel=5)


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """Of their memory; sparse and nested tensors are left out."""
    plain = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
    storages = {
        found._cdata: found for tensor in plain if tensor.device == device if (found := tensor.untyped_storage())
    }
    return sum(found.nbytes() for found in storages.values())
