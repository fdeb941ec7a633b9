"""`smpc diff` and `smpc simulate`: what changed between two plans that were written, and one of them under another schedule."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smpc.partitioner.graph.plan import Plan


def diff_command(
    before: Annotated[
        str, typer.Argument(metavar="A", help="A plan.json, or the folder it is in.", show_default=False)
    ],
    after: Annotated[str, typer.Argument(metavar="B", help="Another.", show_default=False)],
) -> None:
    """Show what changed between two plans: modules, memory, time, messages, objective, schedule.

    Exit status: 0 if the plans are equal, 1 if they differ, 2 if one cannot be read.
    """
    from smpc.cli.plans import load_plan

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
    from smpc.cli.plans import load_plan

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
    from smpc.report.memory import memory_curves
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
