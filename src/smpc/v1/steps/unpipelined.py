"""A step without a pipeline: the whole model is on this rank, and so is the whole step function.

Microbatches run one after another, each with its own backward pass. With replicas, gradients are averaged in the backward pass of the last
microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from smpc.errors import StepError
from smpc.executor.replicas.step_hooks import StepHooks
from smpc.observe.observer import Watch, batch_of
from smpc.v1.steps.arguments import Arguments, StepBody, on_device
from smpc.v1.steps.calls import Whole
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.nonfinite import Losses, agree
from smpc.v1.steps.outside import Direct
from smpc.v1.steps.programs.signature import ModeReader
from smpc.v1.steps.results import read_results, take


class Single:
    """Runs steps on the whole module. `replicas`: averages gradients, if there are replicas."""

    def __init__(self, context: StepContext, replicas: StepHooks | None) -> None:
        self._context, self._session, self._replicas = context, context.session, replicas
        self._modes = ModeReader(context.module)
        self._first_modes = self._modes.read()
        self._evaluations: set[int] = set()  # step functions that were never followed by a backward
        self.direct = Direct(context, replicas)  # outside of steps

    def settle(self) -> None:
        """Before the model runs: move it to its device, after cpu(); run the hooks that wait for the first call."""
        if not self._context.placement.is_spread:
            self._context.placement.spread()
        if not self._context.hooks.have_run:
            self._context.hooks.run()

    def step(self, body: StepBody, own: Callable[[], Arguments], watch: Watch) -> tuple[Any, int]:
        """One step; returns its result and the verdict on its losses. Raises StepError for a batch that does not divide."""
        self.settle()
        supervision, join, experts = self._context.supervision, self._context.join, self._context.experts
        if join is not None and self._may_train(body):
            join.begin_step()
        with supervision.step():
            with supervision.guard():
                failure = None if experts is None else experts.agree(body.name, self._may_train(body), None)
            if failure is not None:
                if self._session.mesh.dp_size > self._session.mesh.ep_size:
                    supervision.report(failure)  # ranks outside of the group would wait for this one
                raise failure
            with supervision.guard():
                return self._run(body, own(), watch)

    def _run(self, body: StepBody, arguments: Arguments, watch: Watch) -> tuple[object, int]:
        context = self._context
        device = self._session.device
        microbatches = body.split(on_device(arguments, device), self._session.config.microbatches, device)
        replicas = self._replicas if self._may_train(body) else None
        if replicas is not None:
            self.direct.close()
            self._modes.check_none_unfrozen(self._first_modes, self._modes.read())
            replicas.start_of_step()
        values, backwards, losses = [], [], Losses(context.precision)
        scale = context.divisor / context.precision.loss_scale
        for index, microbatch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            whole = Whole(body.name, context.module, scale, self._more_roots(replicas) if is_last else None)
            context.calls = whole
            try:
                values.append(take(body.call(microbatch), body.detach_outputs))
            finally:
                context.calls = None
                whole.close()
            if not whole.called:
                raise StepError(
                    f"step function {body.name} returned without calling the model; call model(...) in it once"
                )
            backwards.append(whole.did_backward)
            losses.add(index, whole.losses)
        self._finish(body, backwards, replicas)
        value = read_results(values, body.name).join()
        verdict = losses.verdict(self._session)
        if any(backwards):
            verdict = agree(verdict, body, self._session)
        if watch.is_wanted:
            watch.loss, watch.training = losses.mean, any(backwards)
            watch.samples, watch.tokens = batch_of(_specs(microbatches[0]), len(microbatches))
        return value, verdict

    def _may_train(self, body: StepBody) -> bool:
        """Whether a step of the function may do a backward; replicas then exchange buffers before it."""
        return torch.is_grad_enabled() and body.number not in self._evaluations

    def _finish(self, body: StepBody, backwards: list[bool], replicas: StepHooks | None) -> None:
        if any(backwards) and self._replicas is not None and (not backwards[-1] or replicas is None):
            raise StepError(
                f"step function {body.name} called model.backward in microbatches {[i for i, b in enumerate(backwards) if b]} of "
                f"{len(backwards)}, so gradients were not averaged over the replicas; call it in every microbatch of every step "
                "of the function, or in none"
            )
        if replicas is not None:
            if any(backwards):
                replicas.end_of_step()
            else:
                if self._context.join is not None:
                    self._context.join.end_step(did_backward=False)
                replicas.did_not_train()
        if not any(backwards):
            self._evaluations.add(body.number)

    def _more_roots(self, replicas: StepHooks | None) -> Callable[[list[Tensor]], tuple[Tensor, Tensor] | None] | None:
        if replicas is None:
            return None

        def before_last(roots: list[Tensor]) -> tuple[Tensor, Tensor] | None:
            if self._context.join is not None:
                self._context.join.end_step(did_backward=True)
            return replicas.before_last_backward(0, roots)

        return before_last


def _specs(arguments: Arguments) -> list[tuple[tuple[int, ...], bool]]:
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return [(tuple(tensor.shape), tensor.dtype in (torch.int64, torch.int32)) for tensor in tensors]
