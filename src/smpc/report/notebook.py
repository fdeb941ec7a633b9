"""A plan for notebooks: its display, methods for people, and its files.

    plan = smpc.partition(model, batch, pipeline_parallel_degree=4)
    plan                        # at the end of a cell: the report's pictures and tables; elsewhere five lines
    plan.show()                 # the report in text, on stdout
    plan.explain()              # why it is as it is, where the time goes, and what other settings would gain
    plan.save("plan")           # the files of `smpc compile --out`

It is the plan together with its compilation: equal to the plan, and copied and pickled as one.

`plan_files` are the files of a compilation for `smpc compile --out` and `plan.save`: the plan, its reports, and a program for every rank.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from smpc.codegen.rewrite.context_parallel.rewrite import describe_context
from smpc.codegen.rewrite.expert_parallel import describe_experts
from smpc.codegen.rewrite.tensor_parallel.rewrite import describe
from smpc.compile.options import PipelineOptions
from smpc.compile.result import Compilation
from smpc.config.numbers import shown
from smpc.config.user_files import output_violation
from smpc.errors import ConfigError, ConfigTypeError
from smpc.partitioner.graph.plan import Plan, plan_warnings
from smpc.report.advice import Outlook, outlook
from smpc.report.format import count, format_bytes, format_time, module_list, printable
from smpc.report.page import render_page
from smpc.report.perfetto import perfetto_json
from smpc.report.tables import summary
from smpc.report.terminal import print_report

_OURS = re.compile(r"rank_\d+\.py|search\.json|(tensor|context|expert)_parallel\.txt|smp_config\.json")


def plan_files(compilation: Compilation, found: Outlook | None = None) -> dict[str, str]:
    """The text of every file, by its name; plan.json is the last. `found`: what the page says on top."""
    timeline = compilation.timeline()
    files = {f"rank_{rank}.py": compilation.rank_source(rank) for rank in range(len(compilation.programs))}
    files["schedule.txt"] = compilation.schedule_text()
    files["timeline.json"] = perfetto_json(compilation.plan, timeline)
    files["report.html"] = render_page(compilation, found)
    files |= sharing_texts(compilation)
    files["plan.json"] = compilation.plan.to_json()
    return files


def sharing_texts(compilation: Compilation) -> dict[str, str]:
    """By file, how ranks share operations and sequences."""
    files = {}
    if compilation.sharded is not None:
        files["tensor_parallel.txt"] = describe(compilation.sharded) + "\n"
    if compilation.context is not None:
        files["context_parallel.txt"] = describe_context(compilation.context) + "\n"
    if compilation.divided is not None:
        files["expert_parallel.txt"] = describe_experts(compilation.divided) + "\n"
    return files


def write_files(folder: Path, files: Mapping[str, str], what: str) -> None:
    """Write files of a plan; what is left of an earlier, larger plan is removed.

    `what`: the option that asks for them, for errors. Raises ConfigError for a file that cannot be written.
    """
    where = f"{what} {shown(str(folder))}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "plan.json").exists():  # a folder that this wrote
            for stale in sorted(folder.iterdir()):
                if _OURS.fullmatch(stale.name) and stale.name not in files:
                    stale.unlink()
        for name, text in files.items():
            if violation := output_violation(str(folder / name)):
                raise ConfigError(f"{where}: {violation}")
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{where}: cannot write {shown(error.filename)}: {error.strerror}") from error


_HEIGHT = 900  # pixels of the page in a cell; it scrolls


class ShownPlan(Plan):
    """A plan of `smpc.partition`."""

    _compilation: Compilation
    _options: PipelineOptions

    @classmethod
    def of(cls, compilation: Compilation, options: PipelineOptions) -> ShownPlan:
        """The plan of a compilation."""
        plan = compilation.plan
        own = cls(**{field.name: getattr(plan, field.name) for field in fields(plan)})
        own.__dict__.update(_compilation=compilation, _options=options)
        return own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    __hash__ = Plan.__hash__

    def __reduce__(self) -> tuple[Callable[[str], Plan], tuple[str]]:
        return Plan.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        """Five lines: the model, its stages, the schedule, memory, how good it is."""
        stages, schedule, objective = self.stages, self.schedule, self.objective
        first, last = (_short_in_notebook(module_list(stage.modules)) for stage in (stages[0], stages[-1]))
        peaks = [stage.peak_memory_bytes for stage in stages]
        return "\n".join(
            (
                f"Plan of {printable(self.model_class.rpartition('.')[2])}, {self.fingerprint[:16]}",
                f"  {count(len(stages), 'stage')} on {count(self.pipeline_parallel_degree, 'rank')}: {first} ... {last}",
                f"  {printable(schedule.name)} schedule, {count(schedule.num_microbatches, 'microbatch', 'es')}, "
                f"step {format_time(schedule.step_time)}, bubble {schedule.bubble_fraction:.1%}",
                f"  memory of a stage: {format_bytes(min(peaks))} to {format_bytes(max(peaks))}",
                f"  no plan is better by more than {objective.gap:.2%}; plan.show(), plan.explain(), plan.save(folder)",
            )
        )

    def _repr_html_(self) -> str:
        """The page of the report in a frame; it loads nothing from elsewhere."""
        page = html.escape(self._page(), quote=True)
        style = f"width:100%;height:{_HEIGHT}px;border:0"
        return f'<iframe sandbox="allow-scripts" title="Plan" style="{style}" srcdoc="{page}"></iframe>'

    def show(self) -> None:
        """Print the report: tables, and the step drawn over time."""
        print_report(self, self._compilation.timeline(), more=self._more())

    def explain(self) -> str:
        """Why the plan is as it is: a line each for the objective, the schedule, what was left undone, time, and advice."""
        lines = [*summary(self), *(("Not done", printable(text)) for text in plan_warnings(self)), *self._more()]
        return "\n".join(f"{label + ':' if label else '':<12}{text}" for label, text in lines)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write plan.json, report.html, timeline.json, schedule.txt and a program for every rank. Raises ConfigError where it cannot."""
        if not isinstance(folder, str | os.PathLike):
            raise ConfigTypeError(f"plan.save: expected the name of a folder, found {shown(folder)}")
        write_files(Path(folder), plan_files(self._compilation, self._outlook()), "plan.save:")

    def _page(self) -> str:
        return render_page(self._compilation, self._outlook())

    def _more(self) -> tuple[tuple[str, str], ...]:
        found = self._outlook()
        return () if found is None else found.lines()

    def _outlook(self) -> Outlook | None:
        planned: Any = self._compilation.planned
        return None if planned is None or planned.traced is None else outlook(self._options, planned)


def _short_in_notebook(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
