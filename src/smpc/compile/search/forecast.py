"""What is known of shapes and candidates before they are planned: bounds, which no plan is below, and guesses, which say what comes first.

    forecast = Forecast.of(setting, loads, 1)  records the smallest microbatch, from which all that has not been recorded is guessed
    forecast.least(shape)                seconds and bytes that no candidate of a shape is below
    forecast.guessed(candidate, ...)     about what it takes

Both are made of `Sample`s, totals of one microbatch (`smpc.compile.search.estimate`): of the candidate's own, where its load has been
recorded and rewritten, else of the nearest one.

Plans of the candidates of a search, and what their steps take.

planned = plans.planned(candidate, prove=False)     its best contiguous cut for balanced computation
plans.result(candidate, planned)                    its step and its peak
plans.foretold(candidate, least)                    of one that differs in its schedule alone from one that was planned
plans.offloading(candidate, plan)                   the same with less on the device
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from smpc.codegen.offload import resident
from smpc.codegen.rewrite.outputs import keep_outputs
from smpc.codegen.simulate import Costs, chain
from smpc.compile.options import PipelineOptions
from smpc.compile.passes import plan_trace, schedule_plan
from smpc.compile.replica_traffic import Sharding, StepSurroundings
from smpc.compile.result import Planned, Traced
from smpc.compile.search.estimate import (
    EstimatedPlace,
    EstimatedReruns,
    EstimatedSample,
    EstimatedState,
    Guess,
    guess_peak,
    guess_step,
    traffic_of,
)
from smpc.compile.search.least_times import LeastTimes, least_times
from smpc.compile.search.microbatch_profile import Profile
from smpc.compile.search.search_result import Result
from smpc.compile.search.space import (
    Again,
    Candidate,
    Setting,
    Shape,
    Tried,
    candidate_of,
    offloading,
    schedules,
    shardings,
    wire,
)
from smpc.compile.search.working_set import largest_working_set
from smpc.compile.search.workloads import Load, Workloads
from smpc.compile.step_breakdown import StepParts, step_parts
from smpc.errors import ConfigError, PartitionError
from smpc.mesh import Axis
from smpc.partitioner.costs.collective_times import bandwidth, sent_time
from smpc.partitioner.costs.device import Group, best_share
from smpc.partitioner.costs.node_costs import node_times
from smpc.partitioner.graph.plan import Plan
from smpc.partitioner.graph.recompute_regions import kept_bytes, requested_regions
from smpc.partitioner.planner import rank_peaks
from smpc.tracer.ir import Trace

_Key = tuple[Load, bool, Group, Group, Group]


@dataclass
class Forecast:
    """The forecast of one search."""

    setting: Setting
    loads: Workloads
    again: Again  # what may be computed again
    base: dict[str, EstimatedSample]  # of the smallest microbatch, by what is computed again
    base_load: Load
    _leasts: dict[tuple[Load, tuple[str, ...] | None, float, tuple[Group, ...]], LeastTimes] = field(
        default_factory=dict
    )
    _alone: dict[tuple[Load, tuple[str, ...] | None, float], LeastTimes] = field(default_factory=dict)
    _working_sets: dict[tuple[Load, bool, tuple[str, ...] | None], int] = field(default_factory=dict)
    _samples: dict[_Key, EstimatedSample] = field(default_factory=dict)
    _reruns: dict[tuple[_Key, str], EstimatedReruns] = field(default_factory=dict)
    _profiles: dict[Load, Profile] = field(default_factory=dict)
    _places: dict[Shape, tuple[EstimatedPlace, tuple[Group, Group, Group]]] = field(default_factory=dict)
    _states: dict[int, tuple[EstimatedState, EstimatedState]] = field(
        default_factory=dict
    )  # by how many ranks share the experts
    _guesses: dict[tuple[Shape, Load | None, bool], EstimatedSample] = field(default_factory=dict)
    _known_schedules: dict[tuple[int, int], tuple[tuple[str, int], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, setting: Setting, loads: Workloads, size: int) -> Forecast:
        """Records the smallest microbatch, and what of it may be computed again. PartitionError if that cannot be planned."""
        traced = loads.get(Load(size))
        if isinstance(traced, str):
            raise PartitionError(traced)
        trace, options = traced.trace, PipelineOptions(1, device=setting.device, optimizer=setting.optimizer)
        again = Again.of(trace, node_times(trace, options.cost_model).forward.tolist())
        base: dict[str, EstimatedSample] = {}
        for name in again.names:
            first = base.get("model")
            state, profile = (first.state, first.profile) if first else (None, None)
            base[name] = EstimatedSample.of(trace, options.cost_model, again[name], state=state, profile=profile)
        found = cls(setting, loads, again, base, Load(size))
        for name in again.names[1:]:
            found._note_again(trace, base["model"].profile, name)
        return found

    def _note_again(self, trace: Trace, profile: Profile | None, name: str) -> None:
        """What modules that are computed again are in a profile, and the part that they keep of what they save.

        Of ranks that share operations it is a larger part: what a block reads may be whole on each of them, what it saves is in slices.
        """
        assert profile is not None, "a sample of a trace has a profile"
        own = set(trace.regions)
        asked = requested_regions(trace, self.again[name]).regions
        regions = [(region.first, region.last) for region in asked if region not in own]
        less = kept_bytes(trace, trace.regions) - kept_bytes(trace, asked)
        inside = profile.saved_inside(regions)
        profile.compute_again(name, regions, max(0.0, 1.0 - less / inside) if inside else 1.0)

    def least(self, shape: Shape) -> tuple[float, int]:
        """Seconds and bytes that no candidate of a shape is below, by what is known of its microbatches."""
        place = self.place(shape)
        whole, path = self._least(shape)
        pipeline = max(shape.microbatches * whole / shape.pipeline_parallel_degree, path)
        state, experts = self._state(shape.expert_parallel_degree)
        split = shape.tensor_parallel_degree * shape.pipeline_parallel_degree
        kinds = shardings(shape, self.tried.sharding)
        working = self._working_set(shape)
        held = min(state.least(experts, kind, shape, working * shape.tensor_parallel_degree) for kind in kinds)
        traffic = min(traffic_of(state, experts, kind, place) for kind in kinds)
        rate = place.device.memory_bandwidth * best_share(place.device.kernels.memory)
        return pipeline * (1.0 + place.slowdown) + traffic / split / rate, int(max(held / split, working))

    def _state(self, degree: int) -> tuple[EstimatedState, EstimatedState]:
        """What expert-parallel ranks hold of the model: all that is not in experts which they divide, and a share of those; the share."""
        if degree not in self._states:
            try:
                names = [name for experts in self.loads.divided(degree) for name in experts.names]
            except ConfigError:  # there are none: such ranks will be rejected
                names = []
            trace, options = (
                self.loads.traced(self.base_load).trace,
                PipelineOptions(1, optimizer=self.setting.optimizer),
            )
            part = EstimatedState.of(trace, options.cost_model, frozenset(names))
            share = part.times(1.0 / degree)
            whole = self.base["model"].state
            self._states[degree] = EstimatedState.joined(whole.without(part), share), share
        return self._states[degree]

    def _least(self, shape: Shape) -> tuple[float, float]:
        """Seconds of one of its microbatches at least, and of its longest chain: by what it is, if that is known, else by the smallest of
        one rank with its experts.

        Not by another size for as many ranks: these may share out more of a larger one.
        """
        load = Load.of(shape)
        if isinstance(self.loads.known.get(load), Traced):
            least, amount = self._least_times(load, shape), (1.0, 1, 1, 1)
        else:
            base = self._base_of(load.expert)
            least = self._least_times(base, shape)
            amount = load.size / base.size, load.tensor, load.context, load.expert // base.expert
        return least.of(*amount), least.path(*amount, is_split=self._may_split(shape))

    def _may_split(self, shape: Shape) -> bool:
        """Whether a candidate of a shape has backwards in two parts."""
        return any(name.startswith("zb") for name, _ in self._schedules(shape))

    def _base_of(self, expert: int) -> Load:
        """The smallest microbatch of one rank, or of the fewest ranks that divide experts: more of them send as much at least."""
        fewest = min((d for d in self.tried.expert if d > 1 and expert % d == 0), default=1)
        divided = replace(self.base_load, expert=fewest)
        return divided if isinstance(self.loads.get(divided), Traced) else self.base_load

    def _working_set(self, shape: Shape) -> float:
        """Bytes of activations that some rank holds at least, by the smallest microbatch.

        Where attention is made of several operations, context-parallel ranks may have it as one, which holds less.
        """
        base, tensor, context = (
            self._base_of(shape.expert_parallel_degree),
            shape.tensor_parallel_degree,
            shape.context_parallel_degree,
        )
        if context > 1 and not self._least_times(base, shape).is_fused:
            return 0.0
        is_whole, outputs = (
            shape.pipeline_parallel_degree == 1,
            self.loads.outputs(replace(Load.of(shape), size=base.size)),
        )
        if (base, is_whole, outputs) not in self._working_sets:
            self._working_sets[base, is_whole, outputs] = largest_working_set(
                self._trace_for(base, outputs), is_whole=is_whole
            )
        return self._working_sets[base, is_whole, outputs] * shape.microbatch_size / base.size / tensor / context

    def _least_times(self, known: Load, shape: Shape) -> LeastTimes:
        """The least times of a known microbatch, on the wires of a shape; where its ranks return fewer outputs, of what those need."""
        exchanges = self.loads.exchanges(known, shape.mesh)
        outputs = self.loads.outputs(replace(Load.of(shape), size=known.size))
        accumulated = 0.5 if shape.microbatches > 1 else 0.0  # as with the fewest microbatches
        key = known, outputs, accumulated, tuple(group for _, group in exchanges)
        if key not in self._leasts:
            sent = sum(
                (item.forward_bytes + item.backward_bytes) / bandwidth(group, self.setting.device)
                for collectives, group in exchanges
                for item in collectives
                # Where sequences are shared, gradients of parameters that are used whole as well do not grow with the microbatch.
                if not item.overlaps and known.context == 1
            )
            self._leasts[key] = replace(self._least_alone(known, outputs, accumulated), exchanged=sent)
        return self._leasts[key]

    def _least_alone(self, known: Load, outputs: tuple[str, ...] | None, accumulated: float) -> LeastTimes:
        """The same without what is sent."""
        key = known, outputs, accumulated
        if key not in self._alone:
            options = PipelineOptions(1, device=self.setting.device, optimizer=self.setting.optimizer)
            costs = replace(options.cost_model, accumulated=accumulated)
            self._alone[key] = least_times(self._trace_for(known, outputs), costs)
        return self._alone[key]

    def _trace_for(self, known: Load, outputs: tuple[str, ...] | None) -> Trace:
        """A microbatch, with these outputs alone unless they are None."""
        trace = self.loads.traced(known).trace
        return trace if outputs is None else keep_outputs(trace, outputs)

    @functools.cached_property
    def tried(self) -> Tried:
        """What is tried, with what may be computed again."""
        return replace(self.setting.tried, again=self.again.names)

    def num_ways(self, shape: Shape) -> int:
        """Candidates of a shape."""
        return len(self._schedules(shape)) * len(shardings(shape, self.tried.sharding)) * len(self.tried.again)

    def _schedules(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        """The schedules of a shape, which depend on its ranks and microbatches alone."""
        key = shape.pipeline_parallel_degree, shape.microbatches
        if key not in self._known_schedules:
            self._known_schedules[key] = tuple(schedules(shape, self.tried.schedules))
        return self._known_schedules[key]

    def typical(self, shape: Shape) -> list[list[Candidate]]:
        """Candidates by which a shape is judged: with the smallest ramp, and simple ones; of each the last needs the least memory."""
        known = self._schedules(shape)
        kinds = shardings(shape, self.tried.sharding)
        shown = [known[-1], known[0]] if known[-1] != known[0] else known[:1]
        agains = dict.fromkeys((self.tried.again[0], *self.tried.again[-2:]))
        pairs = dict.fromkeys([(self.tried.again[0], kinds[0]), *((again, kinds[-1]) for again in agains)])
        return [[candidate_of(shape, *way, *pair) for pair in pairs] for way in shown]

    def guessed(self, candidate: Candidate, place: EstimatedPlace, plain: EstimatedSample) -> Guess:
        """By the sample of the candidate's load."""
        sample = self._with_reruns(plain, candidate)
        return Guess(guess_step(sample, candidate, place), guess_peak(sample, candidate))

    def guessed_step(self, candidate: Candidate, place: EstimatedPlace, *, hopeful: bool = False) -> float:
        """Seconds by what is known of the smallest microbatch of such ranks, which grow with the microbatch.

        `hopeful`: they grow only as far as their bound does: small products take as long as larger ones.
        """
        sample = self._with_reruns(self._expected(candidate.shape, hopeful=hopeful), candidate)
        return guess_step(sample, candidate, place)

    def guessed_peak(self, candidate: Candidate) -> float:
        """Bytes, by the same."""
        return guess_peak(self._with_reruns(self._expected(candidate.shape, hopeful=False), candidate), candidate)

    def _with_reruns(self, sample: EstimatedSample, candidate: Candidate) -> EstimatedSample:
        """The sample with what the candidate computes again."""
        again = self.base[candidate.recompute]
        return sample if candidate.recompute == "model" else sample.like(self.base["model"], again)

    def _expected(self, shape: Shape, *, hopeful: bool) -> EstimatedSample:
        """What a microbatch of a shape may take whose load is not known, made once for all its candidates."""
        load, base = Load.of(shape), self.base["model"]
        known = self.loads.nearest(load)
        key = shape, known, hopeful
        if key in self._guesses:
            return self._guesses[key]
        if known is not None:
            amount = load.size / known.size
            plain = self.sample(replace(shape, microbatch_size=known.size))
            least = self._least_times(known, shape).of(amount) / (plain.whole or 1.0)
            found = plain.scaled(max(1.0, least) if hopeful else amount, amount, 1.0)
        else:
            tensor, context = shape.tensor_parallel_degree, shape.context_parallel_degree
            amount, held = load.size / self.base_load.size, self._state(shape.expert_parallel_degree)[0].total
            part = amount / tensor / context
            least = self._least(shape)[0] / (base.whole or 1.0)
            found = base.scaled(least if hopeful else part, part, held / max(1, base.state.total) / tensor)
            found = found.longer(self._exchanged(shape, base.cut_bytes * amount))
        self._guesses[key] = found
        return found

    def _exchanged(self, shape: Shape, num_bytes: float) -> float:
        """About what a microbatch's collectives take that were not looked at; `num_bytes`: what a block hands to the next.

        Tensor-parallel ranks gather and scatter that ten times in each block, forward and backward. Context-parallel ranks send keys and
        values around, about as many bytes, three times.
        """
        mesh, device, blocks = shape.mesh, self.setting.device, len(self.again.modules.get("blocks", ()))
        tensor, context = shape.tensor_parallel_degree, shape.context_parallel_degree
        seconds = 0.0
        for axis, size, calls, shared in ((Axis.TP, tensor, 10, context), (Axis.CP, context, 3, tensor)):
            if size > 1:
                sent = num_bytes / shared * (size - 1) / size
                seconds += blocks * calls * sent_time(sent, Group.of(mesh, axis, device), device)
        return seconds

    def sample(self, shape: Shape) -> EstimatedSample:
        """Totals of what a rank of the shape computes, on its wires."""
        load, mesh, device = Load.of(shape), shape.mesh, self.setting.device
        key = self._key(shape)
        if key not in self._samples:
            traced = self.loads.get(load)
            assert isinstance(traced, Traced), "asked for after it was looked at"
            options = PipelineOptions(1, device=device, optimizer=self.setting.optimizer)
            # as with the fewest microbatches
            costs = replace(options.cost_model, accumulated=0.5 if shape.microbatches > 1 else 0.0)
            times = self.loads.times(load, mesh, costs) or node_times(traced.trace, costs)
            known = self._profiles.get(load)
            found = self._samples[key] = EstimatedSample.of(
                traced.trace, costs, (), times, profile=known, experts=traced.experts
            )
            for name in self.again.names:
                if known is None and name != "model":
                    self._note_again(traced.trace, found.profile, name)
                self._reruns[key, name] = EstimatedReruns.of(traced.trace, self.again[name], times)
            assert found.profile is not None, "a sample of a trace has a profile"
            self._profiles[load] = found.profile
        return self._samples[key]

    def reruns(self, shape: Shape, again: str) -> EstimatedReruns:
        """What candidates of a shape compute again."""
        self.sample(shape)
        return self._reruns[self._key(shape), again]

    def _key(self, shape: Shape) -> _Key:
        """What the times of a rank's microbatch depend on."""
        groups = self._laid(shape)[1]
        return Load.of(shape), shape.microbatches > 1, groups[0], groups[1], groups[2]

    def place(self, shape: Shape) -> EstimatedPlace:
        """Where its ranks are."""
        return self._laid(shape)[0]

    def _laid(self, shape: Shape) -> tuple[EstimatedPlace, tuple[Group, Group, Group]]:
        """Its place, and its groups that share operations, sequences and experts: found once, whatever the microbatches are."""
        key = replace(shape, microbatches=1, microbatch_size=1)
        if key not in self._places:
            mesh, device = shape.mesh, self.setting.device
            tensor, context, expert = (Group.of(mesh, axis, device) for axis in (Axis.TP, Axis.CP, Axis.EP))
            around = StepSurroundings.on(mesh, (device,), Sharding.NONE)
            place = EstimatedPlace(wire(device, mesh, Axis.PP), around, device, shape.world_size)
            self._places[key] = place, (tensor, context, expert)
        return self._places[key]


@dataclass
class Plans:
    """The plans of one search. `cuts`: the plans so far, by what their cut depends on."""

    setting: Setting
    loads: Workloads
    again: Again
    cuts: dict[Candidate, Plan] = field(default_factory=dict)
    _residents: dict[tuple[str, int, int, int, int], tuple[int, ...]] = field(default_factory=dict)

    def traced(self, candidate: Candidate) -> Traced:
        """What one rank of each stage runs."""
        return self.loads.traced(Load.of(candidate.shape))

    def options(self, candidate: Candidate, limit: int | None = None) -> PipelineOptions:
        """How it is planned; `limit`: the memory of a rank, by default the search's limit."""
        chosen = self.setting.options(candidate, limit or self.setting.limit, self.again[candidate.recompute])
        return replace(chosen, tensor_parallel_outputs=self.loads.outputs(Load.of(candidate.shape)))

    def planned(self, candidate: Candidate, limit: int | None = None, *, prove: bool) -> Planned:
        """Its plan. MemoryLimitError, PartitionError, ConfigError or CodegenError if it has none."""
        options = self.options(candidate, limit)
        times = self.loads.times(Load.of(candidate.shape), candidate.mesh, options.cost_model)
        traced = replace(self.traced(candidate), times=times)
        return plan_trace(traced, options, prove=prove, around=self._around(candidate))

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

        `plan`: the candidate's; without one, every stage is assumed to have something to offload, and nothing is said of peaks.
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
        traced, again = planned.traced or self.traced(candidate), self.options(candidate).recompute
        return step_parts(traced, planned.plan, planned.timeline, self._around(candidate), again)

    def _around(self, candidate: Candidate) -> StepSurroundings:
        """Where the ranks of a candidate are: its options know the wires of pipelines alone."""
        ranks = (self.setting.device,) * candidate.pipeline_parallel_degree
        return StepSurroundings.on(candidate.mesh, ranks, candidate.sharding)


def _less(plan: Plan, less: Sequence[int]) -> int:
    """The peak of a plan with so many microbatches less on the device, by stage, as if all that they hold went."""
    peaks = [0] * plan.pipeline_parallel_degree
    for stage, number in zip(plan.stages, less, strict=True):
        peaks[stage.rank] += stage.peak_memory_bytes - number * stage.activation_bytes_per_microbatch
    return max(peaks)
