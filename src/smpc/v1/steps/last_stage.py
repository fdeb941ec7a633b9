"""The rank of the last stage runs the step function on the pipeline's outputs, beside its instructions.

    output of microbatch m -> model(...) in the step function -> its loss -> model.backward(loss) -> roots of the backward pass of m

The step function runs whole for every microbatch, as soon as the output exists. A StepError in it is kept until the step is over, so
that every rank comes to the end and all can raise it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smpc.errors import StepError
from smpc.runtime import Roots
from smpc.v1.steps.arguments import Arguments, StepBody
from smpc.v1.steps.calls import Tail
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.draws import Sent, drawing_from
from smpc.v1.steps.nonfinite import Losses
from smpc.v1.steps.results import Returned, take


class LastRank:
    """The step function in one step.

    `arguments` returns the arguments of every microbatch, once they have arrived, and the random states to run it from, if it draws.
    """

    def __init__(
        self,
        context: StepContext,
        body: StepBody,
        arguments: Callable[[], list[tuple[Arguments, Sent | None]]],
        trains: bool,
    ) -> None:
        self._context = context
        self._body = body
        self._arguments = arguments
        self._trains = trains
        self._scale = context.divisor / context.precision.loss_scale  # of gradients
        self._microbatches: list[tuple[Arguments, Sent | None]] | None = None
        self._values: dict[int, Returned] = {}
        self.did_backward = False
        self.losses = Losses(context.precision)
        self.failure: StepError | None = None

    def on_output(self, microbatch: int, output: Any) -> Roots | None:
        """Run the step function for one microbatch; the roots of its backward pass.

        After a StepError the remaining microbatches run without it and without gradients, so that every rank comes to the end.
        """
        if self.failure is not None:
            return None
        try:
            return self._call(microbatch, output)
        except StepError as error:
            self.failure = error
            return None

    def _call(self, microbatch: int, output: Any) -> Roots | None:
        body = self._body
        if self._microbatches is None:
            self._microbatches = self._arguments()
        tail = self._context.calls = Tail(body.name, output, self._scale)
        try:
            arguments, states = self._microbatches[microbatch]
            with drawing_from(states, self._context.session.device):
                self._values[microbatch] = take(body.call(arguments), body.detach_outputs)
        finally:
            self._context.calls = None
            tail.close()
        if tail.roots is None:
            return None
        if not self._trains:
            raise StepError(
                f"step function {body.name} calls model.backward, but its earlier calls did not, so this step ran without "
                "keeping activations; use one step function for training and another for evaluation"
            )
        self.did_backward = True
        self.losses.add(microbatch, tail.losses)
        return tail.roots

    def values(self) -> list[Returned]:
        """The results of the microbatches, in order."""
        return [self._values[i] for i in range(len(self._values))]
