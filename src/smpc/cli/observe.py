"""`smpc run --report` and `--trace`: asks the ranks for their records, and turns those into a report and a trace when they have ended.

Every rank writes what it has measured to a folder (`smpc.v1.steps.watching`): the one of `--trace`, or a temporary one. Launchers of
several nodes write to the same folder if it is on a shared disk, and the last one to end makes the trace of all ranks; otherwise each
makes that of its own. Files of an earlier job in the folder are removed first, by the launcher of node 0.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smpc.errors import ConfigError
from smpc.observation import Observation, Window

if TYPE_CHECKING:
    from smpc.observe import RankRecord
    from smpc.partitioner.plan import Plan

TRACE, PREDICTED = "trace.json", "predicted.json"
_RECORDS = "rank*.json"
_PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class ObserveOptions:
    """What the user asks for. `report_to` is a file, JSON if it is named so; `steps` is FIRST:LAST."""

    report: bool = False
    report_to: str | None = None
    trace: str | None = None
    steps: str | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anything is asked for."""
        return self.report or self.report_to is not None or self.trace is not None

    def check(self) -> Window:
        """The steps to record. Raises ConfigError, all violations together."""
        violations = []
        window = Window() if self.trace is None else Window(2, 5)
        if self.steps is not None:
            try:
                window = Window.parse(self.steps)
            except ConfigError as error:
                violations.append(f"--trace-steps: {error}")
            if not self.is_wanted:
                violations.append("--trace-steps: expected --trace or --report as well")
        if self.trace is not None and Path(self.trace).exists() and not Path(self.trace).is_dir():
            violations.append(f"--trace: expected a folder, found the file {self.trace!r}")
        if self.report_to is not None:
            if Path(self.report_to).is_dir():
                violations.append(f"--report-to: expected a file, found the folder {self.report_to!r}")
            elif not Path(self.report_to).parent.is_dir():
                violations.append(f"--report-to: the folder of {self.report_to!r} does not exist")
        if violations:
            raise ConfigError("\n".join(violations))
        return window


@contextmanager
def observed(options: ObserveOptions, *, is_first_node: bool) -> Iterator[dict[str, str]]:
    """What to put into the environment of the ranks; afterwards, writes and prints what was asked for. Raises ConfigError before."""
    window = options.check()
    if not options.is_wanted:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="smpc_observe_") as temporary:
        folder = Path(options.trace or temporary).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if is_first_node:
                for old in (*folder.glob(_RECORDS), folder / _PLAN, folder / TRACE, folder / PREDICTED):
                    old.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"--trace: cannot use the folder {str(folder)!r}: {error.strerror}") from None
        yield Observation(str(folder), window).environment()
        _finish(options, window, folder)


def _finish(options: ObserveOptions, window: Window, folder: Path) -> None:
    from smpc.observe import RankRecord
    from smpc.partitioner.plan import Plan

    records = [RankRecord.from_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(_RECORDS))]
    path = folder / _PLAN
    plan = Plan.from_json(path.read_text(encoding="utf-8")) if path.exists() else None
    if not any(record.steps for record in records):
        _say(_nothing(records, window))
        return
    if options.trace is not None:
        _write_trace(plan, records, folder)
        _say(f"wrote {folder / TRACE}; open it in https://ui.perfetto.dev")
    if options.report or options.report_to is not None:
        _report(options, plan, records)


def _write_trace(plan: Plan | None, records: Sequence[RankRecord], folder: Path) -> None:
    from smpc.report.measured_trace import measured_json
    from smpc.report.perfetto import perfetto_json
    from smpc.report.predict import plan_timeline

    (folder / TRACE).write_text(measured_json(plan, records), encoding="utf-8")
    if plan is not None:
        (folder / PREDICTED).write_text(perfetto_json(plan, plan_timeline(plan)), encoding="utf-8")


def _report(options: ObserveOptions, plan: Plan | None, records: Sequence[RankRecord]) -> None:
    from smpc.report.measured import compare, whole_steps

    if plan is None:
        text = f"{whole_steps(records)}\n"
        data = json.dumps({"plan": None, "report": text}, indent=2) + "\n"
    else:
        found = compare(plan, records)
        text, data = f"{found}\n", found.to_json()
    if options.report:
        sys.stdout.write(text)
        sys.stdout.flush()
    if options.report_to is not None:
        try:
            Path(options.report_to).write_text(data if options.report_to.endswith(".json") else text, encoding="utf-8")
        except OSError as error:
            _say(f"cannot write the report to {options.report_to!r}: {error.strerror}")


def _nothing(records: Sequence[RankRecord], window: Window) -> str:
    if not records:
        return (
            "no rank has left a record to report or trace: the script has to call smp.init and make a smp.DistributedModel, and "
            "ranks that are killed leave none before the last step that is recorded"
        )
    ran = max(record.num_steps for record in records)
    return f"nothing was recorded: the ranks ran {ran} steps, steps {window} were to be recorded; see --trace-steps"


def _say(text: str) -> None:
    print(f"smpc: {text}", file=sys.stderr)
