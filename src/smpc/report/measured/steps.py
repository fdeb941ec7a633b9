"""The steps of a pipeline's ranks, on one clock.

    for step in pipeline_steps(records, num_ranks):     # records: one `smpc.observe.observer.RankRecord` of each rank
        print(step.makespan, step.bubble_fraction, [message.waited for message in messages_of(step)])

All times are nanoseconds of rank 0's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smpc.codegen.program import Instruction, Op
from smpc.observe.observer import BUSY, RankRecord

_SENDS = {Op.SEND: Op.RECV, Op.SEND_GRAD: Op.RECV_GRAD}


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
    """Steps that all ranks of a replica have recorded; `training_only`: only steps of the first program."""
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
        if i.op in _SENDS.values()
    }
    found = []
    for rank, i, start, end in step.spans:
        if i.op in _SENDS:
            arrival = arrivals.get((i.peer, rank, _SENDS[i.op], i.edge, i.microbatch))
            if arrival is not None:
                found.append(Message(rank, i.peer, i, start, end, *arrival))
    return sorted(found, key=lambda message: (message.sent, message.source))
