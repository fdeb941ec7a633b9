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
function may have no effect but `model.backward` and what it returns, and calls the model once. Functions without `model.backward` evaluate.

Source: public SMP v1 API (`smp.step`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

from smpc.errors import ConfigTypeError, UsageError
from smpc.v1.state import state
from smpc.v1.steps.step_body import StepBody


class StepFunction:
    """A decorated function. It does not bind as a method: stored on a class, it is called without `self`."""

    def __init__(self, body: StepBody) -> None:
        self._body = body
        functools.update_wrapper(self, body.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. Returns what the function returns, with a StepOutput for every tensor and a list for any other value."""
        if not state.initialized or state.model is None:
            raise UsageError(
                f"step function {self._body.name} was called before there is a model; call smp.init and smp.DistributedModel "
                "first, on every rank"
            )
        return state.model.run_step(self._body, args, kwargs)

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
