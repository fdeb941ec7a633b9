"""Where the bubble of recorded steps comes from: the steps are simulated from their own parts, with one part more each time.

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
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from smpc.codegen.program import Action, Op, Schedule
from smpc.codegen.simulate import Costs, Transfer, simulate
from smpc.report.measured.steps import Message, PipelineStep, messages_of

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
