"""`report.html`: a plan as a page that needs nothing else, no network, no other file.

The page has key figures and what other settings would gain, the timeline with its messages and the memory of every rank
(zoom, hover), the tables of the terminal report, the module tree coloured by stage, and the program of every rank. It
follows the reader's light or dark setting, and the tables can be read without JavaScript. Its parts are
page.html, page.css and page.js beside this file.

Names come from the user's model and may be hostile. They reach the page in two ways only: as escaped HTML text, and in one
JSON block whose `<`, `>` and `&` are escaped, from which the script sets text, never HTML. The page's content security
policy then allows the one script and the one style sheet by hash, nothing else. The same plan gives the same bytes.

`module_tree`: the model as a tree of modules, with where each runs and what it costs.

A tree node represents all calls of one module by one parent: a layer that is called twelve times is there once, with the
FLOPs of twelve calls. Parameters that a module and its descendants hold are counted once each, tied ones too, so the
children of a node may add up to more than the node. Modules that are never called (a ModuleList) have no node of their
own: their children are their parent's.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smpc.codegen.program import Op
from smpc.codegen.simulate import Timeline
from smpc.compile.result import Compilation
from smpc.compile.step_breakdown import StepParts
from smpc.partitioner.graph.plan import INPUTS, Plan
from smpc.report.advice import Outlook
from smpc.report.format import (
    LIGHT,
    count,
    format_bytes,
    format_number,
    format_time,
    printable,
    schedule_name,
    stage_hues,
)
from smpc.report.memory_curve import memory_curves
from smpc.report.tables import TextTable, memory_table, message_table, stage_table, summary, title
from smpc.tracer.ir import Trace

_TABLES = {"stage": stage_table, "memory": memory_table, "message": message_table}
_KINDS = {Op.FORWARD: 0, Op.BACKWARD: 1, Op.WEIGHT: 2}  # as KINDS in page.js
_MOST_PROGRAMS, _MOST_CHARACTERS = 64, 2_000_000  # that a page has inside
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def render_page(compilation: Compilation, found: Outlook | None = None) -> str:
    """The text of report.html. `found`: what is said on top of it."""
    plan, timeline = compilation.plan, compilation.timeline()
    strengths = {
        f"{op.name.lower()}_{part}": f"{value:g}" for op in LIGHT for part, value in zip("lc", LIGHT[op], strict=True)
    }
    style, script = _fill_page(_part_of_page("page.css"), strengths), _part_of_page("page.js")
    schedule = plan.schedule
    rank_of = {str(stage.index): stage.rank for stage in plan.stages}
    subtitle = (
        f"{count(len(plan.stages), 'stage')} on {count(plan.pipeline_parallel_degree, 'rank')}, "
        f"{count(schedule.num_microbatches, 'microbatch', 'es')}, schedule {schedule_name(schedule.name)}"
    )
    values = {
        "title": html.escape(title(plan)),
        "model": html.escape(printable(plan.model_class.rpartition(".")[2])),
        "subtitle": html.escape(subtitle),
        "cards": _page_cards(plan, timeline, found),
        "outlook": _outlook_on_page(found),
        "programs": _programs_on_page(compilation),
        **{f"{name}_table": _html_table(table(plan), rank_of) for name, table in _TABLES.items()},
        "summary": "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in summary(plan)),
        "data": _embedded_in_page(_page_data(compilation.trace, plan, timeline)),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
    }
    return _fill_page(_part_of_page("page.html"), values)


def _part_of_page(name: str) -> str:
    return importlib.resources.files("smpc.report").joinpath(name).read_text(encoding="utf-8")


def _fill_page(template: str, values: Mapping[str, str]) -> str:
    """The template with each `{{name}}` replaced, in one pass: values are not searched."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded_in_page(data: Any) -> str:
    """JSON that can be in a script element: it cannot end it, whatever the strings hold."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _page_data(trace: Trace, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """The data that the script draws; seconds and bytes."""
    events: list[list[tuple[float, ...]]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        action = event.action
        events[event.rank].append((action.stage, action.microbatch, _KINDS[action.op], event.start, event.end))
    stage_of_rank = [0] * timeline.num_ranks
    for stage in reversed(plan.stages):
        stage_of_rank[stage.rank] = stage.index
    return {
        "num_ranks": timeline.num_ranks,
        "num_stages": len(plan.stages),
        "step_time": timeline.makespan,
        "hues": stage_hues(len(plan.stages)),
        "edges": [[edge.source, edge.destination] for edge in plan.edges if edge.source != INPUTS],
        "stage_of_rank": stage_of_rank,  # its first, for the colour of its memory
        "events": events,
        "memory": [
            {
                "parts": [curve.parameter_bytes, curve.gradient_bytes, curve.optimizer_bytes, curve.other_bytes],
                "peak": curve.peak_bytes,
                "points": curve.points,
            }
            for curve in memory_curves(plan, timeline)
        ],
        "tree": _module_rows(module_tree(trace, plan)),
    }


def _module_rows(node: ModuleNode) -> list[Any]:
    """A module and all inside of it, as data of the page."""
    return [
        printable(node.name),
        printable(node.class_name.rpartition(".")[2]),
        node.stages,
        node.num_parameters,
        node.forward_flops,
        [_module_rows(child) for child in node.children],
    ]


def _page_cards(plan: Plan, timeline: Timeline, found: Outlook | None) -> str:
    """The cards at the top of the page."""
    stages, objective, schedule = plan.stages, plan.objective, plan.schedule
    costs = [stage.cost for stage in stages]
    highest = max(memory_curves(plan, timeline), key=lambda curve: curve.peak_bytes)
    allowed = "" if found is None else f", of {format_bytes(found.limit)}"
    cards = (
        ("Step", format_time(schedule.step_time if found is None else found.parts.total), "predicted"),
        *(() if found is None else _rates_on_page(found.parts)),
        ("Bubble", f"{schedule.bubble_fraction:.1%}", "of all ranks' time is idle"),
        ("Peak memory", format_bytes(highest.peak_bytes), f"on rank {highest.rank}{allowed}"),
        (
            "Parameters",
            format_number(sum(stage.num_parameters for stage in stages)),
            "replicas counted" if plan.shared_parameters else "in all",
        ),
        ("Balance", f"{max(costs) * len(costs) / sum(costs):.3f}" if sum(costs) else "-", "largest over mean cost"),
        ("Gap", f"{objective.gap:.2%}", "to a proven lower bound"),
    )
    return "".join(
        f'<div class="card"><span class="what">{html.escape(what)}</span><b>{html.escape(value)}</b>'
        f"<span>{html.escape(note)}</span></div>"
        for what, value, note in cards
    )


def _rates_on_page(parts: StepParts) -> Iterator[tuple[str, str, str]]:
    if parts.amount:
        yield f"{parts.unit.capitalize()} per second", format_number(parts.rate), "on each device"
    yield "MFU", f"{parts.mfu:.1%}", f"of the peak of {count(parts.devices, 'device')}"


def _outlook_on_page(found: Outlook | None) -> str:
    """The advice, and how the time is spent."""
    if found is None:
        return ""
    advice = "".join(f"<li>{html.escape(text)}</li>" for text in found.advice)
    change = (
        f"<ol>{advice}</ol>"
        if advice
        else "<p>No other memory weight or schedule that was tried gains 1% of the step.</p>"
    )
    lines = "".join(
        f"<dt>{html.escape(label)}</dt><dd>{html.escape(text)}</dd>"
        for label, text in found.lines()
        if label in ("Time", "Note", "Host")
    )
    return f'<section><div class="head"><h2>What to change</h2></div>{change}<dl>{lines}</dl></section>'


def _programs_on_page(compilation: Compilation) -> str:
    """The program of every rank, folded; of large ones the names of the files that `--out` writes."""
    ranks = range(len(compilation.programs))
    texts = [compilation.rank_source(rank) for rank in ranks] if len(ranks) <= _MOST_PROGRAMS else []
    if not texts or sum(map(len, texts)) > _MOST_CHARACTERS:
        names = "rank_0.py" if len(ranks) == 1 else f"rank_0.py to rank_{len(ranks) - 1}.py"
        return "".join(f'<span id="program-{rank}"></span>' for rank in ranks) + f"<p>{names}, beside this file.</p>"
    return "".join(
        f'<details class="program" id="program-{rank}"><summary>Rank {rank}</summary><pre tabindex="0">{html.escape(text)}</pre></details>'
        for rank, text in zip(ranks, texts, strict=True)
    )


def _html_table(table: TextTable, rank_of: Mapping[str, int]) -> str:
    """A table as HTML."""
    classes = ["left" if header in table.left else "" for header in table.headers]
    attributes = [f' class="{name}"' if name else "" for name in classes]

    def cells(tag: str, texts: tuple[str, ...]) -> str:
        return "".join(
            f"<{tag}{attribute}>{html.escape(text)}</{tag}>" for attribute, text in zip(attributes, texts, strict=True)
        )

    rows = []
    for row in table.rows:
        stage = html.escape(row[0])  # the first column of every table
        link = f'href="#program-{rank_of[row[0]]}" title="The program of rank {rank_of[row[0]]}"'
        chip = f'<td><a class="stage" data-stage="{stage}" {link}>{stage}</a></td>'
        rows.append(f"<tr>{chip}{cells('td', row).partition('</td>')[2]}</tr>\n")
    foot = f"<tfoot><tr>{cells('td', table.totals)}</tr></tfoot>\n" if table.totals else ""
    return (
        f"<table>\n<thead><tr>{cells('th', table.headers)}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody>\n"
        f"{foot}</table>"
    )


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module: `stages` run its operations; parameters are those it holds, FLOPs its forward's for one microbatch."""

    name: str  # its FQN; "" is the model itself
    class_name: str
    stages: tuple[int, ...]
    num_parameters: int
    forward_flops: int
    children: tuple[ModuleNode, ...]


class _Draft:
    """A tree node while calls are still being added to it."""

    def __init__(self, name: str, class_name: str) -> None:
        self.name = name
        self.class_name = class_name
        self.flops = 0
        self.stages: set[int] = set()
        self.children: dict[str, _Draft] = {}


def module_tree(trace: Trace, plan: Plan) -> ModuleNode:
    """The tree of a traced model under its plan."""
    flops = list(itertools.accumulate((node.flops for node in trace.nodes), initial=0))
    assignment = dict(plan.assignment)
    stage_of = [assignment.get(node.name, -1) for node in trace.nodes]
    drafts: list[_Draft] = []
    for call in trace.calls:
        if call.parent < 0:
            draft = _Draft(call.fqn, call.class_name)
        else:
            siblings = drafts[call.parent].children
            draft = siblings.setdefault(call.fqn, _Draft(call.fqn, call.class_name))
        draft.flops += flops[call.last] - flops[call.first]
        draft.stages.update(stage for stage in stage_of[call.first : call.last] if stage >= 0)
        drafts.append(draft)
    return _finished_node(drafts[0], _parameters_below(trace))


def _finished_node(draft: _Draft, parameters: dict[str, int]) -> ModuleNode:
    """A module of the page with everything inside of it."""
    return ModuleNode(
        draft.name,
        draft.class_name,
        tuple(sorted(draft.stages)),
        parameters.get(draft.name, 0),
        draft.flops,
        tuple(_finished_node(child, parameters) for child in draft.children.values()),
    )


def _parameters_below(trace: Trace) -> dict[str, int]:
    """For every module that holds parameters, itself or in its descendants: how many elements, each storage once."""
    found: dict[str, dict[int, int]] = {}
    for index, state in enumerate(trace.state):
        if not state.is_parameter:
            continue
        storage = state.storage if state.storage >= 0 else -1 - index
        for name in state.names:
            parts = name.split(".")
            for depth in range(len(parts)):
                found.setdefault(".".join(parts[:depth]), {})[storage] = state.spec.num_elements
    return {module: sum(elements.values()) for module, elements in found.items()}
