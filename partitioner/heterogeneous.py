"""Pipelines whose ranks have devices of several kinds: how fast each stage is, and where to cut for that.

The solvers know one speed for each stage, relative to the device of rank 0 (`Scale.speeds`). A stage's time on another device depends
on its operations: twice the FLOP/s do nothing for a normalisation. So a plan is solved with the speeds of the whole model, and each
stage is timed on its own device. With the resulting speeds it is solved again, a few times; the plan whose slowest stage is fastest is
taken.

Example: rank 0 has twice the FLOP/s and the bandwidth of rank 1. Of 6 equal layers stage 0 gets 4 and stage 1 gets 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from smpc.partitioner.costs.node_costs import CostModel, NodeTimes, node_times
from smpc.partitioner.graph.plan import Plan, Stage
from smpc.tracer.ir import Trace

_ROUNDS = 4
_CLOSE = 0.005  # speeds that differ by less are the same
Solve = Callable[[tuple[float, ...]], Plan]  # the plan for these speeds of the stages


def solve_mixed(trace: Trace, models: Sequence[CostModel], solve: Solve) -> Plan:
    """The best plan found, with stage s on the device of `models[s]`; `solve` plans on `models[0]`'s device at given speeds."""
    times = _times_on_mixed_devices(trace, models)
    first = _total_on_mixed_devices(times[models[0].device])
    speeds = tuple(first / _total_on_mixed_devices(times[model.device]) for model in models)
    best: Plan | None = None
    for _ in range(_ROUNDS):
        solved = solve(speeds)
        plan = on_devices(trace, solved, models)
        if best is None or _slowest_of_mixed_devices(plan) < _slowest_of_mixed_devices(best):
            best = plan
        found = tuple(
            _seconds_on_mixed_devices(before) / _seconds_on_mixed_devices(after)
            if _seconds_on_mixed_devices(after) > 0.0
            else speed
            for before, after, speed in zip(solved.stages, plan.stages, speeds, strict=True)
        )
        if all(abs(new / old - 1.0) < _CLOSE for new, old in zip(found, speeds, strict=True)):
            break
        speeds = found
    assert best is not None, "there is at least one round"
    return best


def on_devices(trace: Trace, plan: Plan, models: Sequence[CostModel]) -> Plan:
    """A plan for the device of `models[0]` with each stage's times on its own device."""
    times = _times_on_mixed_devices(trace, models)
    base = times[models[0].device]
    members: list[list[int]] = [[trace.position(name) for name in stage.recomputed] for stage in plan.stages]
    for name, index in plan.assignment:
        members[index].append(trace.position(name))
    stages = []
    for stage, model, nodes in zip(plan.stages, models, members, strict=True):
        own = times[model.device]
        forward = _ratio_of_mixed_devices(own.forward[nodes].sum(), base.forward[nodes].sum())
        backward = _ratio_of_mixed_devices(own.backward[nodes].sum(), base.backward[nodes].sum())
        again = stage.recompute_time * forward
        stages.append(
            replace(
                stage,
                device=model.device,
                forward_time=stage.forward_time * forward,
                recompute_time=again,
                weight_time=stage.weight_time * backward,
                backward_time=(stage.backward_time - stage.recompute_time) * backward + again,
            )
        )
    return replace(plan, stages=tuple(stages), device=describe([model.device for model in models], plan))


def describe(devices: Sequence[str], plan: Plan) -> str:
    """`2 x H100 SXM, 2 x A100 SXM 80GB`: of the ranks, in their order; `devices` are by stage."""
    by_rank = {stage.rank: device for stage, device in zip(plan.stages, devices, strict=True)}
    runs: list[tuple[str, int]] = []
    for rank in sorted(by_rank):
        if runs and runs[-1][0] == by_rank[rank]:
            runs[-1] = (by_rank[rank], runs[-1][1] + 1)
        else:
            runs.append((by_rank[rank], 1))
    return ", ".join(f"{number} x {device}" for device, number in runs)


def _times_on_mixed_devices(trace: Trace, models: Sequence[CostModel]) -> dict[str, NodeTimes]:
    return {model.device: node_times(trace, model) for model in {model.device: model for model in models}.values()}


def _total_on_mixed_devices(times: NodeTimes) -> float:
    return float(times.forward.sum() + times.backward.sum()) or 1.0


def _ratio_of_mixed_devices(own: float, base: float) -> float:
    return float(own / base) if base > 0.0 else 1.0


def _seconds_on_mixed_devices(stage: Stage) -> float:
    return stage.forward_time + stage.backward_time


def _slowest_of_mixed_devices(plan: Plan) -> float:
    """Seconds of the slowest rank for one microbatch."""
    busy: dict[int, float] = {}
    for stage in plan.stages:
        busy[stage.rank] = busy.get(stage.rank, 0.0) + _seconds_on_mixed_devices(stage)
    return max(busy.values())
