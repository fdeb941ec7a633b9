"""Estimates of a candidate's step and memory before there is a plan: bounds, which prune, and guesses, which say what to try first.

`least_step` and `least_peak` are bounds: no plan is below them. `guess_step` and `guess_peak` are no bounds. A step is assumed to take as
long as on p balanced ranks (`balanced`), plus what the busiest one has more. With F, I and W, a rank's forward and the two parts of its
backward B for one of m microbatches, they compute m (F + B), and wait for

    1f1b, gpipe         (p - 1) (F + B)
    interleaved-1f1b    (p - 1) (F + B) / v
    zb-h1               (p - 1) max(F, F + I - W)
    zb-h2               (p - 1) max(F, F + I - 2 W)                  with m >= 3 p / 2, else as zb-h1
    zb-v                (p - 1) max(F / 2, I / 2, I - W)             with m >= 2 p - 1, else (p - 1) max(F / 2, I - W / 2)

What the busiest rank computes, and what the fullest one holds, comes from a cut in closed form (`smpc.compile.search.microbatch_profile`).
`smpc.compile.step_breakdown` says how long the step of a plan is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from smpc.compile.replica_traffic import ExchangedUnit, Sharding, StepSurroundings, exchange_of_units, units_in_time
from smpc.compile.search.microbatch_profile import Held, Profile, Stages, in_flight, placement
from smpc.compile.search.space import Candidate, Shape
from smpc.compile.search.split_uses import splits
from smpc.compile.step_breakdown import BUCKET_BYTES
from smpc.config.keep import MOST_PARAMETERS, SMALL_PARAMETERS
from smpc.partitioner.costs.collective_times import CollectiveKind, collective_time, least_time
from smpc.partitioner.costs.device import Device, Group, Wire
from smpc.partitioner.costs.node_costs import CostModel, NodeTimes, weight_times
from smpc.partitioner.graph.recompute_regions import requested_regions
from smpc.partitioner.memory.peak import distinct_state
from smpc.partitioner.solvers.coarsen import analyse, chain_problem
from smpc.partitioner.stage_costs import FloatArray, Scale
from smpc.tracer.ir import Trace


@dataclass(frozen=True, slots=True)
class EstimatedState:
    """Bytes of the state of a whole model, without replicas."""

    parameters: int
    buffers: int
    optimizer: int
    gradients: int

    @classmethod
    def of(cls, trace: Trace, cost_model: CostModel, names: Collection[str] | None = None) -> EstimatedState:
        """The state of a trace's model; `names`: of these tensors alone."""
        parameters = buffers = optimizer = gradients = 0
        for spec in distinct_state(trace, range(len(trace.state))):
            if names is not None and not any(name in names for name in spec.names):
                continue
            parameters += spec.spec.num_bytes if spec.is_parameter else 0
            buffers += 0 if spec.is_parameter else spec.spec.num_bytes
            optimizer += cost_model.optimizer_bytes(spec)
            gradients += cost_model.gradient_bytes(spec)
        return cls(parameters, buffers, optimizer, gradients)

    @property
    def _parts(self) -> tuple[int, int, int, int]:
        return self.parameters, self.buffers, self.optimizer, self.gradients

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self._parts)

    @classmethod
    def joined(cls, one: EstimatedState, other: EstimatedState) -> EstimatedState:
        """Both together."""
        return cls(*(a + b for a, b in zip(one._parts, other._parts, strict=True)))

    def times(self, factor: float) -> EstimatedState:
        """So many times as much."""
        return EstimatedState(*(round(part * factor) for part in self._parts))

    def without(self, part: EstimatedState) -> EstimatedState:
        """All but a part of it."""
        return EstimatedState(*(whole - some for whole, some in zip(self._parts, part._parts, strict=True)))

    def least(self, experts: EstimatedState, sharding: Sharding, shape: Shape, activations: float = 0.0) -> float:
        """Bytes that all ranks of a pipeline hold at least, at some time of a step. Where blocks gather their own, others are in parts.

        `experts`: what of it is in experts that ranks divide.
        """
        shares = (self.without(experts), shape.num_holders), (experts, shape.num_expert_holders)
        if sharding is Sharding.FULL and shape.runs_as_it_is:
            held = sum((own.parameters + own.optimizer) / size for own, size in shares) + self.buffers
            return held + max(sum(own.gradients / size for own, size in shares), activations)
        (others, size), (own, same) = shares
        held = others.kept(sharding, size) + own.kept(sharding, same, has_buckets=False)
        return held + max(self.gradients, activations)

    def kept(self, sharding: Sharding, size: int, *, has_buckets: bool = True) -> float:
        """Bytes that all ranks of a pipeline hold all through a step, gradients left out; `size`: ranks that hold the same parameters. Of
        experts there are no buckets."""
        if sharding is Sharding.FULL:
            return self.parameters * (1 + 1 / size) + self.buffers + self.optimizer / size
        if size == 1:
            return self.parameters + self.buffers + self.optimizer
        share = size if sharding is Sharding.STATE else 1
        return self.parameters + self.buffers + self.optimizer / share + (self.gradients if has_buckets else 0)

    def traffic(self, sharding: Sharding, size: int) -> float:
        """Bytes that the optimizer reads and writes; `size`: ranks that sum gradients."""
        moved = 2 * self.parameters + self.gradients + 2 * self.optimizer
        return moved / (1 if sharding is Sharding.NONE else size)


@dataclass(frozen=True, slots=True)
class EstimatedPlace:
    """Where the ranks of a shape are: what its pipelines send over, and the groups that share parameters."""

    link: Wire
    around: StepSurroundings
    device: Device
    num_devices: int

    @property
    def replicas(self) -> Group:
        """Ranks with the same parameters."""
        return self.around.replicas

    @property
    def slowdown(self) -> float:
        """How much longer all devices take than one."""
        return self.device.slowdown(self.num_devices)


def traffic_of(state: EstimatedState, experts: EstimatedState, sharding: Sharding, place: EstimatedPlace) -> float:
    """Bytes that the optimizer reads and writes; `experts`: what of the state is in experts that ranks divide."""
    shares = (state.without(experts), False), (experts, True)
    return sum(own.traffic(sharding, place.around.holders(of_experts=kind).every.size) for own, kind in shares)


@dataclass(frozen=True)
class EstimatedSample:
    """One microbatch in totals of the whole model, in seconds and bytes."""

    forward: float
    backward: float
    weight: float  # of the backward, what may wait
    path: float  # forward and backward of the longest chain of nodes
    split_path: float  # of the longest chain, with backwards for inputs alone
    activation_bytes: float
    cut_bytes: float  # what crosses the cheapest cut
    state: EstimatedState
    launches: tuple[float, float] = (
        0.0,
        0.0,
    )  # seconds of forwards and of backwards that are kernels' launches, however small they are
    profile: Profile | None = None  # operation by operation, from which guesses are made
    memory: float = 1.0  # times the activations of `profile`
    size: float = 1.0  # times its state
    experts: EstimatedState = EstimatedState(0, 0, 0, 0)  # of the state, what is in experts that ranks divide
    units: tuple[ExchangedUnit, ...] = ()  # of the model as it is, of the size of `profile`

    @classmethod
    def of(
        cls,
        trace: Trace,
        cost_model: CostModel,
        recompute: Sequence[str] = (),
        times: NodeTimes | None = None,
        state: EstimatedState | None = None,
        profile: Profile | None = None,
        experts: frozenset[str] = frozenset(),
    ) -> EstimatedSample:
        """The totals of a trace, with these modules computed again in the backward; `times` replace the predicted ones.

        `profile`: the trace's, if there is one already; `experts`: parameters of experts that ranks divide, by name.
        """
        analysis = analyse(trace, cost_model, times, recompute)
        times, units, graph = analysis.times, analysis.units, analysis.graph
        chain = chain_problem(graph, analysis.clusters, analysis.recomputable, units, Scale(0.0, 1, 1.0), (1,))
        middle = np.asarray(chain.cut_bytes[1:])[len(chain.cut_bytes) // 8 : -len(chain.cut_bytes) // 8 or None]
        once, regions = analysis.times_once.backward, analysis.checkpoints.regions
        waits = weight_times(trace, once, regions)
        return cls(
            float(times.forward.sum()),
            float(times.backward.sum()),
            float(waits.sum()),
            _estimated_longest_chain(trace, times.forward + times.backward),
            _estimated_longest_chain(trace, times.forward + times.backward - waits),
            sum(units.activation_bytes) + sum(item.activation_bytes for item in units.shared),
            float(middle.min()) if middle.size else 0.0,
            state or EstimatedState.of(trace, cost_model),
            (
                float(np.count_nonzero(times.forward)) * cost_model.kernels.launch,
                float(np.count_nonzero(times.backward)) * cost_model.kernels.launch,
            ),
            profile or Profile.of(analysis, chain, experts),
            experts=EstimatedState.of(trace, cost_model, experts),
            units=units_in_time(
                trace,
                [state for state in trace.state if state.is_parameter],
                times,
                experts,
                (SMALL_PARAMETERS, MOST_PARAMETERS),
            ),
        )

    @property
    def whole(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def scaled(self, time: float, memory: float, state: float) -> EstimatedSample:
        """About what it is where times, activations and state are so many times as much."""
        forward, backward = (
            max(least, least + (seconds - least) * time)
            for least, seconds in zip(self.launches, (self.forward, self.backward), strict=True)
        )
        longer = (forward + backward) / self.whole if self.whole else 1.0
        return replace(
            self,
            forward=forward,
            backward=backward,
            weight=self.weight * longer,
            path=self.path * longer,
            split_path=self.split_path * longer,
            activation_bytes=self.activation_bytes * memory,
            cut_bytes=self.cut_bytes * memory,
            state=self.state.times(state),
            experts=self.experts.times(state),
            memory=self.memory * memory,
            size=self.size * state,
        )

    def traffic(self, sharding: Sharding, place: EstimatedPlace) -> float:
        """Bytes that the optimizer reads and writes."""
        return traffic_of(self.state, self.experts, sharding, place)

    def stages(self, candidate: Candidate) -> Stages | None:
        """The stages of a candidate, for one microbatch of the profile's size; None: there are not as many pieces."""
        assert self.profile is not None, "a sample of a trace has a profile"
        return self.profile.stages(candidate.recompute, candidate.num_stages)

    def longer(self, seconds: float) -> EstimatedSample:
        """The sample with so many more seconds in the backward."""
        paths = self.path + seconds, self.split_path + seconds
        return replace(self, backward=self.backward + seconds, path=paths[0], split_path=paths[1])

    def like(self, before: EstimatedSample, after: EstimatedSample) -> EstimatedSample:
        """About what it is with something computed again, if that makes one sample of the same model another."""
        seconds = (after.backward / before.backward - 1.0) * self.backward if before.backward else 0.0
        weight = self.weight * (after.weight / before.weight if before.weight else 1.0)
        split = self.split_path + self.weight - weight
        kept = after.activation_bytes / before.activation_bytes if before.activation_bytes else 1.0
        found = replace(self, weight=weight, split_path=split, activation_bytes=self.activation_bytes * kept)
        return found.longer(seconds)


@dataclass(frozen=True, slots=True)
class EstimatedReruns:
    """What is computed again of a microbatch: for each region, the seconds of all of it, and of its forward."""

    regions: FloatArray  # [2, number of regions]
    whole: float  # seconds of the microbatch

    @classmethod
    def of(cls, trace: Trace, modules: Sequence[str], times: NodeTimes) -> EstimatedReruns:
        """The reruns of a trace with these modules computed again."""
        regions = requested_regions(trace, tuple(modules)).regions
        once = np.cumsum(np.append(0.0, times.forward)), np.cumsum(np.append(0.0, times.backward))
        first, last = (np.asarray([getattr(region, end) for region in regions], dtype=int) for end in ("first", "last"))
        forward, backward = (column[last] - column[first] for column in once)
        return cls(np.stack([2 * forward + backward, forward]), float(once[0][-1] + once[1][-1] + forward.sum()))

    def at_least(self, num_stages: int) -> float:
        """Seconds that they add, cut in so many stages: what fits into a stage's share of the time is never cut, and runs again."""
        whole = self.regions[1][self.regions[0] <= self.whole / num_stages * (1 - 1e-9)]
        return float(whole.sum()) if len(whole) >= num_stages else 0.0


def least_peak(sample: EstimatedSample, candidate: Candidate) -> int:
    """Bytes that some rank holds at least: all that is held at once, shared out evenly."""
    held = sample.state.least(sample.experts, candidate.sharding, candidate.shape, sample.activation_bytes)
    return int(held // candidate.pipeline_parallel_degree)


def least_step(sample: EstimatedSample, candidate: Candidate, place: EstimatedPlace, again: float = 0.0) -> float:
    """Seconds that no plan of the candidate is below; `again`: what it computes again of a microbatch, if the sample has none of that."""
    p, m, whole = candidate.pipeline_parallel_degree, candidate.microbatches, sample.whole + again
    # Backwards that are split need not wait for each other at the end
    path = sample.split_path if candidate.schedule.startswith("zb") else sample.path
    pipeline = max(m * whole / p, path)
    reduced = 0.0
    if candidate.virtual_pipeline_degree == 1:
        # The last rank, with t for a microbatch, works for m t, after and before what the others do on the longest chain:
        # path + (m - 1) t. The others have m (whole - t) / (p - 1) at least. The larger of both is smallest where they are equal.
        t = max(0.0, (m * whole - (p - 1) * path) / ((m - 1) * (p - 1) + m))
        pipeline = max(pipeline, path + (m - 1) * t)
        num_bytes = (sample.state.gradients - sample.experts.gradients) / p
        kind = CollectiveKind.REDUCE_SCATTER if candidate.sharding is Sharding.FULL else CollectiveKind.ALL_REDUCE
        reduced = (m * whole - sample.backward - again) / p + least_time(kind, num_bytes, place.replicas, place.device)
    waiting = pipeline * place.slowdown
    traffic = sample.traffic(candidate.sharding, place) / p
    return max(pipeline, reduced) + waiting + place.device.kernels.memory_time(traffic, place.device.memory_bandwidth)


@dataclass(frozen=True, slots=True)
class Guess:
    """About how long a step is, in seconds, and about what the fullest rank holds, in bytes."""

    step: float
    peak: float


def guess_step(sample: EstimatedSample, candidate: Candidate, place: EstimatedPlace) -> float:
    """About how many seconds a step of a candidate takes: see the module docstring."""
    p, m, v = candidate.pipeline_parallel_degree, candidate.microbatches, candidate.virtual_pipeline_degree
    stages = sample.stages(candidate)
    busiest = 1.0 / p if stages is None else stages.share(p, placement(candidate.schedule, p, v))
    message = place.link.latency + sample.cut_bytes / place.link.rate
    rank = sample.forward / p, (sample.backward - sample.weight) / p, sample.weight / p
    pipeline = balanced(candidate.schedule, (p, v, m), *rank) + m * sample.whole * (busiest - 1.0 / p)
    pipeline += 2 * (p * v - 1) * message if p > 1 else 0.0
    step = pipeline * (1.0 + place.slowdown) + _estimated_exchange(sample, candidate, place)
    traffic = sample.traffic(candidate.sharding, place) / p
    return step + traffic / place.device.memory_bandwidth


def guess_peak(sample: EstimatedSample, candidate: Candidate) -> float:
    """About how many bytes the fullest rank holds. One with more stages than pieces has no plan, and no memory is enough."""
    p, m, v = candidate.pipeline_parallel_degree, candidate.microbatches, candidate.virtual_pipeline_degree
    shape, profile, stages = candidate.shape, sample.profile, sample.stages(candidate)
    if profile is None or stages is None:
        return math.inf
    same = shape.num_holders, shape.num_expert_holders
    held = Held(
        m, candidate.sharding, *same, profile.scratch, profile.buckets, profile.early, sample.memory, sample.size
    )
    numbers = candidate.schedule, p, v, m
    return stages.peak(in_flight(*numbers), placement(candidate.schedule, p, v), held, splits(*numbers))


def balanced(schedule: str, numbers: tuple[int, int, int], forward: float, inputs: float, weight: float) -> float:
    """Seconds of a step of balanced ranks, each of which takes so long for a microbatch: see the module docstring.

    numbers: ranks, stages of each, microbatches. With few microbatches it is the way of the first one, and what the others add to it.
    """
    p, v, m = numbers
    whole = forward + inputs + weight
    match schedule:
        case "zb-h1" | "zb-h2":
            early = schedule == "zb-h1" or 2 * m < 3 * p
            ramp = max(forward, forward + inputs - (weight if early else 2 * weight))
            first, others = p * (forward + inputs) + weight, forward + max(inputs, weight)
        case "zb-v":
            late = m >= 2 * p - 1
            ramp = max(forward, inputs, 2 * (inputs - weight)) / 2 if late else max(forward / 2, inputs - weight / 2)
            first, others = p * (forward + inputs) + weight / 2, max(forward, inputs)
        case _:
            ramp = whole / v
            first, others = p * whole, whole / v
    return max(m * whole + (p - 1) * ramp, first + (m - 1) * others)


def _estimated_exchange(sample: EstimatedSample, candidate: Candidate, place: EstimatedPlace) -> float:
    """Seconds of the sum of gradients and the gathers of parameters that nothing hides."""
    p, group, device, state = candidate.pipeline_parallel_degree, place.replicas, place.device, sample.state
    if group.size == 1:
        return 0.0
    if candidate.sharding is Sharding.FULL:
        return _estimated_parts(sample, candidate, place)
    experts = sample.experts.gradients / p
    others = state.gradients / p - experts
    kind = CollectiveKind.ALL_REDUCE
    whole, bucket = (collective_time(kind, size, group, device) for size in (others, min(others, BUCKET_BYTES)))
    found = max(bucket, whole - sample.backward / p)
    found += collective_time(kind, experts, place.around.holders(of_experts=True).every, device)
    if candidate.sharding is Sharding.STATE:
        found += collective_time(CollectiveKind.ALL_GATHER, state.parameters / p, group, device)
    return found


def _estimated_parts(sample: EstimatedSample, candidate: Candidate, place: EstimatedPlace) -> float:
    """The same where parameters are in parts: the first microbatch waits for the gathers of all stages, the last one for their sums."""
    if candidate.shape.runs_as_it_is:
        larger = sample.state.parameters / max(1.0, sum(unit.parameters for unit in sample.units))
        wider = sample.state.gradients / max(1.0, sum(unit.gradients for unit in sample.units))
        units = [
            replace(unit, parameters=unit.parameters * larger, gradients=unit.gradients * wider)
            for unit in sample.units
        ]
        seconds = sample.forward, sample.backward
        return exchange_of_units(units, place.around, place.device, seconds=seconds).in_step(candidate.microbatches)
    number = candidate.num_stages
    shares = (sample.state.without(sample.experts), False), (sample.experts, True)
    units = [
        ExchangedUnit(own.parameters / number, own.gradients / number, is_apart=kind)
        for own, kind in shares
        if own.parameters
    ]
    return number * exchange_of_units(units, place.around, place.device).in_step(candidate.microbatches)


def _estimated_longest_chain(trace: Trace, seconds: FloatArray) -> float:
    """Seconds of the longest chain of nodes that leads to the model's outputs."""
    longest: dict[str, float] = {}
    for node, own in zip(trace.nodes, seconds.tolist(), strict=True):
        longest[node.name] = own + max((longest[name] for name in node.inputs), default=0.0)
    return max((longest[name] for name in trace.output_names), default=0.0)
