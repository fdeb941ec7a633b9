"""Predicted against measured: what a plan promised, and what the ranks that ran it have recorded.

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

Measured times are medians over training steps of the first program (the plan's signature of inputs), those of a stage over its
microbatches too. Times of ranks on several hosts are brought to one clock. What has not been measured is None, and a dash in the text.

`explain`: where the bubble of recorded steps comes from: the steps are simulated from their own parts, with one part more each time.

    found = explain(steps, plan_links(plan))        # steps: `pipeline_steps`
    print(found)        # bubble 14.9%: schedule 11.1%, uneven times +1.4%, messages +2.1%, bookkeeping +0.2%, other +0.1%

Terms
    schedule    what the order of the actions leaves idle on its own: each F, B and W takes the median of its stage, messages take no time
    uneven      what is added when each takes as long as it did in that step. It can be negative: a long action may fall into a gap
    messages    what is added when messages take time: what a rank spends to send one, and to take one that is there (means of the
                step), and the rest of the way: that of the quickest message of the same edge and direction that found its
                receiver waiting
    bookkeeping what is added by a rank's own time between actions: that between its instructions, and that of those which are
                neither actions nor messages to others (MOVE, OFFLOAD ..), the mean of the step
    simulated   all of these: what the bubble would be if ranks did nothing but this, and never waited for anything else
    other       what has been measured beyond: the end of a step after its last backward, ranks that are not run at once when their message
                comes, because they sleep or other programs run

Each is a share of ranks x time, the median over the steps.

`pipeline_steps`: what the ranks of a pipeline did at the same time, on one clock.

    for step in pipeline_steps(records, num_ranks):     # records: one `smpc.observe.observer.RankRecord` of each rank
        print(step.makespan, step.bubble_fraction, [message.waited for message in messages_of(step)])

All times are nanoseconds of rank 0's clock.

`measured_json`: what the ranks have recorded, in Chrome's trace event format, above the predicted step: for https://ui.perfetto.dev.

    measured_json(plan, records)        # the content of trace.json; records: one `smpc.observe.observer.RankRecord` of each rank

Process 1 is what was measured: a track for each rank, a slice for each step and inside it one for each instruction, an arrow from each
send to the receive that it ends. Process 0 is the predicted step as in timeline.json, moved to the first forward of the first recorded
step. Times are microseconds from the first recorded step on, on the clock of rank 0. An arrow tells how long its receiver waited for a
message on its way.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from smpc.codegen.actions import Action, Schedule
from smpc.codegen.program import Instruction, Op
from smpc.codegen.simulate import Costs, Timeline, Transfer, simulate
from smpc.observe.observer import BUSY, RankRecord, StepRecord
from smpc.partitioner.graph.plan import Plan
from smpc.report.format import count, format_bytes, format_time, printable
from smpc.report.memory import memory_curves
from smpc.report.perfetto import predicted_events, trace_json
from smpc.report.predict import plan_links, plan_timeline


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
    """See the module docstring. `messages` and `bubble` are None where ranks do not run side by side."""

    plan: str  # its fingerprint
    device: str  # what was predicted for
    num_steps: int
    lines: tuple[Line, ...]
    messages: Messages | None
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
        lines += _step_lines(plan, steps)
        messages, bubble = _messages(steps), explain(steps, plan_links(plan))
    return Comparison(plan.fingerprint, plan.device, num_steps, tuple(lines), messages, bubble)


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


def _step_lines(plan: Plan, steps: Sequence[PipelineStep]) -> Iterator[Line]:
    schedule = plan.schedule
    yield Line("pipeline", "time", schedule.step_time, _median([step.makespan / 1e9 for step in steps]))
    yield Line("bubble", "share", schedule.bubble_fraction, _median([step.bubble_fraction for step in steps]))
    yield Line("whole step", "time", None, _median([(step.end - step.start) / 1e9 for step in steps]))


def _messages(steps: Sequence[PipelineStep]) -> Messages | None:
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


_BOOKKEEPING = (Op.MOVE, Op.MOVE_GRAD, Op.OFFLOAD, Op.RELOAD)
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
        """What the parts that are known come to."""
        return self.schedule + self.uneven + self.messages + self.bookkeeping

    @property
    def other(self) -> float:
        """What they do not come to."""
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
    typical = _typical(steps)
    messages = [messages_of(step) for step in steps]
    everything = [message for found in messages for message in found]
    timed_links = _timed(links, everything)
    bubbles: list[tuple[float, ...]] = []  # of each step, with one part more each time
    for step, found in zip(steps, messages, strict=True):
        schedule = _schedule(step)
        own = {Action(i.op, i.stage, i.microbatch): (end - start) / _SECOND for _, i, start, end in step.computing}
        even = Costs((), (), actions={action: typical[action.op, action.stage] for action in own})
        uneven = Costs((), (), actions=own)
        sent = dataclasses.replace(
            uneven, bandwidth=_SECOND, sending=_sending(found), receiving=_receiving(found, everything)
        )
        whole = dataclasses.replace(sent, between=_between(step))
        runs = ((links, even), (links, uneven), (timed_links, sent), (timed_links, whole))
        bubbles.append(tuple(simulate(schedule, by, costs).bubble_fraction for by, costs in runs))
    by_schedule, by_times, by_messages, by_all = map(statistics.median, zip(*bubbles, strict=True))
    measured = statistics.median(step.bubble_fraction for step in steps)
    return Bubble(measured, by_schedule, by_times - by_schedule, by_messages - by_times, by_all - by_messages)


def _schedule(step: PipelineStep) -> Schedule:
    """The actions of each rank in the order in which it ran them."""
    ordered = sorted(step.computing, key=lambda span: span[2])
    return tuple(
        tuple(Action(i.op, i.stage, i.microbatch) for owner, i, _, _ in ordered if owner == rank)
        for rank in range(step.num_ranks)
    )


def _typical(steps: Sequence[PipelineStep]) -> dict[tuple[Op, int], float]:
    """Seconds of F, B and W of each stage: the medians over microbatches and steps."""
    found: dict[tuple[Op, int], list[int]] = {}
    for step in steps:
        for _, i, start, end in step.computing:
            found.setdefault((i.op, i.stage), []).append(end - start)
    return {key: statistics.median(values) / _SECOND for key, values in found.items()}


def _sending(messages: Sequence[Message]) -> float:
    """Seconds that a rank spends to send a message."""
    return _mean([message.handed_over - message.sent for message in messages])


def _receiving(messages: Sequence[Message], more: Sequence[Message]) -> float:
    """Seconds that a rank spends to take a message that is there; of `more` if none of these was there when it was wanted."""
    for some in (messages, more):
        waiting = [message.received - message.receive for message in some if message.receive >= message.handed_over]
        if waiting:
            return _mean(waiting)
    return 0.0


def _between(step: PipelineStep) -> float:
    """Seconds that a rank needs for itself after an action."""
    total = 0
    for rank in range(step.num_ranks):
        own = sorted((start, end, i.op) for owner, i, start, end in step.spans if owner == rank)
        total += sum(max(0, after[0] - before[1]) for before, after in pairwise(own))
        total += sum(end - start for start, end, op in own if op in _BOOKKEEPING)
    return total / len(step.computing) / _SECOND


def _timed(links: Sequence[Transfer], messages: Sequence[Message]) -> list[Transfer]:
    """The links with the nanoseconds that their quickest messages are under way in the place of bytes: at a byte a nanosecond."""
    taking = round(_receiving(messages, ()) * _SECOND)
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


SENDS = {Op.SEND: Op.RECV, Op.SEND_GRAD: Op.RECV_GRAD}


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One step of one replica. `start` and `end` are the step function's; `spans` are (pipeline rank, instruction, start, end)."""

    step: int
    program: int
    replica: int
    num_ranks: int
    start: int
    end: int
    spans: tuple[tuple[int, Instruction, int, int], ...]

    @property
    def computing(self) -> tuple[tuple[int, Instruction, int, int], ...]:
        """The spans of F, B and W."""
        return tuple(span for span in self.spans if span[1].op in BUSY)

    @property
    def makespan(self) -> int:
        """From the start of the first F to the end of the last instruction."""
        return max(end for *_, end in self.spans) - min(start for *_, start, _ in self.computing)

    @property
    def bubble_fraction(self) -> float:
        """1 - (time in F, B and W) / (ranks x makespan)."""
        busy = sum(end - start for *_, start, end in self.computing)
        return 1 - busy / (self.num_ranks * self.makespan)


@dataclass(frozen=True, slots=True)
class Message:
    """A message of one step: its send, and the receive that it ends."""

    source: int  # pipeline ranks
    destination: int
    instruction: Instruction  # of the sender
    sent: int  # the start of the send
    handed_over: int  # its end
    receive: int  # the start of the receive
    received: int

    @property
    def waited(self) -> int:
        """How long the receiver waited for it while it was on its way."""
        return max(0, self.received - max(self.sent, self.receive))


def pipeline_steps(
    records: Sequence[RankRecord], num_ranks: int, *, training_only: bool = True
) -> Iterator[PipelineStep]:
    """Steps that all ranks of a replica have recorded; `training_only`: those of the first program alone, too."""
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
                yield PipelineStep(number, found[0][1].program, replica, num_ranks, start, end, tuple(spans))


def messages_of(step: PipelineStep) -> list[Message]:
    """The messages of a step, in order of their sends."""
    arrivals = {
        (rank, i.peer, i.op, i.edge, i.microbatch): (start, end)
        for rank, i, start, end in step.spans
        if i.op in SENDS.values()
    }
    found = []
    for rank, i, start, end in step.spans:
        if i.op in SENDS:
            arrival = arrivals.get((i.peer, rank, SENDS[i.op], i.edge, i.microbatch))
            if arrival is not None:
                found.append(Message(rank, i.peer, i, start, end, *arrival))
    return sorted(found, key=lambda message: (message.sent, message.source))


_PROCESS = 1
_FIRST_ARROW = 1 << 32  # arrows of the predicted step have small numbers
_CATEGORIES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "deferred backward"}


def measured_json(plan: Plan | None, records: Sequence[RankRecord]) -> str:
    """The trace. Without a plan (a model that is not cut) it has the steps alone."""
    records = sorted(records, key=lambda record: record.rank)
    begins = [step.start + record.offset for record in records for step in record.steps]
    origin = min(begins, default=0)
    events = [*_names(plan, records), *_slices(records, origin)]
    other: dict[str, Any] = {"kind": "measured", "ranks": [record.rank for record in records]}
    if plan is not None:
        arrows = [*_arrows(plan, records, origin)]
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
        events = [*_moved(predicted_events(plan, plan_timeline(plan)), shift), *events]
    return trace_json(events, other)


def _moved(events: Iterable[dict[str, Any]], shift: float) -> Iterator[dict[str, Any]]:
    for event in events:
        yield {**event, "ts": event["ts"] + shift} if "ts" in event else event


def _names(plan: Plan | None, records: Sequence[RankRecord]) -> Iterator[dict[str, Any]]:
    model = "" if plan is None else f"{printable(plan.model_class.rpartition('.')[2])}, "
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": f"{model}measured"}}
    for record in records:
        where = {"ph": "M", "pid": _PROCESS, "tid": record.rank}
        yield {**where, "name": "thread_name", "args": {"name": f"rank {record.rank}"}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": record.rank}}


def _slices(records: Sequence[RankRecord], origin: int) -> Iterator[dict[str, Any]]:
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
                    "name": _name(span.instruction),
                    "cat": _CATEGORIES.get(span.instruction.op, "communication"),
                    "args": {"instruction": str(span.instruction), "step": step.step},
                }


def _name(instruction: Instruction) -> str:
    """As in the predicted step, with the number of the microbatch: `F3`, `RECV 3`."""
    if instruction.op in BUSY:
        return f"{instruction.op}{instruction.microbatch}"
    return str(instruction.op) if instruction.microbatch < 0 else f"{instruction.op} {instruction.microbatch}"


def _arrows(plan: Plan, records: Sequence[RankRecord], origin: int) -> Iterator[dict[str, Any]]:
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
