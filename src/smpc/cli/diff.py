"""`smpc diff`: what changed between two plans."""

from __future__ import annotations

from typing import Annotated

import typer

from smpc.cli.plans import load_plan


def diff_command(
    before: Annotated[
        str, typer.Argument(metavar="A", help="A plan.json, or the folder it is in.", show_default=False)
    ],
    after: Annotated[str, typer.Argument(metavar="B", help="Another.", show_default=False)],
) -> None:
    """Show what changed between two plans: modules, memory, time, messages, objective, schedule.

    Exit status: 0 if the plans are equal, 1 if they differ, 2 if one cannot be read.
    """
    from rich.text import Text

    from smpc.report.compare import compare
    from smpc.report.format import printable
    from smpc.report.tables import TextTable
    from smpc.report.terminal import stdout_console, text_table

    changes = compare(load_plan(before), load_plan(after))
    if not changes:
        return
    headers = ("Where", "What", "Before", "After", "Change")
    rows = []
    where = ""
    for change in changes:
        shown = change.where if change.where != where else ""  # a name stands at the first of its lines
        where = change.where
        rows.append((shown, change.what, change.before, change.after, change.amount))
    console = stdout_console()
    console.print(Text(printable(f"{before} -> {after}"), style="bold"))
    console.print()
    console.print(text_table(TextTable(headers, tuple(rows), left=headers[:4]), console.width))
    raise typer.Exit(1)
