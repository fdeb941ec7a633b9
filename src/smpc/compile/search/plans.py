"""Plans of the candidates of a search, and what their steps take.

planned = plans.planned(candidate, prove=False)     its best contiguous cut for balanced computation
plans.result(candidate, planned)                    its step and its peak
plans.foretold(candidate, least)                    of one that differs in its schedule alone from one that was planned
plans.offloading(candidate, plan)                   the same with less on the device
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from smpc.codegen.offload import resident
from smpc.codegen.simulate import Costs, chain
from smpc.compile.options import PipelineOptions
from smpc.compile.passes import plan_trace, schedule_plan
from smpc.compile.result import Planned, Traced
from smpc.compile.search.result import Result
from smpc.compile.search.space import (
    Again,
    Candidate,
    Setting,
    offloading,
)
from smpc.compile.search.workloads import Load, Workloads
from smpc.compile.step import StepParts, StepSurroundings, step_parts
from smpc.mesh import Axis
from smpc.partitioner.costs.device import Group
from smpc.partitioner.graph.plan import Plan
from smpc.partitioner.solve import rank_peaks


@dataclass
class Plans:
    """Those of one search. `cuts`: the plans so far, by what their cut depends on."""

    setting: Setting
    loads: Workloads
    again: Again
    cuts: dict[Candidate, Plan] = field(default_factory=dict)
    _residents: dict[tuple[str, int, int, int, int], tuple[int, ...]] = field(default_factory=dict)

    def traced(self, candidate: Candidate) -> Traced:
        """What one rank of each stage runs."""
        return self.loads.traced(Load.of(candidate.shape))

    def options(self, candidate: Candidate, limit: int | None = None) -> PipelineOptions:
        """How it is planned; `limit`: the memory of a rank, by default that of the search."""
        chosen = self.setting.options(candidate, limit or self.setting.limit, self.again[candidate.recompute])
        return replace(chosen, tensor_parallel_outputs=self.loads.outputs(Load.of(candidate.shape)))

    def planned(self, candidate: Candidate, limit: int | None = None, *, prove: bool) -> Planned:
        """Its plan. MemoryLimitError, PartitionError, ConfigError or CodegenError if it has none."""
        options = self.options(candidate, limit)
        times = self.loads.times(Load.of(candidate.shape), candidate.mesh, options.cost_model)
        return plan_trace(replace(self.traced(candidate), times=times), options, prove=prove)

    def foretold(self, candidate: Candidate, least: int) -> Result | None:
        """What a candidate takes that differs in its schedule alone from one that was planned: the cut is the same, or a slower one."""
        plan, choice = self.cuts.get(candidate.cut), self.options(candidate).choice
        if plan is None or tuple(stage.rank for stage in plan.stages) != choice.placement:
            return None
        stages = tuple(
            replace(stage, num_in_flight=number) for stage, number in zip(plan.stages, choice.in_flight, strict=True)
        )
        summary = replace(plan.schedule, name=choice.name, active_microbatches=choice.active_microbatches)
        # Without copies: of a candidate that offloads, at least
        foretold = replace(plan, stages=stages, schedule=summary, loading_horizon=0, host_link=None)
        found = self.parts(candidate, schedule_plan(self.traced(candidate).trace, foretold))
        result = Result.of(candidate, found, least)
        return replace(result, peak_is_bound=True, step_is_bound=candidate.offload > 0)

    def offloading(self, candidate: Candidate, plan: Plan | None = None) -> Iterator[tuple[Candidate, int]]:
        """Ways in which fewer microbatches are on the device, each with a peak that none with the same cut is below.

        `plan`: that of the candidate; without, every stage is taken to have something to offload, and nothing is said of peaks.
        """
        checkpoints = (
            [True] * candidate.num_stages if plan is None else [bool(stage.checkpoints) for stage in plan.stages]
        )
        if not any(checkpoints):
            return
        now, other = self._resident(candidate), offloading(candidate)
        while other is not None:
            pairs = zip(now, self._resident(other), checkpoints, strict=True)
            less = [(a - b) * moves for a, b, moves in pairs]
            if max(less) > 0:
                yield other, 0 if plan is None else _less(plan, less)
            other = offloading(other)

    def _resident(self, candidate: Candidate) -> tuple[int, ...]:
        """By stage, microbatches that are on the device at most."""
        ranks, pieces = candidate.pipeline_parallel_degree, candidate.virtual_pipeline_degree
        key = candidate.schedule, ranks, pieces, candidate.microbatches, candidate.offload
        if key not in self._residents:
            choice = self.options(candidate).choice
            number = len(choice.placement)
            found = choice.in_flight
            if candidate.offload:
                schedule = choice.build(chain(number), Costs.uniform(number))
                found = tuple(stage.most for stage in resident(schedule, number, candidate.offload))
            self._residents[key] = tuple(found)
        return self._residents[key]

    def result(self, candidate: Candidate, planned: Planned) -> Result:
        """What a plan takes."""
        return Result.of(candidate, self.parts(candidate, planned), max(rank_peaks(planned.plan).values()))

    def parts(self, candidate: Candidate, planned: Planned) -> StepParts:
        """Where the time of a plan's step goes."""
        device, mesh = self.setting.device, candidate.mesh
        ranks = (device,) * candidate.pipeline_parallel_degree
        around = StepSurroundings.on(mesh, ranks, candidate.sharding)
        if candidate.expert_parallel_degree > 1:
            around = replace(around, experts=Group.of(mesh, Axis.EP, device))
        traced = planned.traced or self.traced(candidate)
        return step_parts(traced, planned.plan, planned.timeline, around, self.options(candidate).recompute)


def _less(plan: Plan, less: Sequence[int]) -> int:
    """The peak of a plan with so many microbatches less on the device, by stage, as if all that they hold went."""
    peaks = [0] * plan.pipeline_parallel_degree
    for stage, number in zip(plan.stages, less, strict=True):
        peaks[stage.rank] += stage.peak_memory_bytes - number * stage.activation_bytes_per_microbatch
    return max(peaks)
