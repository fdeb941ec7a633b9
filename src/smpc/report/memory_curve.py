"""The predicted memory of every rank over one step.

A rank holds the static bytes of its stages all the time. The activations of a microbatch come with its forward and go
at the end of its backward; what the deferred part reads stays until that has run. So a curve is a step function:

    bytes
      ^        ___     ___
      |    ___|   |___|   |___
      |___|                   |___   static
      +--------------------------> time
          F0  F1  B0  F2  B1  B2

Its highest point is the peak of the rank in the plan: `static` is what that has beyond the most that microbatches hold. If activations are
offloaded, each microbatch counts with the average of the microbatches in flight on the device.

A peak before all gradients exist has less than all of them: `gradients_at_peak`. So nothing is ever less than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smpc.codegen.program import Op, split_backwards
from smpc.codegen.simulate import Event, Timeline
from smpc.partitioner.graph.plan import Plan, Stage

_INSTANT = 1e-9  # share of a step that counts as no time


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes of one rank. `points` are (time, bytes): what is held from that time until the next point."""

    rank: int
    parameter_bytes: int
    gradient_bytes: int  # those that exist at the peak
    optimizer_bytes: int
    other_bytes: int  # buffers, messages, working memory
    points: tuple[tuple[float, int], ...]

    @property
    def static_bytes(self) -> int:
        """The memory held all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.other_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest point."""
        return max(num_bytes for _, num_bytes in self.points)


def resident_bytes(stage: Stage) -> int:
    """A stage's memory independent of microbatches: its peak without activations."""
    in_flight = stage.in_flight_bytes
    return stage.peak_memory_bytes - (stage.num_in_flight * microbatch_bytes(stage) if in_flight is None else in_flight)


def microbatch_bytes(stage: Stage) -> int:
    """A microbatch's memory on the device while in flight: its activations without the offloaded part."""
    if not stage.offloaded_bytes_per_microbatch:
        return stage.activation_bytes_per_microbatch
    others = stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes + stage.buffer_bytes
    others += stage.communication_bytes + stage.transient_bytes
    return (stage.peak_memory_bytes - others) // max(1, stage.num_in_flight)


def gradients_at_peak(stage: Stage) -> int:
    """Bytes of gradients that exist when the stage holds most."""
    return stage.gradient_bytes + min(0, stage.communication_bytes + stage.transient_bytes)


def reported_working_bytes(stage: Stage) -> int:
    """Messages in transit and working memory of operations, at the stage's peak."""
    return max(0, stage.communication_bytes + stage.transient_bytes)


def rank_bound(plan: Plan) -> int:
    """No rank holds more than this: the most that its stages hold at their peaks, all together."""
    held = [0] * plan.pipeline_parallel_degree
    for stage in plan.stages:
        held[stage.rank] += stage.peak_memory_bytes
    return max(held, default=0)


def memory_curves(plan: Plan, timeline: Timeline) -> tuple[MemoryCurve, ...]:
    """The curve of every rank, for the step that the timeline predicts."""
    split, instant = split_backwards(event.action for event in timeline.events), _INSTANT * timeline.makespan
    events: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        events[event.rank].append(event)
    return tuple(_memory_curve(plan, rank, own, split, instant) for rank, own in enumerate(events))


def _memory_curve(
    plan: Plan, rank: int, events: Sequence[Event], split: frozenset[tuple[int, int]], instant: float
) -> MemoryCurve:
    """A rank's memory over the step. `split`: whose backwards have two parts; `instant`: seconds that count as none."""
    stages = [stage for stage in plan.stages if stage.rank == rank]
    points = [(0.0, 0)]
    held = 0
    for event in events:
        action = event.action
        activations = microbatch_bytes(plan.stages[action.stage])
        if action.op is Op.FORWARD:
            time, held = event.start, held + activations
        else:
            deferred = plan.stages[action.stage].deferred_bytes_per_microbatch or activations
            kept = deferred if (action.stage, action.microbatch) in split else 0
            if action.op is Op.BACKWARD and kept == activations:
                continue  # its W lets go of them
            time, held = event.end, held - (kept if action.op is Op.WEIGHT else activations - kept)
        if held > points[-1][1] and time - points[-1][0] <= instant:
            points.pop()  # a dip of no length: freed as more was allocated
        points.append((time, held))
    static = sum(stage.peak_memory_bytes for stage in stages) - max(held for _, held in points)
    parts = []
    left = static
    # If the peak comes before all gradients exist, the rest of the peak counts as the existing gradients.
    for wanted in (
        sum(stage.parameter_bytes for stage in stages),
        sum(stage.optimizer_bytes for stage in stages),
        sum(stage.gradient_bytes for stage in stages),
    ):
        parts.append(min(wanted, left))
        left -= parts[-1]
    parameters, optimizer, gradients = parts
    return MemoryCurve(
        rank, parameters, gradients, optimizer, left, tuple((time, static + held) for time, held in points)
    )
