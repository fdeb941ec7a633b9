"""The changes between two plans.

    changes = compare(before, after)       () if and only if the plans are equal
    changes[0]                             Change("stage 0", "peak memory", "88.1 MiB", "92.0 MiB", "+4.4%")

Every field of a plan is covered, so nothing that changed goes unnamed. Modules are followed by name: a change whose
`where` is MODULES says from which stages to which the modules in `what` moved. Stages and edges that only one plan has
are listed as such.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smpc.partitioner.graph.plan import INPUTS, Edge, Plan, Stage
from smpc.report.format import compress, count, format_bytes, format_number, format_time, printable, schedule_name

_ABSENT = "-"
_MAX_MODULES = 12  # pieces of a list of modules that is shown
MODULES = "modules"  # where a module moved
_Format = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: where, what, the two values as text, and how much if they are numbers."""

    where: str
    what: str
    before: str
    after: str
    amount: str = ""


def compare(before: Plan, after: Plan) -> tuple[Change, ...]:
    """All differences, the whole plan's first, then modules, stages and edges."""
    if before.fingerprint == after.fingerprint:
        return ()
    return (
        *_plan_changes(before, after),
        *_moved_nodes(before, after),
        *_moved_modules(before, after),
        *_stage_changes(before, after),
        *_edge_changes(before, after),
    )


# ---- the plan as a whole


def _compared_text(value: object) -> str:
    return printable(str(value)) or '""'


def _compared_fraction(value: float) -> str:
    return f"{value:.2%}"


_PLAN_FORMATS: Mapping[str, _Format] = {
    "trace_fingerprint": lambda value: _compared_text(value)[:16],
    "shared_parameters": lambda value: ", ".join(printable(item.name) for item in value) or "none",
    "step_time": format_time,
    "link_latency": format_time,
    "link_bandwidth": lambda value: f"{format_bytes(value)}/s",
    "host_link": lambda value: f"{format_bytes(value.rate)}/s" if value else "none",
    "rate": lambda value: f"{format_bytes(value)}/s",
    "latency": format_time,
    "memory_limit": lambda value: format_bytes(value) if value else "none",
    "bubble_fraction": _compared_fraction,
    "gap": _compared_fraction,
    "bottleneck": lambda value: f"{value:.4f}",
    "lower_bound": lambda value: f"{value:.4f}",
    "memory_weight": lambda value: f"{value:g}",
}
_SCHEDULE_FORMATS: Mapping[str, _Format] = {**_PLAN_FORMATS, "name": schedule_name}
_ELSEWHERE = ("stages", "edges", "assignment")  # fields that have sections of their own


def _plan_changes(before: Plan, after: Plan) -> Iterator[Change]:
    """Changes of what plans say as a whole."""
    if len(before.stages) != len(after.stages):
        yield _field_change("plan", "stages", len(before.stages), len(after.stages), str)
    for field in dataclasses.fields(Plan):
        if field.name in _ELSEWHERE:
            continue
        old, new = getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(old) and dataclasses.is_dataclass(new):
            formats = _SCHEDULE_FORMATS if field.name == "schedule" else _PLAN_FORMATS
            yield from _field_changes(field.name, old, new, formats)
        elif old != new:
            yield _field_change("plan", field.name, old, new, _PLAN_FORMATS.get(field.name, _compared_text))


def _field_changes(where: str, before: Any, after: Any, formats: Mapping[str, _Format]) -> Iterator[Change]:
    """The fields that differ between two values of one dataclass; of lists of names, how many left and came."""
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new:
            continue
        if isinstance(old, tuple):
            gone, come = (sum(name not in set(other) for name in names) for names, other in ((old, new), (new, old)))
            amount = f"-{gone} +{come}" if gone or come else "reordered"
            yield Change(where, field.name, str(len(old)), str(len(new)), amount)
        else:
            yield _field_change(where, field.name, old, new, formats.get(field.name, _compared_text))


def _field_change(where: str, what: str, old: Any, new: Any, form: _Format) -> Change:
    """A change of a field, formatted."""
    amount = ""
    if form is _compared_fraction:
        amount = f"{100 * (new - old):+.2f} points"
    elif isinstance(old, (int, float)) and isinstance(new, (int, float)):
        amount = f"{new / old - 1:+.1%}" if old else ""
    before, after = form(old), form(new)
    if before == after:  # they differ in digits that are not shown
        before, after = _compared_text(old), _compared_text(new)
    return Change(where, what, before, after, amount)


def _some_compared_names(names: Sequence[str]) -> str:
    pieces = compress(names)
    more = f", and {len(pieces) - _MAX_MODULES} more" if len(pieces) > _MAX_MODULES else ""
    return printable(", ".join(pieces[:_MAX_MODULES]) + more) or _ABSENT


# ---- modules and nodes


def _moved_modules(before: Plan, after: Plan) -> Iterator[Change]:
    """Modules by the stages they left and reached, in order of execution; the finest that either plan names."""
    old, new = _stages_of_modules(before), _stages_of_modules(after)
    names = list(dict.fromkeys([*old, *new]))
    parents = {parent for name in names for parent in _ancestors(name)}
    moves: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if name not in parents:
            move = _where_compared(name, old), _where_compared(name, new)
            if move[0] != move[1]:
                moves.setdefault(move, []).append(name)
    for (source, target), found in moves.items():
        yield Change(MODULES, _some_compared_names(found), source, target)


def _stages_of_modules(plan: Plan) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for stage in plan.stages:
        for module in stage.modules:
            found.setdefault(module, []).append(stage.index)
    return found


def _ancestors(name: str) -> list[str]:
    """a.b.c -> a.b, a, and the model itself, whose name is empty."""
    if not name:
        return []
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) - 1, -1, -1)]


def _where_compared(name: str, stages_of: Mapping[str, list[int]]) -> str:
    """The stages of a module or of the smallest listed module around it."""
    for candidate in (name, *_ancestors(name)):
        if candidate in stages_of:
            stages = sorted(set(stages_of[candidate]))
            return f"stage {', '.join(map(str, stages))}"
    return "cut inside"  # no whole module has it


def _moved_nodes(before: Plan, after: Plan) -> Iterator[Change]:
    old, new = dict(before.assignment), dict(after.assignment)
    if before.assignment == after.assignment:
        return
    moved = sum(old[name] != new[name] for name in old if name in new)
    gone, come = sum(name not in new for name in old), sum(name not in old for name in new)
    amount = f"{moved} moved" + (f", -{gone} +{come}" if gone or come else "")
    yield Change("nodes", "assignment", f"{len(old)} nodes", f"{len(new)} nodes", amount)


# ---- stages and edges

_STAGE_FORMATS: Mapping[str, _Format] = {
    "num_parameters": format_number,
    "parameter_bytes": format_bytes,
    "gradient_bytes": format_bytes,
    "optimizer_bytes": format_bytes,
    "activation_bytes_per_microbatch": format_bytes,
    "peak_memory_bytes": format_bytes,
    "buffer_bytes": format_bytes,
    "communication_bytes": format_bytes,
    "transient_bytes": lambda value: (
        f"{format_bytes(-value)} of gradients missing" if value < 0 else format_bytes(value)
    ),
    "forward_flops": format_number,
    "forward_time": format_time,
    "backward_time": format_time,
    "cost": lambda value: f"{value:.4f}",
}
_TITLES = {
    "num_parameters": "parameters",
    "num_in_flight": "in flight",
    "activation_bytes_per_microbatch": "activations",
}
_TITLES |= {"peak_memory_bytes": "peak memory"}
# Fields left out if parameters moved, since they change with them.
_SECONDARY = ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "forward_flops", "transient_bytes")


def _stage_changes(before: Plan, after: Plan) -> Iterator[Change]:
    """Changes of stages, and stages that are new or gone."""
    for index in range(max(len(before.stages), len(after.stages))):
        where = f"stage {index}"
        if index >= len(before.stages):
            yield Change(where, "", _ABSENT, _compared_stage(after.stages[index]), "new")
        elif index >= len(after.stages):
            yield Change(where, "", _compared_stage(before.stages[index]), _ABSENT, "gone")
        else:
            yield from _changes_of_stage(where, before.stages[index], after.stages[index])


def _changes_of_stage(where: str, before: Stage, after: Stage) -> Iterator[Change]:
    """Changes of one stage."""
    moved = before.num_parameters != after.num_parameters
    for change in _field_changes(where, before, after, _STAGE_FORMATS):
        if not (moved and change.what in _SECONDARY):
            yield dataclasses.replace(change, what=_TITLES.get(change.what, change.what))


def _compared_stage(stage: Stage) -> str:
    return f"rank {stage.rank}, {count(len(stage.modules), 'module')}, peak {format_bytes(stage.peak_memory_bytes)}"


def _edge_changes(before: Plan, after: Plan) -> Iterator[Change]:
    """Changes of edges, and edges that are new or gone."""
    old = {(edge.source, edge.destination): edge for edge in before.edges}
    new = {(edge.source, edge.destination): edge for edge in after.edges}
    for key in sorted({**old, **new}):
        where = f"edge {'inputs' if key[0] == INPUTS else key[0]} to {key[1]}"
        if key not in old:
            yield Change(where, "", _ABSENT, _carried_when_compared(new[key]), "new")
        elif key not in new:
            yield Change(where, "", _carried_when_compared(old[key]), _ABSENT, "gone")
        elif old[key] != new[key]:
            yield _change_of_edge(where, old[key], new[key])


def _change_of_edge(where: str, before: Edge, after: Edge) -> Change:
    """The change of one edge."""
    total = [edge.num_bytes + edge.gradient_bytes for edge in (before, after)]
    if total[0] != total[1]:
        amount = f"{total[1] / total[0] - 1:+.1%}" if total[0] else "new"
    else:
        amount = "other values" if before.values != after.values else "renumbered"
    return Change(where, "", _carried_when_compared(before), _carried_when_compared(after), amount)


def _carried_when_compared(edge: Edge) -> str:
    back = f", {format_bytes(edge.gradient_bytes)} back" if edge.gradient_bytes else ""
    return f"{count(len(edge.values), 'value')}, {format_bytes(edge.num_bytes)}{back}"
