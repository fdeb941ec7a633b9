"""A plan as a person reads it: tables of stages, memory and messages, the objective, and the pipeline drawn over time.

    print_report(plan, timeline)     on stdout, in colour if that is a terminal, else plain text 100 columns wide
    render(plan, timeline, width)    the same as a rich renderable, for other consoles
    print_changes(a, b, changes)     what changed between two plans

Modules of a stage are shown in order of execution, shortened: `transformer.{wte, wpe}, transformer.h.0-4`. Sizes are
binary (1 MiB = 2^20 bytes), times are predictions for the device that the cost model assumes; FLOPs, times and
messages are those of one microbatch. Names come from the user's model: they are shown as they are, never read
as markup, and unprintable characters are escaped.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from smpc.codegen.simulate import Timeline
from smpc.partitioner.plan import Plan
from smpc.report.compare import MODULES, Change
from smpc.report.drawing import Drawing, drawing
from smpc.report.format import printable
from smpc.report.tables import TextTable, memory_table, message_table, stage_table, summary, title

PLAIN_WIDTH = 100  # columns when the output is not a terminal


def print_report(plan: Plan, timeline: Timeline | None = None, console: Console | None = None) -> None:
    """Print the report of a plan; its step is drawn if the timeline is given."""
    console = console or stdout_console()
    console.print(render(plan, timeline, console.width))


def stdout_console() -> Console:
    """A console on stdout that reads no markup."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def render(plan: Plan, timeline: Timeline | None = None, width: int = PLAIN_WIDTH) -> RenderableType:
    """The report of a plan, for a console of that width."""
    return Group(
        Text(title(plan), style="bold"),
        Text(),
        text_table(stage_table(plan), width),
        Text(),
        text_table(memory_table(plan), width),
        Text(),
        text_table(message_table(plan), width),
        Text(),
        labelled(summary(plan)),
        *(_drawn(drawing(timeline, width)) if timeline is not None else ()),
    )


def print_changes(before: str, after: str, changes: Sequence[Change], console: Console | None = None) -> None:
    """Print what changed between two plans of these names: the plan, the modules that moved, stages and edges."""
    console = console or stdout_console()
    console.print(Text(printable(f"{before} -> {after}"), style="bold"))
    for are_modules, found in itertools.groupby(changes, key=lambda change: change.where == MODULES):
        group = list(found)
        console.print(Text())
        console.print(text_table(_moves(group) if are_modules else _values(group), console.width))


def _moves(changes: Sequence[Change]) -> TextTable:
    headers = ("Modules", "Before", "After")
    return TextTable(headers, tuple((change.what, change.before, change.after) for change in changes), left=headers)


def _values(changes: Sequence[Change]) -> TextTable:
    headers = ("", "What", "Before", "After", "Change")
    rows = []
    last = ""
    for change in changes:
        where = change.where if change.where != last else ""  # a name stands at the first of its lines
        last = change.where
        rows.append((where, change.what.replace("_", " "), change.before, change.after, change.amount))
    return TextTable(headers, tuple(rows), left=headers[:4])


def text_table(content: TextTable, width: int = PLAIN_WIDTH) -> Table:
    """A table for a console of that width."""
    padding = (0, 1) if width >= PLAIN_WIDTH else (0, 0)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=padding)
    for header in content.headers:
        if header in content.left:
            table.add_column(Text(header), overflow="fold")
        else:
            table.add_column(Text(header), justify="right", no_wrap=True)
    for row in content.rows:
        table.add_row(*map(Text, row))
    if content.totals:
        table.add_row(*map(Text, content.totals), style="bold")
    return table


def labelled(lines: tuple[tuple[str, str], ...]) -> Table:
    """A line, or a few, for each label."""
    grid = Table.grid(padding=(0, 2))
    for label, text in lines:
        grid.add_row(Text(label, style="bold"), Text(text))
    return grid


def _drawn(found: Drawing) -> list[Text]:
    return [
        Text(),
        Text.assemble((f"{'One step':<11}", "bold"), found.legend),
        *(_coloured(line, found) for line in found.text.splitlines()),
    ]


def _coloured(line: str, found: Drawing) -> Text:
    margin, drawn = line[: line.index("  ")], Text(line[line.index("  ") :])
    drawn.highlight_regex(found.forward, "cyan")
    drawn.highlight_regex(found.backward, "green")
    result = Text.assemble(margin, drawn)
    result.no_wrap = True
    return result
