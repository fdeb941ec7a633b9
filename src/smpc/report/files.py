"""The files of a compilation: the plan, its reports, and a program for every rank; for `smpc compile --out` and `plan.save`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from smpc.codegen.rewrite.context_parallel.rewrite import describe_context
from smpc.codegen.rewrite.expert_parallel import describe_experts
from smpc.codegen.rewrite.tensor_parallel.rewrite import describe
from smpc.compile.result import Compilation
from smpc.config.files import output_violation
from smpc.config.limits import shown
from smpc.errors import ConfigError
from smpc.report.advice import Outlook
from smpc.report.page import render_page
from smpc.report.perfetto import perfetto_json

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
