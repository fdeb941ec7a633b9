"""Observing the steps of a distributed model: callbacks, and predicted against measured memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smpc.errors import UsageError
from smpc.mesh import Axis
from smpc.observe.observer import StepCallback
from smpc.partitioner.graph.plan import Plan
from smpc.v1.session.comm import gather_objects
from smpc.v1.session.state import Script
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.pipeline import Pipeline

if TYPE_CHECKING:
    from smpc.report.measured import Comparison


class ObservedModel(nn.Module):
    """The model's methods for `smpc.observe.observer.Observer`."""

    _context: StepContext
    _pipeline: Pipeline | None

    def register_step_callback(self, callback: StepCallback) -> RemovableHandle:
        """Call `callback(info)` on this rank after every step, with a `smpc.StepInfo`. Ranks may have different callbacks."""
        return self._context.observer.register(callback)

    def observe(self, num_steps: int = 20) -> None:
        """Measure memory in the next step, and times in the `num_steps` after it, for `report`. Call it on every rank.

        This replaces the window of `smpc run --report` or `--trace`.
        """
        self._context.observer.observe(num_steps)

    def report(self) -> Comparison:
        """Predicted against measured memory and time of every rank, stage and step; `print` it. Call it on every rank.

        Raises UsageError before the partition, without a pipeline, and if no step was observed.
        """
        from smpc.report.measured import compare

        session, plan = self._context.session, self._plan()
        if plan is None:
            raise UsageError(
                "report: nothing is predicted of a model that is not cut; pipeline_parallel_degree is 1, or no step has run"
            )
        records = gather_objects(
            self._context.observer.record, session.groups[Axis.WORLD], session.message_device, session.device
        )
        if not any(step.training for record in records for step in record.steps):
            raise UsageError(
                "report: no training step has been measured; call model.observe() on every rank, then train"
            )
        return compare(plan, records)

    def _plan(self) -> Plan | None:
        """The compilation that the model was cut by, once it is cut."""
        return None if self._pipeline is None or self._pipeline.first is None else self._pipeline.plan


def held_tensors(module: nn.Module, script: Script, *, has_pipeline: bool) -> Iterator[Tensor]:
    """The tensors of a rank: optimizer state and, without a pipeline, the model's. A pipeline's runtime counts its own."""
    if not has_pipeline:
        parameters = list(module.parameters())
        yield from (*parameters, *module.buffers())
        yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
    if script.optimizer is not None:
        for own in script.optimizer.state.values():
            yield from (value for value in own.values() if isinstance(value, Tensor))
        yield from script.optimizer.masters
