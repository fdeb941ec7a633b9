"""How the steps of a training script are observed: for callbacks, `model.report()`, and `smpc run --report` and `--trace`.

The launcher asks through the environment (`smpc.observe.window.Observation`, read by `smp.init`), and the ranks answer with files in
its folder:

    rank3.json      the record of rank 3, written after the last step of the window, or when the process ends before
    plan.json       the plan, by global rank 0, unless the model is not cut

A rank that cannot write warns, and trains on.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from smpc.observe.observer import Observer, RankRecord
from smpc.observe.window import Observation
from smpc.partitioner.graph.plan import Plan
from smpc.v1.session.state import Session


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
            _write(folder, observer.record, plan())

    observer.on_window_end = write
    atexit.register(write)
    return observer, write


def _nothing() -> None:
    return None


def _write(folder: Path, record: RankRecord, plan: Plan | None) -> None:
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
