"""Predicted against measured: a plan's predictions beside the records of the ranks that ran it.

    found = compare(plan, records)      # records: one `smpc.observe.observer.RankRecord` of each rank, of as many replicas as there are
    print(found)

Terms
    error       predicted / measured - 1: above 0 where the prediction was too high
    pipeline    from the start of the first forward of a step to the end of the last instruction, over all ranks of a replica; what
                the plan predicts as the time of a step, without the optimizer and whatever else a script does
    whole step  what the script waits for: the pipeline, and what the step function does around it
    bubble      1 - (time in F, B and W) / (ranks x pipeline), as simulated; `explain` says what the measured one
                comes from
    wire time   of a message: from the start of its send to the end of its receive, where the receiver had nothing else to do. That
                happens in every step; the median of such messages of one edge and direction stands for all of it
    waited      the part of its receive that a rank spends on a message that is on its way
    hidden      the share of all wire time in which the receiver was computing: 1 - waited / wire time

Measured times are medians over training steps of the first program (the plan's signature of inputs), and for a stage also over its
microbatches. Times of ranks on several hosts are converted to one clock. A value that was not measured is None, and a dash in the
text.

Where the bubble of recorded steps comes from: the steps are simulated from their own parts, with one part more each time.

    found = explain(steps, plan_links(plan))        # steps: `pipeline_steps`
    print(found)        # bubble 14.9%: schedule 11.1%, uneven times +1.4%, messages +2.1%, bookkeeping +0.2%, other +0.1%

Terms
    schedule    what the order of the actions leaves idle on its own: each F, B and W takes the median of its stage, messages take no time
    uneven      what is added when each takes as long as it did in that step. It can be negative: a long action may fall into a gap
    messages    what is added when messages take time: what a rank spends to send one, and to take one that is there (means of the step),
                and the rest of the way, taken from the quickest message of the same edge and direction that found its receiver waiting
    bookkeeping what is added by a rank's own time between actions: the time between its instructions, and the time of instructions that are
                neither actions nor messages to others (MOVE, OFFLOAD ..), the mean of the step
    simulated   all of these: what the bubble would be if ranks did nothing but this, and never waited for anything else
    other       what has been measured beyond: the end of a step after its last backward, ranks that are not run at once when their message
                comes, because they sleep or other programs run

Each is a share of ranks x time, the median over the steps.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from smpc.codegen.program import Action, Op, Schedule
from smpc.codegen.simulate import Costs, Timeline, Transfer, simulate
from smpc.observe.observer import BUSY, RankRecord, StepRecord
from smpc.partitioner.graph.plan import Plan
from smpc.report.format import count, format_bytes, format_time
from smpc.report.measured.steps import Message, PipelineStep, messages_of, pipeline_steps
from smpc.report.memory_curve import memory_curves
from smpc.report.predict import plan_links, plan_timeline

_BOOKKEEPING = (Op.MOVE, Op.MOVE_GRAD, Op.OFFLOAD, Op.RELEASE, Op.RELOAD)
_SECOND = 1e9  # in nanoseconds


@dataclass(frozen=True, slots=True)
class Bubble:
    """See the module docstring."""

    measured: float
    schedule: float
    uneven: float
    messages: float
    bookkeeping: float

    @property
    def simulated(self) -> float:
        """The sum of the known parts."""
        return self.schedule + self.uneven + self.messages + self.bookkeeping

    @property
    def other(self) -> float:
        """The rest of the bubble."""
        return self.measured - self.simulated

    def __str__(self) -> str:
        return (
            f"bubble {self.measured:.1%}: schedule {self.schedule:.1%}, uneven times {self.uneven:+.1%}, "
            f"messages {self.messages:+.1%}, bookkeeping {self.bookkeeping:+.1%}, other {self.other:+.1%}"
        )


def explain(steps: Sequence[PipelineStep], links: Sequence[Transfer]) -> Bubble | None:
    """The parts of the bubble of training steps of one program; None if there is no step. `links[i]` is edge i."""
    if not steps:
        return None
    typical = _typical_action_seconds(steps)
    messages = [messages_of(step) for step in steps]
    everything = [message for found in messages for message in found]
    timed_links = _links_as_measured(links, everything)
    bubbles: list[tuple[float, ...]] = []  # of each step, with one part more each time
    for step, found in zip(steps, messages, strict=True):
        schedule = _measured_schedule(step)
        own = {Action(i.op, i.stage, i.microbatch): (end - start) / _SECOND for _, i, start, end in step.computing}
        even = Costs((), (), actions={action: typical[action.op, action.stage] for action in own})
        uneven = Costs((), (), actions=own)
        sent = dataclasses.replace(
            uneven, bandwidth=_SECOND, sending=_seconds_to_send(found), receiving=_seconds_to_receive(found, everything)
        )
        whole = dataclasses.replace(sent, between=_seconds_between_actions(step))
        runs = ((links, even), (links, uneven), (timed_links, sent), (timed_links, whole))
        bubbles.append(tuple(simulate(schedule, by, costs).bubble_fraction for by, costs in runs))
    by_schedule, by_times, by_messages, by_all = map(statistics.median, zip(*bubbles, strict=True))
    measured = statistics.median(step.bubble_fraction for step in steps)
    return Bubble(measured, by_schedule, by_times - by_schedule, by_messages - by_times, by_all - by_messages)


def _measured_schedule(step: PipelineStep) -> Schedule:
    """The actions of each rank in the order in which it ran them."""
    ordered = sorted(step.computing, key=lambda span: span[2])
    return tuple(
        tuple(Action(i.op, i.stage, i.microbatch) for owner, i, _, _ in ordered if owner == rank)
        for rank in range(step.num_ranks)
    )


def _typical_action_seconds(steps: Sequence[PipelineStep]) -> dict[tuple[Op, int], float]:
    """Seconds of F, B and W of each stage: the medians over microbatches and steps."""
    found: dict[tuple[Op, int], list[int]] = {}
    for step in steps:
        for _, i, start, end in step.computing:
            found.setdefault((i.op, i.stage), []).append(end - start)
    return {key: statistics.median(values) / _SECOND for key, values in found.items()}


def _seconds_to_send(messages: Sequence[Message]) -> float:
    """Seconds that a rank spends to send a message."""
    return _mean([message.handed_over - message.sent for message in messages])


def _seconds_to_receive(messages: Sequence[Message], more: Sequence[Message]) -> float:
    """Seconds that a rank spends to take a message that is there; of `more` if none of these was there when it was wanted."""
    for some in (messages, more):
        waiting = [message.received - message.receive for message in some if message.receive >= message.handed_over]
        if waiting:
            return _mean(waiting)
    return 0.0


def _seconds_between_actions(step: PipelineStep) -> float:
    """Seconds that a rank needs for itself after an action."""
    total = 0
    for rank in range(step.num_ranks):
        own = sorted((start, end, i.op) for owner, i, start, end in step.spans if owner == rank)
        total += sum(max(0, after[0] - before[1]) for before, after in pairwise(own))
        total += sum(end - start for start, end, op in own if op in _BOOKKEEPING)
    return total / len(step.computing) / _SECOND


def _links_as_measured(links: Sequence[Transfer], messages: Sequence[Message]) -> list[Transfer]:
    """The links with the nanoseconds that their quickest messages are under way in the place of bytes: at a byte a nanosecond."""
    taking = round(_seconds_to_receive(messages, ()) * _SECOND)
    quickest: dict[tuple[int, Op], int] = {}
    for message in messages:
        if message.receive < message.handed_over:
            key = message.instruction.edge, message.instruction.op
            way = max(0, message.received - message.handed_over - taking)
            quickest[key] = min(way, quickest.get(key, way))
    return [
        dataclasses.replace(
            link, num_bytes=quickest.get((index, Op.SEND), 0), gradient_bytes=quickest.get((index, Op.SEND_GRAD), 0)
        )
        for index, link in enumerate(links)
    ]


def _mean(nanoseconds: Sequence[int]) -> float:
    return statistics.fmean(nanoseconds) / _SECOND if nanoseconds else 0.0


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
class MeasuredMessages:
    """Messages of the measured steps, and how much of their time on the wire lay behind computation. Seconds of one step."""

    num_messages: int  # in one step
    wire: float
    waited: float

    @property
    def hidden(self) -> float | None:
        """The share of the wire time that delayed no rank."""
        return None if self.wire <= 0 else max(0.0, 1 - self.waited / self.wire)


@dataclass(frozen=True, slots=True)
class Comparison:
    """See the module docstring. `messages` and `bubble` are None where ranks do not run side by side."""

    plan: str  # its fingerprint
    device: str  # what was predicted for
    num_steps: int
    lines: tuple[Line, ...]
    messages: MeasuredMessages | None
    bubble: Bubble | None  # where the measured one comes from

    def line(self, what: str) -> Line:
        """The line of that name. KeyError if there is none."""
        return {line.what: line for line in self.lines}[what]

    def to_json(self) -> str:
        """All numbers, indented; seconds, bytes, shares."""
        lines = [{**asdict(line), "error": line.error} for line in self.lines]
        messages = None if self.messages is None else {**asdict(self.messages), "hidden": self.messages.hidden}
        bubble = None if self.bubble is None else {**asdict(self.bubble), "other": self.bubble.other}
        data = {
            "plan": self.plan,
            "device": self.device,
            "num_steps": self.num_steps,
            "lines": lines,
            "messages": messages,
            "bubble": bubble,
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
        if self.bubble is not None:
            text += ["", str(self.bubble)]
        if found is not None and found.hidden is not None:
            text += [
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
    messages, bubble = None, None
    if is_parallel:
        steps = list(pipeline_steps(records, plan.pipeline_parallel_degree))
        lines += _step_lines(plan, steps, [s for steps in trained.values() for s in steps])
        messages, bubble = _measured_messages(steps), explain(steps, plan_links(plan))
    return Comparison(plan.fingerprint, plan.device, num_steps, tuple(lines), messages, bubble)


def whole_steps(records: Sequence[RankRecord]) -> str:
    """The comparison for a model that is not cut, which has no predictions: memory and step time of every rank."""
    lines = ["the model is not cut over ranks, so nothing is predicted; measured:"]
    for record in sorted(records, key=lambda record: record.rank):
        times = [(step.end - step.start) / 1e9 for step in record.steps if step.training]
        step = _measured_value(_median(times), "time")
        lines.append(
            f"rank {record.rank}: step {step} (median of {len(times)}), peak {_measured_value(record.peak_bytes, 'bytes')}"
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


def _step_lines(plan: Plan, steps: Sequence[PipelineStep], whole: Sequence[StepRecord]) -> Iterator[Line]:
    """`whole`: the steps of all ranks, which have no instructions where no program runs."""
    schedule = plan.schedule
    yield Line("pipeline", "time", schedule.step_time, _median([step.makespan / 1e9 for step in steps]))
    yield Line("bubble", "share", schedule.bubble_fraction, _median([step.bubble_fraction for step in steps]))
    yield Line("whole step", "time", None, _median([(step.end - step.start) / 1e9 for step in steps or whole]))


def _measured_messages(steps: Sequence[PipelineStep]) -> MeasuredMessages | None:
    """What was measured of the messages of steps; None if there were none."""
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
    return MeasuredMessages(len(found) // len(steps), wire / 1e9 / len(steps), waited / 1e9 / len(steps))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _cells(line: Line) -> tuple[str, str, str, str]:
    error = "" if line.error is None else f"{line.error:+.1%}"
    return line.what, _measured_value(line.predicted, line.unit), _measured_value(line.measured, line.unit), error


def _measured_value(value: float | None, unit: str) -> str:
    """A measured value in its unit."""
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:.1%}" if unit == "share" else format_time(value)
