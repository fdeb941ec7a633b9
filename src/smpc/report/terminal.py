"""A plan as a person reads it: tables of stages, memory and messages, the objective, and the pipeline drawn over time.

    print_report(plan, timeline)     on stdout, in colour if that is a terminal, else plain text 100 columns wide
    render(plan, timeline, width)    the same as a rich renderable, for other consoles
    print_changes(a, b, changes)     what changed between two plans

Modules of a stage are shown in order of execution, shortened: `transformer.{wte, wpe}, transformer.h.0-4`. Sizes are
binary (1 MiB = 2^20 bytes), times are predictions for the device that the cost model assumes; FLOPs, times and messages
are per microbatch. Names come from the user's model: they are shown literally, never read as markup, and unprintable
characters are escaped.

`drawing` is the timeline in characters, as wide as the console allows. It takes the wide form of `smpc.codegen.simulate.timeline_text` if
every event can be seen in it, otherwise the compact one, in which a column is a slice of time:

    rank 0  0-1-....0===1===
    rank 1  ..0-0===1-1===..
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from smpc.codegen.program import Op
from smpc.codegen.simulate import Timeline, timeline_text
from smpc.partitioner.graph.plan import Plan
from smpc.report.compare import MODULES, Change
from smpc.report.format import count, printable
from smpc.report.tables import TextTable, memory_table, message_table, stage_table, summary, title

PLAIN_WIDTH = 100  # columns when the output is not a terminal


Lines = Sequence[tuple[str, str]]  # label, text


def print_report(
    plan: Plan, timeline: Timeline | None = None, console: Console | None = None, more: Lines = ()
) -> None:
    """Print the report of a plan; its step is drawn if the timeline is given. `more`: lines below the summary."""
    console = console or stdout_console()
    console.print(render(plan, timeline, console.width, more))


def stdout_console() -> Console:
    """A console on stdout that reads no markup."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def render(plan: Plan, timeline: Timeline | None = None, width: int = PLAIN_WIDTH, more: Lines = ()) -> RenderableType:
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
        labelled((*summary(plan), *more)),
        *(_drawn_step(drawing(timeline, width)) if timeline is not None else ()),
    )


def print_changes(before: str, after: str, changes: Sequence[Change], console: Console | None = None) -> None:
    """Print what changed between two plans of these names: the plan, the modules that moved, stages and edges."""
    console = console or stdout_console()
    console.print(Text(printable(f"{before} -> {after}"), style="bold"))
    for are_modules, found in itertools.groupby(changes, key=lambda change: change.where == MODULES):
        group = list(found)
        console.print(Text())
        console.print(text_table(_moves_on_terminal(group) if are_modules else _change_table(group), console.width))


def _moves_on_terminal(changes: Sequence[Change]) -> TextTable:
    headers = ("Modules", "Before", "After")
    return TextTable(headers, tuple((change.what, change.before, change.after) for change in changes), left=headers)


def _change_table(changes: Sequence[Change]) -> TextTable:
    """The changes between plans as a table."""
    headers = ("", "What", "Before", "After", "Change")
    rows = []
    last = ""
    for change in changes:
        where = change.where if change.where != last else ""  # a name is on the first of its lines
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


def _drawn_step(found: TerminalDrawing) -> list[Text]:
    """The picture of a step in the terminal."""
    return [
        Text(),
        Text.assemble((f"{'One step':<11}", "bold"), found.legend),
        *(_coloured_line(line, found) for line in found.short.splitlines()),
        *([Text(f"{'':<11}{found.more}")] if found.more else []),
    ]


def _coloured_line(line: str, found: TerminalDrawing) -> Text:
    """A line of the picture in colours."""
    margin, drawn = line[: line.index("  ")], Text(line[line.index("  ") :])
    drawn.highlight_regex(found.forward, "cyan")
    drawn.highlight_regex(found.backward, "green")
    result = Text.assemble(margin, drawn)
    result.no_wrap = True
    return result


_MOST_ROWS = 16  # ranks that are drawn
_STROKES = {Op.FORWARD: "-", Op.BACKWARD: "=", Op.WEIGHT: "~"}


@dataclass(frozen=True, slots=True)
class TerminalDrawing:
    """Lines of text, what they mean, and regular expressions that find forwards and backwards in them.

    W, the deferred part of a backward, is found as a backward.
    """

    legend: str
    text: str
    forward: str
    backward: str
    more: str = ""  # what is not seen in it

    @property
    def short(self) -> str:
        """The text without the ranks in the middle, if there are many."""
        lines = self.text.splitlines()
        hidden = len(lines) - _MOST_ROWS
        if hidden <= 0:
            return self.text
        kept = [*lines[: _MOST_ROWS // 2], f"  (+{count(hidden, 'rank')})", *lines[-_MOST_ROWS // 2 :]]
        return "\n".join(kept) + "\n"


def drawing(timeline: Timeline, width: int) -> TerminalDrawing:
    """The timeline in at most `width` columns."""
    deferred = any(event.action.op is Op.WEIGHT for event in timeline.events)
    text = timeline_text(timeline, max_columns=width)
    if max(map(len, text.splitlines())) <= width and _is_faithful(timeline, text):
        more = ", W0: its rest" if deferred else ""
        legend = f"F0: forward of microbatch 0, B0: its backward{more}, --: it goes on, ..: idle"
        return TerminalDrawing(legend, text, forward=r"\d*F\d+ *( --+)*", backward=r"\d*[BW]\d+ *( --+)*")
    more = ", 0~~: its rest" if deferred else ""
    legend = f"0--: forward of microbatch 0 (last digit), 0==: its backward{more}, .: idle"
    rows = compact_timeline(timeline, width)
    events = max(sum(event.rank == rank for event in timeline.events) for rank in range(timeline.num_ranks))
    is_whole = timeline.num_ranks <= _MOST_ROWS and 2 * events <= width
    hidden = (
        ""
        if is_whole
        else f"{events} parts of a step on a rank, not all of them seen here; report.html in --out DIR has all"
    )
    return TerminalDrawing(legend, rows, forward=r"\d-*", backward=r"\d[=~]+", more=hidden)


def _is_faithful(timeline: Timeline, text: str) -> bool:
    """Whether every event has a cell of its own: short ones vanish where columns had to be widened."""
    return sum(text.count(letter) for letter in "FBW") == len(timeline.events)


def compact_timeline(timeline: Timeline, width: int) -> str:
    """A timeline as a row of single characters for each rank, at most `width` columns in all.

    An event starts with the last digit of its microbatch and goes on as `-` (forward), `=` (backward) or `~` (the deferred
    part of one); `.` is idle.
    An event shorter than a column may be hidden by its neighbour.

    rank 0  0-1-....0===1===
    rank 1  ..0-0===1-1===..
    """
    margin = len(f"rank {timeline.num_ranks - 1}  ")
    num_columns = max(1, width - margin)
    scale = num_columns / timeline.makespan if timeline.makespan else 0.0
    rows = [["."] * num_columns for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        first = min(round(event.start * scale), num_columns - 1)
        last = max(first + 1, round(event.end * scale))
        rows[event.rank][first:last] = _STROKES[event.action.op] * (last - first)
        rows[event.rank][first] = str(event.action.microbatch % 10)
    return "".join(f"{f'rank {rank}':<{margin}}{''.join(row)}\n" for rank, row in enumerate(rows))
