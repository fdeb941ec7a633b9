"""What the rank of the last stage does beside its instructions: it runs the step function on the pipeline's outputs.

    output of microbatch m -> model(...) in the step function -> its loss -> model.backward(loss) -> roots of the backward pass of m

The step function runs whole for every microbatch, as soon as the output is there. A StepError in it is kept until the step is over, so
that every rank comes to the end and all can raise it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smpc.errors import StepError
from smpc.runtime import Roots
from smpc.v1.optimization.precision import loss_scale
from smpc.v1.steps.calls import Enter, Tail
from smpc.v1.steps.nonfinite import Losses
from smpc.v1.steps.step_body import Arguments, StepBody


class LastRank:
    """The step function in one step.

    `arguments` gives those of every microbatch, once they have arrived. `enter` sets what model(...) and model.backward(...) do.
    `divisor`: what gradients are divided by, beside the loss scale.
    """

    def __init__(
        self, body: StepBody, arguments: Callable[[], list[Arguments]], enter: Enter, trains: bool, divisor: int
    ) -> None:
        self._body = body
        self._arguments = arguments
        self._enter = enter
        self._trains = trains
        self._divisor = divisor
        self._microbatches: list[Arguments] | None = None
        self._values: dict[int, Any] = {}
        self.did_backward = False
        self.losses = Losses()
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
        tail = Tail(body.name, output, self._divisor / loss_scale())
        self._enter(tail)
        try:
            self._values[microbatch] = body.call(self._microbatches[microbatch])
        finally:
            self._enter(None)
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

    def values(self) -> list[Any]:
        """What the microbatches returned, in order."""
        return [self._values[i] for i in range(len(self._values))]
