"""`smpc diff`: what changed between two plans."""

from __future__ import annotations

from typing import Annotated

import typer


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
