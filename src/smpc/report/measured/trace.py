"""The ranks' records in Chrome's trace event format, above the predicted step: for https://ui.perfetto.dev.

    measured_json(plan, records)        # the content of trace.json; records: one `smpc.observe.observer.RankRecord` of each rank

Process 1 is what was measured: a track for each rank, a slice for each step and inside it one for each instruction, an arrow from each
send to the receive that it ends. Process 0 is the predicted step as in timeline.json, moved to the first forward of the first recorded
step. Times are microseconds from the first recorded step on, on the clock of rank 0. An arrow tells how long its receiver waited for a
message on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from smpc.codegen.program import Instruction, Op
from smpc.observe.observer import BUSY, RankRecord
from smpc.partitioner.graph.plan import Plan
from smpc.report.format import printable
from smpc.report.measured.comparison import compare
from smpc.report.measured.steps import messages_of, pipeline_steps
from smpc.report.perfetto import predicted_events, trace_json
from smpc.report.predict import plan_timeline

_PROCESS = 1
_FIRST_ARROW = 1 << 32  # arrows of the predicted step have small numbers
_CATEGORIES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "deferred backward"}


def measured_json(plan: Plan | None, records: Sequence[RankRecord]) -> str:
    """The trace. Without a plan (a model that is not cut) it has the steps alone."""
    records = sorted(records, key=lambda record: record.rank)
    begins = [step.start + record.offset for record in records for step in record.steps]
    origin = min(begins, default=0)
    events = [*_measured_names(plan, records), *_measured_slices(records, origin)]
    other: dict[str, Any] = {"kind": "measured", "ranks": [record.rank for record in records]}
    if plan is not None:
        arrows = [*_measured_arrows(plan, records, origin)]
        events += arrows
        found = compare(plan, records).messages
        other |= {"plan": plan.fingerprint, "hidden_communication": None if found is None else found.hidden}
        computed = [
            span.start + record.offset
            for record in records
            for step in record.steps
            for span in step.spans
            if step.training and step.program == 0 and span.instruction.op in BUSY
        ]
        shift = (min(computed, default=origin) - origin) / 1e3
        events = [*_moved_in_measured_trace(predicted_events(plan, plan_timeline(plan)), shift), *events]
    return trace_json(events, other)


def _moved_in_measured_trace(events: Iterable[dict[str, Any]], shift: float) -> Iterator[dict[str, Any]]:
    for event in events:
        yield {**event, "ts": event["ts"] + shift} if "ts" in event else event


def _measured_names(plan: Plan | None, records: Sequence[RankRecord]) -> Iterator[dict[str, Any]]:
    """The names of the ranks in the trace."""
    model = "" if plan is None else f"{printable(plan.model_class.rpartition('.')[2])}, "
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": f"{model}measured"}}
    for record in records:
        where = {"ph": "M", "pid": _PROCESS, "tid": record.rank}
        yield {**where, "name": "thread_name", "args": {"name": f"rank {record.rank}"}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": record.rank}}


def _measured_slices(records: Sequence[RankRecord], origin: int) -> Iterator[dict[str, Any]]:
    """The steps and spans in the trace."""
    for record in records:
        where = {"ph": "X", "pid": _PROCESS, "tid": record.rank}
        for step in record.steps:
            begin = step.start + record.offset - origin
            times = {"ts": begin / 1e3, "dur": (step.end - step.start) / 1e3}
            yield {**where, **times, "name": f"step {step.step}", "cat": "step", "args": {"training": step.training}}
            for span in step.spans:
                start = span.start + record.offset - origin
                yield {
                    **where,
                    "ts": start / 1e3,
                    "dur": (span.end - span.start) / 1e3,
                    "name": _span_name_in_measured_trace(span.instruction),
                    "cat": _CATEGORIES.get(span.instruction.op, "communication"),
                    "args": {"instruction": str(span.instruction), "step": step.step},
                }


def _span_name_in_measured_trace(instruction: Instruction) -> str:
    """As in the predicted step, with the number of the microbatch: `F3`, `RECV 3`."""
    if instruction.op in BUSY:
        return f"{instruction.op}{instruction.microbatch}"
    return str(instruction.op) if instruction.microbatch < 0 else f"{instruction.op} {instruction.microbatch}"


def _measured_arrows(plan: Plan, records: Sequence[RankRecord], origin: int) -> Iterator[dict[str, Any]]:
    """The messages in the trace, as arrows."""
    ranks = {(record.replica, record.pipeline_rank): record.rank for record in records}
    number = _FIRST_ARROW
    for step in pipeline_steps(records, plan.pipeline_parallel_degree, training_only=False):
        for message in messages_of(step):
            args: dict[str, float] = {"waited_us": message.waited / 1e3}
            if step.program == 0:  # other signatures have messages of other sizes
                edge = plan.edges[message.instruction.edge]
                is_gradient = message.instruction.op is Op.SEND_GRAD
                args["bytes"] = edge.gradient_bytes if is_gradient else edge.num_bytes
            common = {"pid": _PROCESS, "id": number, "cat": "message", "name": "message", "args": args}
            source, target = ranks[step.replica, message.source], ranks[step.replica, message.destination]
            # An arrow belongs to the slice around its end: the start of the send, the end of the receive.
            came = max(message.received - 1, message.receive)
            yield {"ph": "s", "tid": source, "ts": (message.sent - origin) / 1e3, **common}
            yield {"ph": "f", "bp": "e", "tid": target, "ts": (came - origin) / 1e3, **common}
            number += 1
