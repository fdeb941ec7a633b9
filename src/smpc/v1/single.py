"""A step without a pipeline: the whole model is on this rank, and so is the whole step function.

Microbatches run one after another, each with its own backward pass. With replicas, gradients are averaged in the backward pass of the last
microbatch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from smpc.errors import StepError
from smpc.executor.bind import StepHooks
from smpc.v1.calls import ModelCalls, Whole
from smpc.v1.nonfinite import Losses, agree
from smpc.v1.results import read_results
from smpc.v1.signature import ModeReader
from smpc.v1.state import Session
from smpc.v1.step_body import Arguments, StepBody


class Single:
    """Runs steps on the whole module. `replicas`: what averages gradients, where there are replicas."""

    def __init__(
        self,
        module: nn.Module,
        session: Session,
        replicas: StepHooks | None,
        enter: Callable[[ModelCalls | None], None],
        average: bool,
    ) -> None:
        self._module, self._session, self._replicas, self._enter = module, session, replicas, enter
        self._scale = session.config.microbatches if average else 1
        self._modes = ModeReader(module)
        self._first_modes = self._modes.read()
        self._evaluations: set[int] = set()  # step functions that were never followed by a backward

    def run(self, body: StepBody, arguments: Arguments) -> tuple[object, int]:
        """One step; what it returns, and the verdict on its losses. Raises StepError for a batch that does not divide."""
        microbatches = body.split(arguments, self._session.config.microbatches, self._session.device)
        replicas = self._replicas if self._may_train(body) else None
        if replicas is not None:
            self._modes.check_none_unfrozen(self._first_modes, self._modes.read())
            replicas.start_of_step()
        values, backwards, losses = [], [], Losses()
        for index, microbatch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            whole = Whole(body.name, self._module, self._scale, _more_roots(replicas) if is_last else None)
            self._enter(whole)
            try:
                values.append(body.call(microbatch))
            finally:
                self._enter(None)
            if not whole.called:
                raise StepError(
                    f"step function {body.name} returned without calling the model; call model(...) in it once"
                )
            backwards.append(whole.did_backward)
            losses.add(index, whole.losses)
        self._finish(body, backwards, replicas)
        form, tensors = read_results(values, body.name)
        verdict = losses.verdict(self._session)
        if any(backwards):
            verdict = agree(verdict, self._session)
        return form.build([tensor.detach() for tensor in tensors] if body.detach_outputs else tensors), verdict

    def _may_train(self, body: StepBody) -> bool:
        return torch.is_grad_enabled() and body.number not in self._evaluations

    def _finish(self, body: StepBody, backwards: list[bool], replicas: StepHooks | None) -> None:
        if any(backwards) and self._replicas is not None and (not backwards[-1] or replicas is None):
            raise StepError(
                f"step function {body.name} called model.backward in microbatches {[i for i, b in enumerate(backwards) if b]} of "
                f"{len(backwards)}, so gradients were not averaged over the replicas; call it in every microbatch of every step "
                "of the function, or in none"
            )
        if any(backwards) and replicas is not None:
            replicas.end_of_step()
        if not any(backwards):
            self._evaluations.add(body.number)


def _more_roots(replicas: StepHooks | None) -> Callable[[list[Tensor]], tuple[Tensor, Tensor] | None] | None:
    if replicas is None:
        return None
    return lambda roots: replicas.before_last_backward(0, roots)
