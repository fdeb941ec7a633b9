"""Plans that the user names on the command line: files written by `smpc compile`, or the folders they are in.

A plan is checked before it is used: that it is JSON, that every field has its type, that stages, ranks and edges fit
together, and that nothing was changed since it was written. Whatever is wrong is a ConfigError of one line.

`smpc diff` and `smpc simulate`: what changed between two plans that were written, and one of them under another schedule.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smpc.config.numbers import MAX_MICROBATCHES, MAX_PIPELINE_RANKS, MAX_STEPS, shown, size_violation
from smpc.config.user_files import MAX_PLAN_BYTES, parse_json, read_text
from smpc.errors import ConfigError, printable

if TYPE_CHECKING:
    from smpc.partitioner.graph.plan import Plan


_MOST = 1e30  # bytes, seconds, FLOPs
_LEAST_BANDWIDTH = 1.0
_REMEDY = "write it again with `smpc compile ... --out DIR`"


def load_plan(name: str) -> Plan:
    """The plan of a file, or of a folder that holds plan.json."""
    text = _read_plan(name)
    data = parse_json(text, repr(name))
    if "stages" not in data or "fingerprint" not in data:
        raise ConfigError(f"{name!r}: expected a plan as `smpc compile` writes it, found other JSON")
    from smpc.partitioner.graph.plan import PLAN_VERSION, Plan  # and with it torch, which takes seconds

    if data.get("version") != PLAN_VERSION:
        found = shown(data.get("version"))
        raise ConfigError(f"{name!r}: expected a plan of version {PLAN_VERSION}, found version {found}; {_REMEDY}")
    _check_types(name, data)
    try:
        plan = Plan.from_json(text)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name!r}: {printable(str(error))}; {_REMEDY}") from error
    problem = next(_plan_problems(plan), None)
    if problem is not None:
        raise ConfigError(f"{name!r}: {problem}; {_REMEDY}")
    return plan


def _read_plan(name: str) -> str:
    path = os.path.join(name, "plan.json") if os.path.isdir(name) else name
    return read_text(path, repr(path), most=MAX_PLAN_BYTES)


def _check_types(name: str, data: dict[str, Any]) -> None:
    fields = {key: value for key, value in data.items() if key != "fingerprint"}
    from pydantic import TypeAdapter, ValidationError

    from smpc.partitioner.graph.plan import Plan

    try:
        TypeAdapter(Plan).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{name!r}: {printable(where)}: {printable(first['msg'])}; {_REMEDY}") from error


def _plan_problems(plan: Plan) -> Iterator[str]:
    """The errors of a plan whose fields have the right types."""
    from smpc.partitioner.graph.plan import INPUTS

    num_stages, num_ranks, schedule = len(plan.stages), plan.pipeline_parallel_degree, plan.schedule
    if not 1 <= num_stages <= MAX_STEPS:
        yield f"expected at least one stage, found {num_stages or 'none'}"
    if not 1 <= num_ranks <= MAX_PIPELINE_RANKS:
        yield f"pipeline_parallel_degree: expected 1 to {MAX_PIPELINE_RANKS}, found {num_ranks}"
    for index, stage in enumerate(plan.stages):
        if stage.index != index:
            yield f"stages.{index}: expected index {index}, found {stage.index}"
        if not 0 <= stage.rank < num_ranks:
            yield f"stages.{index}: expected a rank from 0 to {num_ranks - 1}, found {stage.rank}"
        if not 0 <= stage.num_in_flight <= MAX_MICROBATCHES:
            yield f"stages.{index}: expected 0 to {MAX_MICROBATCHES} microbatches in flight, found {stage.num_in_flight}"
        yield from _wrong_sizes_in_plan(f"stages.{index}", stage)
    used = {stage.rank for stage in plan.stages}
    if len(used) < num_ranks:
        yield f"expected a stage on each of {num_ranks} ranks, found stages on {len(used)}"
    for index, edge in enumerate(plan.edges):
        if not INPUTS <= edge.source < edge.destination < num_stages:
            yield f"edges.{index}: expected an edge to a later stage, found {edge.source} to {edge.destination}"
        yield from _wrong_sizes_in_plan(f"edges.{index}", edge)
    for shared in plan.shared_parameters:
        if not all(0 <= stage < num_stages for stage in shared.stages):
            yield f"shared_parameters: expected stages from 0 to {num_stages - 1}, found {shown(shared.stages)}"
    yield from _wrong_sizes_in_plan("objective", plan.objective)
    if schedule.num_microbatches < 1 or schedule.active_microbatches < 1:
        yield "schedule: expected at least one microbatch"
    if violation := size_violation(num_stages, schedule.num_microbatches, searched=schedule.name == "list"):
        yield f"schedule: {violation}"
    if not schedule.link_bandwidth >= _LEAST_BANDWIDTH:
        yield f"schedule: expected a link of at least {_LEAST_BANDWIDTH:g} bytes/s, found {schedule.link_bandwidth}"
    yield from _wrong_sizes_in_plan("schedule", schedule)


def _wrong_sizes_in_plan(where: str, part: Any) -> Iterator[str]:
    """Numbers of a part that are none of a plan; what is at the peak beyond the rest may be less than nothing."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        least = -_MOST if field.name in ("source", "transient_bytes") else 0
        if isinstance(value, (int, float)) and not least <= value <= _MOST:
            yield f"{where}.{field.name}: expected times, costs and sizes from {least:g} to {_MOST:g}, found {shown(value)}"


def diff_command(
    before: Annotated[
        str, typer.Argument(metavar="A", help="A plan.json, or the folder it is in.", show_default=False)
    ],
    after: Annotated[str, typer.Argument(metavar="B", help="Another.", show_default=False)],
) -> None:
    """Show what changed between two plans: modules, memory, time, messages, objective, schedule.

    Exit status: 0 if the plans are equal, 1 if they differ, 2 if one cannot be read.
    """

    plans = load_plan(before), load_plan(after)
    from smpc.report.compare import compare
    from smpc.report.terminal import print_changes

    changes = compare(*plans)
    if changes:
        print_changes(before, after, changes)
        raise typer.Exit(1)


def simulate_command(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan.json, or the folder it is in.", show_default=False)
    ],
    microbatches: Annotated[
        int | None,
        typer.Option("-m", "--microbatches", metavar="M", help="Microbatches of a step, of the size they have."),
    ] = None,
    pipeline: Annotated[str | None, typer.Option(help="Schedule: interleaved or simple.")] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Schedule by name, as for compile; wins over --pipeline.")
    ] = None,
    active_microbatches: Annotated[
        int | None, typer.Option(metavar="A", help="Most microbatches in execution at a time.")
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print the new plan as JSON and nothing else.")] = False,
) -> None:
    """Predict step time, bubble and memory of a plan under another schedule.

    The cut stays as it is, and so does the size of a microbatch: twice the microbatches are twice the batch. The model
    is not needed. Other settings stay as in the plan.
    """

    before = load_plan(plan)  # first: the rest takes seconds to import
    from rich.text import Text

    from smpc.report.predict import plan_timeline, predict
    from smpc.report.tables import TextTable
    from smpc.report.terminal import print_report, stdout_console, text_table

    after = predict(
        before,
        num_microbatches=microbatches,
        pipeline=pipeline,
        schedule=schedule,
        active_microbatches=active_microbatches,
    )
    if json_only:
        sys.stdout.write(after.to_json())
        return
    console = stdout_console()
    print_report(after, plan_timeline(after), console)
    rows = (_prediction_of_written_plan("plan", before), _prediction_of_written_plan("here", after))
    headers = ("", "Schedule", "Step", "Per microbatch", "Bubble", "Peak memory")
    console.print(Text())
    console.print(text_table(TextTable(headers, rows, left=("", "Schedule")), console.width))


def _prediction_of_written_plan(label: str, plan: Plan) -> tuple[str, ...]:
    """A row of the table: what is predicted of a plan."""
    from smpc.report.format import count, format_bytes, format_time, schedule_name
    from smpc.report.memory_curve import memory_curves
    from smpc.report.predict import plan_timeline

    summary = plan.schedule
    return (
        label,
        f"{schedule_name(summary.name)}, {count(summary.num_microbatches, 'microbatch', 'es')}, "
        f"{summary.active_microbatches} active",
        format_time(summary.step_time),
        format_time(summary.step_time / summary.num_microbatches),
        f"{summary.bubble_fraction:.1%}",
        format_bytes(max(curve.peak_bytes for curve in memory_curves(plan, plan_timeline(plan)))),
    )
