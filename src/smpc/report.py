"""A plan as a person reads it: tables of stages and memory, the objective, and the pipeline drawn over time.

    print_report(plan, timeline)     on stdout, in colour if that is a terminal, else plain text 100 columns wide
    render(plan, timeline, width)    the same as a rich renderable, for other consoles

Modules of a stage are shown in order of execution, shortened: `transformer.{wte, wpe}, transformer.h.0-4`. Sizes are
binary (1 MiB = 2^20 bytes), times are predictions for the device that the cost model assumes; FLOPs, times and
messages are those of one microbatch. Names come from the user's model: they are shown as they are, never read
as markup, and unprintable characters are escaped.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from smpc.codegen.program import Op
from smpc.codegen.simulate import Timeline, timeline_text
from smpc.partitioner.plan import Plan, Stage

PLAIN_WIDTH = 100  # columns when the output is not a terminal
_MAX_PIECES = 6  # of a stage's module list


def print_report(plan: Plan, timeline: Timeline | None = None, console: Console | None = None) -> None:
    """Print the report of a plan; its step is drawn if the timeline is given."""
    if console is None:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        console = Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
    console.print(render(plan, timeline, console.width))


def render(plan: Plan, timeline: Timeline | None = None, width: int = PLAIN_WIDTH) -> RenderableType:
    """The report of a plan, for a console of that width."""
    schedule = plan.schedule
    title = (
        f"{printable(plan.model_class.rpartition('.')[2])}: {_count(len(plan.stages), 'stage')} on "
        f"{_count(plan.pipeline_parallel_degree, 'rank')}, {_count(schedule.num_microbatches, 'microbatch', 'es')}"
    )
    return Group(
        Text(title, style="bold"),
        Text(),
        _stage_table(plan, width),
        Text(),
        _memory_table(plan, width),
        Text(),
        _summary(plan),
        *(_drawing(timeline, width) if timeline is not None else ()),
    )


def compress(modules: Sequence[str]) -> tuple[str, ...]:
    """Module names, shorter: h.0, h.1, h.2 -> h.0-2; neighbours of one parent -> parent.{first, second}."""
    groups: list[tuple[str, list[tuple[str, str]]]] = []  # parent, runs of its children: (first, last)
    for name in modules:
        parent, _, child = name.rpartition(".")
        if not groups or groups[-1][0] != parent:
            groups.append((parent, []))
        runs = groups[-1][1]
        if runs and child.isdecimal() and runs[-1][1].isdecimal() and int(child) == int(runs[-1][1]) + 1:
            runs[-1] = (runs[-1][0], child)
        else:
            runs.append((child, child))
    pieces: list[str] = []
    for parent, runs in groups:
        children = [first if first == last else f"{first}-{last}" for first, last in runs]
        if not parent:
            pieces += [child or "(the whole model)" for child in children]
        else:
            pieces.append(f"{parent}.{children[0] if len(children) == 1 else '{' + ', '.join(children) + '}'}")
    return tuple(pieces)


def printable(text: str) -> str:
    """The text with control characters and the like as escapes, so that it cannot steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def format_bytes(num_bytes: float) -> str:
    """1536 -> `1.5 KiB`."""
    return _scaled(num_bytes, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024)


def format_number(number: float) -> str:
    """12_345_678 -> `12.3 M`; under a thousand as it is."""
    return _scaled(number, ("", "K", "M", "G", "T", "P", "E"), 1000)


def format_time(seconds: float) -> str:
    """0.00123 -> `1.23 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError(seconds)


def _scaled(value: float, units: Sequence[str], base: int) -> str:
    index = 0
    while value >= base and index < len(units) - 1:
        value /= base
        index += 1
    text = f"{value:.0f}" if index == 0 or value >= 100 else f"{value:.1f}"
    return f"{text} {units[index]}".rstrip()


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _table(width: int, *headers: str, left: Sequence[str] = ()) -> Table:
    padding = (0, 1) if width >= PLAIN_WIDTH else (0, 0)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=padding)
    for header in headers:
        if header in left:
            table.add_column(Text(header), overflow="fold")
        else:
            table.add_column(Text(header), justify="right", no_wrap=True)
    return table


def _row(table: Table, *cells: str, style: str = "") -> None:
    table.add_row(*(Text(cell) for cell in cells), style=style)


def _stage_table(plan: Plan, width: int) -> Table:
    table = _table(
        width, "Stage", "Rank", "Modules", "Parameters", "FLOPs", "Forward", "Backward", "Cost", left=("Modules",)
    )
    total = sum(stage.cost for stage in plan.stages)
    for stage in plan.stages:
        _row(
            table,
            str(stage.index),
            str(stage.rank),
            _modules(stage),
            format_number(stage.num_parameters),
            format_number(stage.forward_flops),
            format_time(stage.forward_time),
            format_time(stage.backward_time),
            f"{stage.cost / total:.1%}" if total else "-",
        )
    _row(
        table,
        "all",
        "",
        "",
        format_number(sum(stage.num_parameters for stage in plan.stages)),
        format_number(sum(stage.forward_flops for stage in plan.stages)),
        format_time(sum(stage.forward_time for stage in plan.stages)),
        format_time(sum(stage.backward_time for stage in plan.stages)),
        "",
        style="bold",
    )
    return table


def _memory_table(plan: Plan, width: int) -> Table:
    table = _table(width, "Stage", "Weights", "Gradients", "Optimizer", "Activations", "Peak", "Receives", "Sends")
    for stage in plan.stages:
        _row(
            table,
            str(stage.index),
            format_bytes(stage.parameter_bytes),
            format_bytes(stage.gradient_bytes),
            format_bytes(stage.optimizer_bytes),
            f"{stage.num_in_flight} x {format_bytes(stage.activation_bytes_per_microbatch)}",
            format_bytes(stage.peak_memory_bytes),
            format_bytes(sum(edge.num_bytes for edge in plan.edges if edge.destination == stage.index)),
            format_bytes(sum(edge.num_bytes for edge in plan.edges if edge.source == stage.index)),
        )
    _row(
        table,
        "all",
        format_bytes(sum(stage.parameter_bytes for stage in plan.stages)),
        format_bytes(sum(stage.gradient_bytes for stage in plan.stages)),
        format_bytes(sum(stage.optimizer_bytes for stage in plan.stages)),
        "",
        f"<= {format_bytes(max(stage.peak_memory_bytes for stage in plan.stages))}",
        "",
        "",
        style="bold",
    )
    return table


def _modules(stage: Stage) -> str:
    pieces = compress(stage.modules)
    if len(pieces) > _MAX_PIECES:
        pieces = (*pieces[: _MAX_PIECES - 2], f"(+{len(pieces) - _MAX_PIECES + 1})", pieces[-1])
    return printable(", ".join(pieces)) or "(no whole module)"


def _summary(plan: Plan) -> Table:
    """One labelled line for each thing worth knowing about the plan as a whole."""
    objective, schedule = plan.objective, plan.schedule
    solver = printable(f"{objective.solver}; {objective.note}" if objective.note else objective.solver)
    lines = [
        (
            "Objective",
            f"memory weight {objective.memory_weight:g}, bottleneck {objective.bottleneck:.4f}, no plan below "
            f"{objective.lower_bound:.4f}, gap {objective.gap:.2%} (solver: {solver})",
        ),
        (
            "Schedule",
            f"{printable(schedule.name)}, {_count(schedule.num_microbatches, 'microbatch', 'es')}, at most "
            f"{schedule.active_microbatches} active, bubble {schedule.bubble_fraction:.1%}, "
            f"step {format_time(schedule.step_time)}",
        ),
    ]
    lines += [
        ("Shared", f"{printable(p.name)} on stages {', '.join(map(str, p.stages))}, gradients summed")
        for p in plan.shared_parameters
    ]
    lines.append(("Plan", plan.fingerprint[:16]))
    grid = Table.grid(padding=(0, 2))
    for label, text in lines:
        grid.add_row(Text(label, style="bold"), Text(text))
    return grid


def _drawing(timeline: Timeline, width: int) -> list[Text]:
    """The step drawn over time, in the wide form if every event can be seen in it."""
    legend = "F0: forward of microbatch 0, B0: its backward, --: it goes on, ..: idle"
    text = timeline_text(timeline, max_columns=width)
    if max(map(len, text.splitlines())) <= width and _is_faithful(timeline, text):
        patterns = {"cyan": r"\d*F\d+ *( --+)*", "green": r"\d*B\d+ *( --+)*"}
    else:
        legend = "0--: forward of microbatch 0 (last digit), 0==: its backward, .: idle"
        text = compact_timeline(timeline, width)
        patterns = {"cyan": r"\d-*", "green": r"\d=+"}
    return [
        Text(),
        Text.assemble((f"{'One step':<11}", "bold"), legend),
        *(_coloured(line, patterns) for line in text.splitlines()),
    ]


def _coloured(line: str, patterns: Mapping[str, str]) -> Text:
    margin, drawing = line[: line.index("  ")], Text(line[line.index("  ") :])
    for style, pattern in patterns.items():
        drawing.highlight_regex(pattern, style)
    result = Text.assemble(margin, drawing)
    result.no_wrap = True
    return result


def _is_faithful(timeline: Timeline, text: str) -> bool:
    """Whether every event has a cell of its own: short ones vanish where columns had to be widened."""
    return sum(text.count(letter) for letter in "FB") == len(timeline.events)


def compact_timeline(timeline: Timeline, width: int) -> str:
    """A timeline as a row of single characters for each rank, at most `width` columns in all.

    An event starts with the last digit of its microbatch and goes on as `-` (forward) or `=` (backward); `.` is idle.
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
        rows[event.rank][first:last] = ("-" if event.action.op is Op.FORWARD else "=") * (last - first)
        rows[event.rank][first] = str(event.action.microbatch % 10)
    return "".join(f"{f'rank {rank}':<{margin}}{''.join(row)}\n" for rank, row in enumerate(rows))
