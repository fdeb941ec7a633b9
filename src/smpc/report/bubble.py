"""Where the bubble of recorded steps comes from: the steps are simulated from their own parts, with one part more each time.

    found = explain(steps, plan_links(plan))        # steps: `smpc.report.steps.pipeline_steps`
    print(found)        # bubble 14.9%: schedule 11.1%, uneven times +1.4%, messages +2.1%, other +0.3%

Terms
    schedule    what the order of the actions leaves idle on its own: each F, B and W takes the median of its stage, messages take no time
    uneven      what is added when each takes as long as it did in that step. It can be negative: a long action may fall into a gap
    messages    what is added when messages take time: what a rank spends to send one, and to take one that is there (both medians), and
                the rest of the way, which is that of the quickest message of the same edge and direction that found its receiver waiting
    simulated   all of these: what the bubble would be if ranks did nothing but this, and never waited for anything else
    other       what has been measured beyond: time between instructions, the end of a step after its last backward, ranks that are not
                run at once when their message comes because other programs run

Each is a share of ranks x time, the median over the steps.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from smpc.codegen.actions import Action, Schedule
from smpc.codegen.program import Op
from smpc.codegen.simulate import Costs, Link, simulate
from smpc.report.steps import PipelineStep, messages_of

_NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Bubble:
    """See the module docstring."""

    measured: float
    schedule: float
    uneven: float
    messages: float

    @property
    def simulated(self) -> float:
        """What the parts that are known come to."""
        return self.schedule + self.uneven + self.messages

    @property
    def other(self) -> float:
        """What they do not come to."""
        return self.measured - self.simulated

    def __str__(self) -> str:
        return (
            f"bubble {self.measured:.1%}: schedule {self.schedule:.1%}, uneven times {self.uneven:+.1%}, "
            f"messages {self.messages:+.1%}, other {self.other:+.1%}"
        )


def explain(steps: Sequence[PipelineStep], links: Sequence[Link]) -> Bubble | None:
    """The parts of the bubble of training steps of one program; None if there is no step. `links[i]` is edge i."""
    if not steps:
        return None
    typical, timed_links, costs = _typical(steps), *_messages(steps, links)
    free: list[float] = []
    uneven: list[float] = []
    whole: list[float] = []
    for step in steps:
        schedule = _schedule(step)
        own = {Action(i.op, i.stage, i.microbatch): (end - start) / 1e9 for _, i, start, end in step.computing}
        medians = {action: typical[action.op, action.stage] for action in own}
        free.append(simulate(schedule, links, Costs((), (), actions=medians)).bubble_fraction)
        uneven.append(simulate(schedule, links, Costs((), (), actions=own)).bubble_fraction)
        whole.append(simulate(schedule, timed_links, dataclasses.replace(costs, actions=own)).bubble_fraction)
    measured = statistics.median(step.bubble_fraction for step in steps)
    by_schedule, by_times, by_all = (statistics.median(found) for found in (free, uneven, whole))
    return Bubble(measured, by_schedule, by_times - by_schedule, by_all - by_times)


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
    return {key: statistics.median(values) / _NANOSECONDS for key, values in found.items()}


def _messages(steps: Sequence[PipelineStep], links: Sequence[Link]) -> tuple[list[Link], Costs]:
    """What messages cost. Each link's size becomes the nanoseconds that its messages are under way, at a byte per nanosecond."""
    messages = [message for step in steps for message in messages_of(step)]
    sending = _median([m.handed_over - m.sent for m in messages])
    receiving = _median([m.received - m.receive for m in messages if m.receive >= m.handed_over])
    quickest: dict[tuple[int, Op], int] = {}
    for message in messages:
        if message.receive < message.handed_over:
            key = message.instruction.edge, message.instruction.op
            way = max(0, message.received - message.handed_over - round(receiving * _NANOSECONDS))
            quickest[key] = min(way, quickest.get(key, way))
    timed = [
        dataclasses.replace(
            link, num_bytes=quickest.get((index, Op.SEND), 0), gradient_bytes=quickest.get((index, Op.SEND_GRAD), 0)
        )
        for index, link in enumerate(links)
    ]
    return timed, Costs((), (), bandwidth=_NANOSECONDS, sending=sending, receiving=receiving)


def _median(nanoseconds: Sequence[int]) -> float:
    return statistics.median(nanoseconds) / _NANOSECONDS if nanoseconds else 0.0
