"""Predicted against measured: what a plan promised, and what the ranks that ran it have recorded.

    found = compare(plan, records)      # records: one `smpc.observe.RankRecord` of each rank, of as many replicas as there are
    print(found)

Terms
    error       predicted / measured - 1: above 0 where the prediction was too high
    pipeline    from the start of the first forward of a step to the end of the last instruction, over all ranks of a replica; what
                the plan predicts as the time of a step, without the optimizer and whatever else a script does
    whole step  what the script waits for: the pipeline, and what the step function does around it
    bubble      1 - (time in F, B and W) / (ranks x pipeline), as simulated
    wire time   of a message: from the start of its send to the end of its receive, where the receiver had nothing else to do. That
                happens in every step; the median of such messages of one edge and direction stands for all of it
    waited      the part of its receive that a rank spends on a message that is on its way
    hidden      the share of all wire time in which the receiver was computing: 1 - waited / wire time

Measured times are medians over training steps of the first program (the plan's signature of inputs), those of a stage over its
microbatches too. Times of ranks on several hosts are brought to one clock. What has not been measured is None, and a dash in the text.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from smpc.codegen.program import Instruction, Op
from smpc.codegen.simulate import Timeline
from smpc.observe import BUSY, RankRecord, StepRecord
from smpc.partitioner.plan import Plan
from smpc.report.format import count, format_bytes, format_time
from smpc.report.memory import memory_curves
from smpc.report.predict import plan_timeline

_ARRIVALS = {Op.SEND: Op.RECV, Op.SEND_GRAD: Op.RECV_GRAD}


@dataclass(frozen=True, slots=True)
class Line:
    """One number, predicted and measured: seconds, bytes or a share."""

    what: str
    unit: str  # "time", "bytes" or "share"
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of the measured steps, and how much of their time on the wire lay behind computation. Seconds of one step."""

    num_messages: int  # in one step
    wire: float
    waited: float

    @property
    def hidden(self) -> float | None:
        """The share of the wire time that cost nobody anything."""
        return None if self.wire <= 0 else max(0.0, 1 - self.waited / self.wire)


@dataclass(frozen=True, slots=True)
class Comparison:
    """See the module docstring. `messages` is None where ranks do not run side by side."""

    plan: str  # its fingerprint
    device: str  # what was predicted for
    num_steps: int
    lines: tuple[Line, ...]
    messages: Messages | None

    def line(self, what: str) -> Line:
        """The line of that name. KeyError if there is none."""
        return {line.what: line for line in self.lines}[what]

    def to_json(self) -> str:
        """All numbers, indented; seconds, bytes, shares."""
        lines = [{**asdict(line), "error": line.error} for line in self.lines]
        found = None if self.messages is None else {**asdict(self.messages), "hidden": self.messages.hidden}
        data = {
            "plan": self.plan,
            "device": self.device,
            "num_steps": self.num_steps,
            "lines": lines,
            "messages": found,
        }
        return json.dumps(data, indent=2) + "\n"

    def __str__(self) -> str:
        rows = [("", "predicted", "measured", "error"), *(_cells(line) for line in self.lines)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        text = [
            f"Predicted (for {self.device}) against measured (median of {count(self.num_steps, 'training step')})"
            if self.num_steps
            else f"Predicted (for {self.device}); no training step was measured",
            "",
            *(
                "  ".join(
                    [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
                )
                for row in rows
            ),
        ]
        found = self.messages
        if found is not None and found.hidden is not None:
            text += [
                "",
                f"{count(found.num_messages, 'message')} a step, {format_time(found.wire)} on the wire, of which ranks waited for "
                f"{format_time(found.waited)}: {found.hidden:.0%} hidden behind computation",
            ]
        return "\n".join(text)


def compare(plan: Plan, records: Sequence[RankRecord], *, is_parallel: bool = True) -> Comparison:
    """The comparison. `is_parallel`: the ranks ran side by side; otherwise only the stages' times mean something."""
    timeline = plan_timeline(plan)
    trained = {record.rank: [s for s in record.steps if s.training and s.program == 0] for record in records}
    num_steps = max(map(len, trained.values()), default=0)
    lines = [
        *_memory_lines(plan, timeline, records),
        *_stage_lines(plan, [s for steps in trained.values() for s in steps]),
    ]
    messages = None
    if is_parallel:
        steps = list(together(records, plan.pipeline_parallel_degree))
        lines += _step_lines(plan, steps)
        messages = _messages(steps)
    return Comparison(plan.fingerprint, plan.device, num_steps, tuple(lines), messages)


def whole_steps(records: Sequence[RankRecord]) -> str:
    """What can be said of a model that is not cut, of which nothing is predicted: memory and step time of every rank."""
    lines = ["the model is not cut over ranks, so nothing is predicted; measured:"]
    for record in sorted(records, key=lambda record: record.rank):
        times = [(step.end - step.start) / 1e9 for step in record.steps if step.training]
        step = _shown(_median(times), "time")
        lines.append(
            f"rank {record.rank}: step {step} (median of {len(times)}), peak {_shown(record.peak_bytes, 'bytes')}"
        )
    return "\n".join(lines)


def _memory_lines(plan: Plan, timeline: Timeline, records: Sequence[RankRecord]) -> Iterator[Line]:
    predicted = [curve.peak_bytes for curve in memory_curves(plan, timeline)]
    several = len(records) > plan.pipeline_parallel_degree
    for record in sorted(records, key=lambda record: record.rank):
        if record.pipeline_rank < len(predicted):
            where = f" (pipeline rank {record.pipeline_rank})" if several else ""
            yield Line(f"rank {record.rank}{where}, peak", "bytes", predicted[record.pipeline_rank], record.peak_bytes)


def _stage_lines(plan: Plan, steps: Sequence[StepRecord]) -> Iterator[Line]:
    """Forward and backward of each stage; of a backward in two parts, both together."""
    times: dict[tuple[int, Op], list[float]] = {}
    for step in steps:
        for span in step.spans:
            if span.instruction.op in BUSY:
                times.setdefault((span.instruction.stage, span.instruction.op), []).append(
                    (span.end - span.start) / 1e9
                )
    medians = {key: statistics.median(values) for key, values in times.items()}
    for stage in plan.stages:
        forward, backward = medians.get((stage.index, Op.FORWARD)), medians.get((stage.index, Op.BACKWARD))
        if backward is not None:
            backward += medians.get((stage.index, Op.WEIGHT), 0.0)
        yield Line(f"stage {stage.index}, forward", "time", stage.forward_time, forward)
        yield Line(f"stage {stage.index}, backward", "time", stage.backward_time, backward)


@dataclass(frozen=True, slots=True)
class Together:
    """One step of one replica, all its ranks on one clock: (pipeline rank, instruction, start, end) in nanoseconds."""

    step: int
    program: int
    replica: int
    num_ranks: int
    start: int
    end: int
    spans: tuple[tuple[int, Instruction, int, int], ...]


def together(records: Sequence[RankRecord], num_ranks: int, *, training_only: bool = True) -> Iterator[Together]:
    """Steps that all ranks of a replica have recorded."""
    by_replica: dict[int, list[RankRecord]] = {}
    for record in records:
        by_replica.setdefault(record.replica, []).append(record)
    for replica, members in by_replica.items():
        if {record.pipeline_rank for record in members} != set(range(num_ranks)):
            continue
        steps = [
            {s.step: s for s in record.steps if s.spans and (not training_only or (s.training and s.program == 0))}
            for record in members
        ]
        for number in steps[0]:
            if all(number in own for own in steps):
                found = [(record, own[number]) for record, own in zip(members, steps, strict=True)]
                spans = [
                    (record.pipeline_rank, span.instruction, span.start + record.offset, span.end + record.offset)
                    for record, step in found
                    for span in step.spans
                ]
                start = min(step.start + record.offset for record, step in found)
                end = max(step.end + record.offset for record, step in found)
                yield Together(number, found[0][1].program, replica, num_ranks, start, end, tuple(spans))


def _step_lines(plan: Plan, steps: Sequence[Together]) -> Iterator[Line]:
    pipelines, bubbles, wholes = [], [], []
    for step in steps:
        busy = [(start, end) for _, instruction, start, end in step.spans if instruction.op in BUSY]
        makespan = max(end for *_, end in step.spans) - min(start for start, _ in busy)
        pipelines.append(makespan / 1e9)
        bubbles.append(1 - sum(end - start for start, end in busy) / (step.num_ranks * makespan))
        wholes.append((step.end - step.start) / 1e9)
    schedule = plan.schedule
    yield Line("pipeline", "time", schedule.step_time, _median(pipelines))
    yield Line("bubble", "share", schedule.bubble_fraction, _median(bubbles))
    yield Line("whole step", "time", None, _median(wholes))


@dataclass(frozen=True, slots=True)
class Message:
    """A message of one step, in nanoseconds of its clock: its send, and the receive that it ends."""

    source: int  # pipeline ranks
    destination: int
    instruction: Instruction  # of the sender
    sent: int  # the start of the send
    receive: int  # the start of the receive
    received: int

    @property
    def waited(self) -> int:
        """How long the receiver waited for it while it was on its way."""
        return max(0, self.received - max(self.sent, self.receive))


def messages_of(step: Together) -> list[Message]:
    """The messages of a step, in order of their sends."""
    arrivals = {
        (rank, i.peer, i.op, i.edge, i.microbatch): (start, end)
        for rank, i, start, end in step.spans
        if i.op in _ARRIVALS.values()
    }
    found = []
    for rank, i, start, _ in step.spans:
        if i.op in _ARRIVALS:
            arrival = arrivals.get((i.peer, rank, _ARRIVALS[i.op], i.edge, i.microbatch))
            if arrival is not None:
                found.append(Message(rank, i.peer, i, start, *arrival))
    return sorted(found, key=lambda message: (message.sent, message.source))


def _messages(steps: Sequence[Together]) -> Messages | None:
    found = [message for step in steps for message in messages_of(step)]
    if not found:
        return None
    exposed: dict[tuple[int, Op], list[int]] = {}
    for message in found:
        if message.receive <= message.sent:
            exposed.setdefault((message.instruction.edge, message.instruction.op), []).append(message.waited)
    typical = {key: statistics.median(values) for key, values in exposed.items()}
    known = [m for m in found if (m.instruction.edge, m.instruction.op) in typical]
    wire = sum(max(typical[m.instruction.edge, m.instruction.op], m.waited) for m in known)
    waited = sum(message.waited for message in known)
    return Messages(len(found) // len(steps), wire / 1e9 / len(steps), waited / 1e9 / len(steps))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _cells(line: Line) -> tuple[str, str, str, str]:
    error = "" if line.error is None else f"{line.error:+.1%}"
    return line.what, _shown(line.predicted, line.unit), _shown(line.measured, line.unit), error


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:.1%}" if unit == "share" else format_time(value)
