"""The tables of a report as text cells, for the terminal and the page alike.

    stage_table    what each stage runs: modules, parameters, FLOPs, times, share of the objective
    memory_table   where each stage's bytes go; working memory is what the peak holds beyond the rest: messages under way, and
                   what operations need while they run. Of gradients, those that exist at the peak count
    message_table  what each stage receives and sends
    host_lines     what is offloaded, and what that takes
    summary        (label, text) for what is worth knowing about the plan as a whole

FLOPs, times and messages are per microbatch. Names of the user's model are made printable here; escaping for HTML or
rich is the renderer's task.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from smpc.codegen.offload import Copy
from smpc.codegen.program import Op
from smpc.codegen.simulate import Timeline
from smpc.compile.step_breakdown import StepParts
from smpc.partitioner.graph.plan import INPUTS, Plan, Stage
from smpc.report.format import count, format_bytes, format_number, format_time, module_list, printable, schedule_name
from smpc.report.memory_curve import gradients_at_peak, rank_bound, reported_working_bytes


@dataclass(frozen=True, slots=True)
class TextTable:
    """Headers, rows of as many cells, and a last row of totals. Columns named in `left` hold text, others numbers."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    totals: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in (*self.rows, *([self.totals] if self.totals else [])):
            assert len(row) == len(self.headers), f"{len(self.headers)} columns, but {row}"


def title(plan: Plan) -> str:
    """`GPT: 2 stages on 2 ranks, 4 microbatches`."""
    return (
        f"{printable(plan.model_class.rpartition('.')[2])}: {count(len(plan.stages), 'stage')} on "
        f"{count(plan.pipeline_parallel_degree, 'rank')}, {count(plan.schedule.num_microbatches, 'microbatch', 'es')}"
    )


def stage_table(plan: Plan) -> TextTable:
    """Modules, parameters, FLOPs, times and cost of every stage."""
    stages = plan.stages
    total = sum(stage.cost for stage in stages)
    mixed = any(stage.device for stage in stages)  # ranks of several kinds
    rows = tuple(
        (
            str(stage.index),
            str(stage.rank),
            *((printable(stage.device),) if mixed else ()),
            printable(module_list(stage.modules)) or "(no whole module)",
            format_number(stage.num_parameters),
            format_number(stage.forward_flops),
            format_time(stage.forward_time),
            format_time(stage.backward_time),
            f"{stage.cost / total:.1%}" if total else "-",
        )
        for stage in stages
    )
    totals = (
        "all",
        "",
        *(("",) if mixed else ()),
        "",
        format_number(sum(stage.num_parameters for stage in stages)),
        format_number(sum(stage.forward_flops for stage in stages)),
        format_time(sum(stage.forward_time for stage in stages)),
        format_time(sum(stage.backward_time for stage in stages)),
        "",
    )
    device = ("Device",) if mixed else ()
    headers = ("Stage", "Rank", *device, "Modules", "Parameters", "FLOPs", "Forward", "Backward", "Cost")
    return TextTable(headers, rows, totals, left=("Modules", "Device"))


def memory_table(plan: Plan) -> TextTable:
    """Bytes that every stage holds; in the last row, sums, and what no rank exceeds."""
    stages = plan.stages
    headers = ("Stage", "Weights", "Gradients", "Optimizer", "Buffers", "Working", "Activations", "Peak")
    totals = (
        "all",
        format_bytes(sum(stage.parameter_bytes for stage in stages)),
        format_bytes(sum(map(gradients_at_peak, stages))),
        format_bytes(sum(stage.optimizer_bytes for stage in stages)),
        format_bytes(sum(stage.buffer_bytes for stage in stages)),
        "",
        "",
        f"<= {format_bytes(rank_bound(plan))}",
    )
    return TextTable(headers, tuple(_memory_row(stage) for stage in stages), totals)


def _memory_row(stage: Stage) -> tuple[str, ...]:
    return (
        str(stage.index),
        format_bytes(stage.parameter_bytes),
        format_bytes(gradients_at_peak(stage)),
        format_bytes(stage.optimizer_bytes),
        format_bytes(stage.buffer_bytes),
        format_bytes(reported_working_bytes(stage)),
        f"{stage.num_in_flight} x {format_bytes(stage.activation_bytes_per_microbatch)}",
        format_bytes(stage.peak_memory_bytes),
    )


def message_table(plan: Plan) -> TextTable:
    """Bytes that every stage receives and sends for one microbatch, and the gradients that come and go for them."""
    headers = ("Stage", "Receives", "From", "Sends", "To", "Gradients received", "Gradients sent")
    return TextTable(headers, tuple(_message_row(plan, stage) for stage in plan.stages))


def _message_row(plan: Plan, stage: Stage) -> tuple[str, ...]:
    received = [edge for edge in plan.edges if edge.destination == stage.index]
    sent = [edge for edge in plan.edges if edge.source == stage.index]
    return (
        str(stage.index),
        format_bytes(sum(edge.num_bytes for edge in received)),
        ", ".join("inputs" if edge.source == INPUTS else str(edge.source) for edge in received) or "-",
        format_bytes(sum(edge.num_bytes for edge in sent)),
        ", ".join(str(edge.destination) for edge in sent) or "-",
        format_bytes(sum(edge.gradient_bytes for edge in sent)),
        format_bytes(sum(edge.gradient_bytes for edge in received)),
    )


def kernel_lines(plan: Plan) -> tuple[str, ...]:
    """The operations replaced by kernels, and why others are not: `rms_norm at 7 places, from model.layers.0.input_layernorm`."""
    used = [use for use in plan.kernels if not use.reason]
    unused = [use for use in plan.kernels if use.reason]
    lines = [f"{use.op} at {count(use.count, 'place')}, from {use.first}" for use in used]
    for use in unused:
        where = f" at {count(use.count, 'place')}, from {use.first}" if use.count else ""
        lines.append(f"{use.op} not used{where}: {use.reason}")
    return tuple(lines)


def summary(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The objective, the schedule, shared parameters, the fingerprint."""
    objective, schedule = plan.objective, plan.schedule
    solver = printable(f"{objective.solver}; {objective.note}" if objective.note else objective.solver)
    return (
        (
            "Objective",
            f"memory weight {objective.memory_weight:g}, bottleneck {objective.bottleneck:.4f}, no plan below "
            f"{objective.lower_bound:.4f}, gap {objective.gap:.2%} (solver: {solver})",
        ),
        (
            "Schedule",
            f"{schedule_name(schedule.name)}, {count(schedule.num_microbatches, 'microbatch', 'es')}, at most "
            f"{schedule.active_microbatches} active, bubble {schedule.bubble_fraction:.1%}, "
            f"step {format_time(schedule.step_time)}",
        ),
        *(
            ("Shared", f"{printable(p.name)} on stages {', '.join(map(str, p.stages))}, gradients summed")
            for p in plan.shared_parameters
        ),
        *(("Kernels" if i == 0 else "", printable(line)) for i, line in enumerate(kernel_lines(plan))),
        *((("Assumes", printable(f"{plan.device}, {plan.optimizer}")),) if plan.device else ()),
        ("Plan", plan.fingerprint[:16]),
    )


def memory_line(peak: int, limit: int) -> tuple[str, str]:
    """`peak 3.0 GiB of 74.5 GiB`: the most bytes that a rank holds, of what it may."""
    return "Memory", f"peak {format_bytes(peak)} of {format_bytes(limit)}"


def host_lines(plan: Plan, timeline: Timeline) -> tuple[tuple[str, str], ...]:
    """What is offloaded in a step, of the rank that offloads the most: bytes, host memory, and the time that copies add."""
    if not plan.loading_horizon:
        return ()
    if not timeline.copies:
        why = f"no backward of a checkpointed module is more than {plan.loading_horizon + 2} tasks behind its forward"
        if not any(stage.offloaded_bytes_per_microbatch for stage in plan.stages):
            why = "no checkpointed module keeps an activation that can be"
        text = f"nothing is offloaded: {why}"
        return (("Host", text),)
    by_rank = [[copy for copy in timeline.copies if copy.rank == rank] for rank in range(timeline.num_ranks)]
    sent = [sum(copy.num_bytes for copy in copies if copy.op is Op.OFFLOAD) for copies in by_rank]
    rank = sent.index(max(sent))
    copying = sum(copy.end - copy.start for copy in by_rank[rank])
    shown = f"the step is {format_time(timeline.stalled)} longer" if timeline.stalled else "all hidden"
    return (
        (
            "Host",
            f"rank {rank} offloads {format_bytes(sent[rank])} in a step, at most {format_bytes(_most_away(by_rank[rank]))} at once, "
            f"and copies for {format_time(copying)}, out and back: {shown}",
        ),
    )


def _most_away(copies: Sequence[Copy]) -> int:
    """The most bytes of host memory at once: a value takes it from when it starts to leave until it is back."""
    changes = sorted((c.start, c.num_bytes) if c.op is Op.OFFLOAD else (c.end, -c.num_bytes) for c in copies)
    return max(itertools.accumulate(change for _, change in changes))


_PARTS = (
    ("compute", "compute"),
    ("bubble", "bubble"),
    ("waiting", "slowest device"),
    ("tensor", "TP"),
    ("data", "DP"),
    ("context", "CP"),
    ("expert", "EP"),
    ("offload", "offloading"),
    ("optimizer", "optimizer"),
    ("executor", "executor"),
)


_LEAST_SHARE = 0.0005  # of a step, of what is shown: less would read as 0.0%


def step_lines(parts: StepParts, is_assumed: bool = False) -> tuple[tuple[str, str], ...]:
    """How a step's time is spent, and its rate; `is_assumed`: for an assumed device, not for this machine."""
    shares = [
        f"{title} {share:.1%}"
        for name, title in _PARTS
        if parts.total and (share := getattr(parts, name) / parts.total) >= _LEAST_SHARE
    ]
    rate = f"{format_number(parts.rate)} {parts.unit}/s per device, " if parts.amount else ""
    beside = " on a server of 40 cores, not on this machine" if is_assumed else ""
    note = "to predict times of this machine: smpc calibrate --out FILE.toml, then --device FILE.toml"
    return (
        ("Time", f"step {format_time(parts.total)}{beside}: {', '.join(shares)}" if parts.total else "step 0 s"),
        ("Rate", f"{rate}MFU {parts.mfu:.1%} of {count(parts.devices, 'device')}"),
        *((("Note", note),) if is_assumed else ()),
    )
