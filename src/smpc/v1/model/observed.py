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
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smpc.errors import UsageError
from smpc.mesh import Axis
from smpc.observe.observer import Observer, RankRecord, StepCallback
from smpc.observe.window import Observation
from smpc.partitioner.graph.plan import Plan
from smpc.v1.session.comm import gather_objects
from smpc.v1.session.state import Script, Session
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


def make_observer(
    session: Session,
    observation: Observation | None,
    held: Callable[[], Iterable[Tensor]],
    plan: Callable[[], Plan | None],
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

    def write() -> None:
        if not written:
            written.append(True)
            atexit.unregister(write)
            _write_record(folder, observer.record, plan())

    observer.on_window_end = write
    atexit.register(write)
    return observer, write


def _nothing() -> None:
    return None


def _write_record(folder: Path, record: RankRecord, plan: Plan | None) -> None:
    """Writes a rank's record, and on rank 0 the plan, for the launcher."""
    texts = {f"rank{record.rank}.json": record.to_json()}
    if record.rank == 0 and plan is not None:
        texts["plan.json"] = plan.to_json()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            draft = folder / f".{name}.{os.getpid()}"
            draft.write_text(text, encoding="utf-8")
            draft.replace(folder / name)
    except OSError as error:
        warnings.warn(
            f"rank {record.rank} cannot write what smpc run --report or --trace asked for: {error}", stacklevel=2
        )
