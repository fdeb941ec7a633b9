"""The steps of a distributed model observed, for callbacks, `model.report()`, and `smpc run --report` and `--trace`.

`model.report()` compares predicted with measured memory and time. For `smpc run`, the launcher asks through the environment
(`smpc.observe.window.Observation`, read by `smp.init`), and the ranks answer with files in its folder:

    rank3.json      the record of rank 3, written after the last step of the window, or when the process ends before
    plan.json       the plan, by global rank 0, unless the model is not cut

A rank that cannot write warns, and trains on.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smpc.errors import UsageError
from smpc.mesh import Axis
from smpc.observe.observer import Observer, RankRecord, StepCallback
from smpc.observe.window import Observation
from smpc.partitioner.graph.plan import Plan
from smpc.v1.session.object_messages import gather_objects
from smpc.v1.session.process_state import Script, Session
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.pipeline import Pipeline
from smpc.v1.steps.programs.compiler import plan_alone
from smpc.v1.steps.step import StepRunner

if TYPE_CHECKING:
    from smpc.report.measured import Comparison


class ObservedModel(nn.Module):
    """The model's methods for `smpc.observe.observer.Observer`."""

    _context: StepContext
    _pipeline: Pipeline | None
    _runner: StepRunner
    _unpredicted: str = ""  # why there is no prediction

    def register_step_callback(self, callback: StepCallback) -> RemovableHandle:
        """Call `callback(info)` on this rank after every step, with a `smpc.StepInfo`. Ranks may have different callbacks."""
        return self._context.observer.register(callback)

    def observe(self, num_steps: int = 20) -> None:
        """Measure memory in the next step, and times in the `num_steps` after it, for `report`. Call it on every rank.

        Before the first step: memory in the second one, as the optimizer has no state in the first.
        This replaces the window of `smpc run --report` or `--trace`.
        """
        self._context.observer.observe(num_steps)

    def report(self) -> Comparison:
        """Predicted against measured memory and time of every rank, stage and step; `print` it. Call it on every rank.

        Without a pipeline, the prediction is made here, on rank 0. Raises UsageError before the partition, for a model that cannot be
        recorded, and if no step was observed.
        """
        from smpc.report.measured import compare

        session = self._context.session
        group, device = session.groups[Axis.WORLD], (session.message_device, session.device)
        plan, why = self._predicted(), ""
        if self._pipeline is None:
            plan, why = gather_objects((plan, self._unpredicted), group, *device)[0]
        if plan is None:
            raise UsageError(f"report: nothing is predicted: {why or 'no step has run, which would cut the model'}")
        records = gather_objects(self._context.observer.record, group, *device)
        if not any(step.training for record in records for step in record.steps):
            raise UsageError(
                "report: no training step has been measured; call model.observe() on every rank, then train"
            )
        return compare(plan, records)

    def _predicted(self, *, at_exit: bool = False) -> Plan | None:
        """The plan that the model was cut by, once it is cut; without a pipeline, on rank 0, what is predicted of the observed steps.

        `at_exit`: the process ends; if with an error, nothing is recorded any more.
        """
        if self._pipeline is not None:
            return None if self._pipeline.first is None else self._pipeline.plan
        if at_exit and hasattr(sys, "last_value"):
            return None
        single = self._runner.single
        signature = None if single is None else single.observed
        if single is None or signature is None or self._context.session.rank != 0:
            self._unpredicted = "no training step has been measured; call model.observe() on every rank, then train"
            return None
        try:
            return plan_alone(self._context, signature, keeps_outputs=single.keeps_outputs)
        except (
            Exception
        ) as error:  # whatever the model's own Python raises: the others wait for an answer, and training goes on
            self._unpredicted = f"the model cannot be recorded: {type(error).__name__}: {error}"
            return None


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


def make_observer(
    session: Session,
    observation: Observation | None,
    held: Callable[[], Iterable[Tensor]],
    plan: Callable[..., Plan | None],
) -> tuple[Observer, Callable[[], None]]:
    """The observer of this rank, and a function to call when the session ends. `observation`: the launcher's request."""
    mesh = session.mesh
    _, batches = mesh.data_place(session.rank, tensor_ranks_share=session.config.prescaled_batch)
    observer = Observer(
        session.device,
        session.rank,
        pipeline_rank=mesh.pp_rank(session.rank),
        replica=mesh.rdp_rank(session.rank) * mesh.tp_size + mesh.tp_rank(session.rank),
        replicas=batches,
        offset=session.clock_offset,
        window=None if observation is None else observation.window,
        held=held,
    )
    if observation is None:
        return observer, _nothing
    folder = Path(observation.folder)
    written: list[bool] = []

    def write(*, at_exit: bool = False) -> None:
        if not written:
            written.append(True)
            atexit.unregister(at_end)
            _write_record(folder, observer.record, partial(plan, at_exit=at_exit))

    at_end = partial(write, at_exit=True)
    observer.on_window_end = write
    atexit.register(at_end)
    return observer, write


def _nothing() -> None:
    return None


def _write_record(folder: Path, record: RankRecord, plan: Callable[[], Plan | None]) -> None:
    """Writes a rank's record, and then, on rank 0, the plan, for the launcher."""

    def write(name: str, text: str) -> None:
        draft = folder / f".{name}.{os.getpid()}"
        draft.write_text(text, encoding="utf-8")
        draft.replace(folder / name)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(f"rank{record.rank}.json", record.to_json())
        made = plan() if record.rank == 0 else None
        if made is not None:
            write("plan.json", made.to_json())
    except OSError as error:
        warnings.warn(
            f"rank {record.rank} cannot write what smpc run --report or --trace asked for: {error}", stacklevel=2
        )
