"""Time, bubble and memory of a plan, from the plan alone: no model, no trace.

    plan_timeline(plan)                         one step, as `smpc compile` predicted it
    predict(plan, num_microbatches=32)          the same cut under another schedule, as a new plan

A microbatch keeps its size, and with it every stage's times and activations: more microbatches mean a larger batch. The
solver's results for the cut (bottleneck, bound, gap) stay: they hold for the original schedule.

Times equal a compilation for the new schedule, except that the share of microbatches whose gradients are added to earlier ones does
not change. Memory is the stage's memory beside activations in the old schedule, plus activations in flight in the new one; messages
and gradients at the peak are not counted again. This is rather too much than too little: for examples/gpt2.py on four ranks, from 8
microbatches, 0.1% off for 32, 5% too much for the simple schedule, 8% for 4 microbatches and 21% for a single one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from smpc.codegen.offload import action_uses
from smpc.codegen.schedules.named import Choice, choose
from smpc.codegen.simulate import Costs, Timeline, Transfer, chain, simulate_step
from smpc.config.numbers import MAX_MICROBATCHES, shown
from smpc.errors import ConfigError
from smpc.partitioner.graph.plan import Plan, Stage
from smpc.report.memory_curve import microbatch_bytes, resident_bytes


def plan_timeline(plan: Plan) -> Timeline:
    """The predicted timeline of one training step under the plan's schedule."""
    summary = plan.schedule
    placement = tuple(stage.rank for stage in plan.stages)
    choice = Choice(summary.name, placement, summary.num_microbatches, summary.active_microbatches)
    links = plan_links(plan)
    in_flight = [stage.num_in_flight for stage in plan.stages]
    return simulate_step(plan, links, choice.build(links, Costs.of_plan(plan), in_flight))


def plan_links(plan: Plan) -> tuple[Transfer, ...]:
    """The messages between stages for every microbatch."""
    return tuple(
        Transfer(edge.source, edge.destination, edge.num_bytes, edge.gradient_bytes, edge.gradient_bytes > 0)
        for edge in plan.edges
    )


def predict(
    plan: Plan,
    *,
    num_microbatches: int | None = None,
    pipeline: str | None = None,
    schedule: str | None = None,
    active_microbatches: int | None = None,
) -> Plan:
    """The plan with its schedule replaced where given, and time, bubble and memory predicted again.

    `pipeline` and `schedule`: as in the configuration. `active_microbatches` is by default the plan's: ranks + 2 unless
    it was set. Raises ConfigError for numbers below one and for an unknown schedule, ScheduleError for one that needs
    another placement.
    """
    old, num_ranks = plan.schedule, plan.pipeline_parallel_degree
    microbatches = old.num_microbatches if num_microbatches is None else num_microbatches
    wrong = [
        f"{name}: expected {'at least 1' if value < 1 else f'at most {MAX_MICROBATCHES}'}, found {shown(value)}"
        for name, value in (("microbatches", microbatches), ("active_microbatches", active_microbatches))
        if value is not None and not 1 <= value <= MAX_MICROBATCHES
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    name = old.name
    if pipeline is not None or schedule is not None:
        pieces = len(plan.stages) // num_ranks
        chosen = choose(
            num_ranks, microbatches, pipeline=pipeline or "interleaved", schedule=schedule, num_pieces=pieces
        )
        name = chosen.name
    active = min(active_microbatches or _unbounded_active(plan), microbatches)
    choice = Choice(name, tuple(stage.rank for stage in plan.stages), microbatches, active)
    stages = tuple(_with_in_flight(plan, choice))
    summary = dataclasses.replace(
        old, name=name, num_microbatches=microbatches, active_microbatches=active, bubble_fraction=0.0, step_time=0.0
    )
    new = dataclasses.replace(plan, stages=stages, schedule=summary)
    timeline = plan_timeline(new)
    summary = dataclasses.replace(summary, bubble_fraction=timeline.bubble_fraction, step_time=timeline.makespan)
    return dataclasses.replace(new, schedule=summary)


def _with_in_flight(plan: Plan, choice: Choice) -> Iterator[Stage]:
    """The stages with the microbatches in flight of another schedule."""
    number, own = len(plan.stages), plan.schedule
    if (choice.name, choice.num_microbatches, choice.active_microbatches) == (
        own.name,
        own.num_microbatches,
        own.active_microbatches,
    ):
        yield from plan.stages
        return
    uses = None
    if any(stage.in_flight_bytes is not None for stage in plan.stages):
        uses = action_uses(choice.build(chain(number), Costs.uniform(number)), number)
    for stage, count in zip(plan.stages, choice.in_flight, strict=True):
        deferred = stage.deferred_bytes_per_microbatch if uses is not None else 0
        in_flight = None if uses is None else uses[stage.index].in_flight(microbatch_bytes(stage), deferred)
        held = count * microbatch_bytes(stage) if in_flight is None else in_flight
        yield dataclasses.replace(
            stage,
            num_in_flight=count,
            peak_memory_bytes=resident_bytes(stage) + held,
            deferred_bytes_per_microbatch=deferred,
            in_flight_bytes=in_flight,
        )


def _unbounded_active(plan: Plan) -> int:
    """The plan's limit of active microbatches before its own number of microbatches cut it short."""
    by_default = plan.pipeline_parallel_degree + 2
    active = plan.schedule.active_microbatches
    return by_default if active == min(by_default, plan.schedule.num_microbatches) else active
