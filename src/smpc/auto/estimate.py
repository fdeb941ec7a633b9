"""How long a step of a candidate takes, and what it and its memory are at least.

The step of replicas is that of the pipeline (its simulated timeline), what is left of the sum of gradients, and the optimizer's, which
starts when all ranks have come to the end of the step:

    | forwards and backwards of all microbatches          |
                          | last backward of a stage  |
                          | sum over replicas, in buckets ... | last bucket | optimizer: reads and writes its state once |

Gradients of a stage are summed in buckets from its last backward on, one stage of a rank after the other. With n bytes on d
replicas over wires of bandwidth w and latency l that takes

    2 n (d - 1) / d / w + 2 l ceil(log2 d)           a ring for the bytes, a tree for the latency

and ends no sooner than one bucket after the backward that made the last gradient.

Example: 100 MB on 4 replicas over 50 GB/s: 2 * 100e6 * 3/4 / 50e9 s = 3 ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from smpc.auto.space import Candidate
from smpc.codegen.program import Op
from smpc.codegen.simulate import Timeline
from smpc.partitioner.analysis import analyse
from smpc.partitioner.cost import CostModel, NodeTimes
from smpc.partitioner.device import Wire
from smpc.partitioner.memory import distinct_state
from smpc.partitioner.optimizer import Optimizer
from smpc.partitioner.plan import Plan, Stage
from smpc.partitioner.problem import FloatArray
from smpc.tracer.ir import Trace

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: of the pipeline alone, what summing gradients adds, what the optimizer adds."""

    pipeline: float
    reduce: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.pipeline + self.reduce + self.optimizer


def all_reduce_time(num_bytes: float, num_replicas: int, wire: Wire) -> float:
    """Seconds to sum so many bytes over replicas: see the module docstring."""
    if num_replicas == 1:
        return 0.0
    ring = 2 * num_bytes * (num_replicas - 1) / num_replicas / wire.bandwidth
    return ring + 2 * wire.latency * math.ceil(math.log2(num_replicas))


def step_time(plan: Plan, timeline: Timeline, num_replicas: int, wire: Wire, memory_bandwidth: float) -> StepTime:
    """Seconds of a step of a plan with so many replicas."""
    computed, summed, updated = [], [], []
    for rank in range(plan.pipeline_parallel_degree):
        stages = [stage for stage in plan.stages if stage.rank == rank]
        end = max((event.end for event in timeline.events if event.rank == rank), default=0.0)
        computed.append(end)
        summed.append(max(end, _reduced(stages, timeline, num_replicas, wire)) if num_replicas > 1 else end)
        traffic = (optimizer_traffic(s.parameter_bytes, s.gradient_bytes, s.optimizer_bytes) for s in stages)
        updated.append(sum(traffic) / memory_bandwidth)
    pipeline = max(computed)
    return StepTime(pipeline, max(summed) - pipeline, max(updated))


def _reduced(stages: Sequence[Stage], timeline: Timeline, num_replicas: int, wire: Wire) -> float:
    """When the gradients of a rank's stages are summed."""
    last = {}
    for event in timeline.events:
        if event.action.op in (Op.BACKWARD, Op.WEIGHT):
            last[event.action.stage] = event  # events are in order of their start
    free = 0.0
    for stage in sorted(stages, key=lambda stage: (last[stage.index].end, stage.index)):
        event, num_bytes = last[stage.index], stage.gradient_bytes
        whole = all_reduce_time(num_bytes, num_replicas, wire)
        bucket = all_reduce_time(min(num_bytes, BUCKET_BYTES), num_replicas, wire)
        free = max(event.end + bucket, max(event.start, free) + whole)
    return free


def optimizer_traffic(parameter_bytes: int, gradient_bytes: int, state_bytes: int) -> int:
    """Bytes that the optimizer moves: gradients are read, parameters and state read and written."""
    return 2 * parameter_bytes + gradient_bytes + 2 * state_bytes


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of the state of a whole model."""

    kept_bytes: int  # parameters, buffers and what the optimizer keeps
    gradient_bytes: int
    optimizer_traffic: int  # what the optimizer reads and writes in a step

    @classmethod
    def of(cls, trace: Trace, cost_model: CostModel) -> State:
        """That of a trace's model."""
        kept = gradients = traffic = 0
        for spec in distinct_state(trace, range(len(trace.state))):
            own, state, gradient = (
                spec.spec.num_bytes,
                cost_model.optimizer_bytes(spec),
                cost_model.gradient_bytes(spec),
            )
            kept, gradients = kept + own + state, gradients + gradient
            traffic += optimizer_traffic(own, gradient, state) if spec.is_parameter else 0
        return cls(kept, gradients, traffic)


@dataclass(frozen=True)
class Sample:
    """One recorded microbatch, in totals of the whole model."""

    trace: Trace
    recompute: tuple[str, ...]
    forward: float
    backward: float
    path: float  # forward and backward of the longest chain of nodes
    forward_path: float  # forward of the longest chain by forwards
    activation_bytes: int
    states: dict[Optimizer, State] = field(
        default_factory=dict, repr=False, compare=False
    )  # by what was asked for so far

    @classmethod
    def of(
        cls, trace: Trace, cost_model: CostModel, recompute: Sequence[str], times: NodeTimes | None = None
    ) -> Sample:
        """The totals of a trace, with these modules computed again in the backward; `times` replace the predicted ones."""
        analysis = analyse(trace, cost_model, times, recompute)
        times, units = analysis.times, analysis.units
        return cls(
            trace,
            tuple(recompute),
            float(times.forward.sum()),
            float(times.backward.sum()),
            _longest(trace, times.forward + times.backward),
            _longest(trace, times.forward),
            sum(units.activation_bytes) + sum(item.activation_bytes for item in units.shared),
        )

    def state(self, cost_model: CostModel) -> State:
        """The state of the whole model, with this optimizer."""
        found = self.states.get(cost_model.optimizer)
        if found is None:
            found = self.states[cost_model.optimizer] = State.of(self.trace, cost_model)
        return found

    def least_peak(self, candidate: Candidate, cost_model: CostModel) -> int:
        """Bytes that some rank holds at least: all that is held at once, shared out evenly."""
        state = self.state(cost_model)
        held = state.kept_bytes + max(state.gradient_bytes, self.activation_bytes)
        return held // candidate.pipeline_parallel_degree

    def least_step(self, candidate: Candidate, cost_model: CostModel, wire: Wire) -> float:
        """Seconds that no plan of the candidate is below."""
        p, m, whole = candidate.pipeline_parallel_degree, candidate.microbatches, self.forward + self.backward
        pipeline = m * whole / p
        if candidate.virtual_pipeline_degree == 1:
            # The last rank, with t for a microbatch, works for m t, after and before what the others do on the longest chain:
            # path + (m - 1) t. The others have m (whole - t) / (p - 1) at least. The larger of both is smallest where they are equal.
            # Backwards that are split need not wait for each other at the end
            path = self.path if candidate.schedule in ("1f1b", "gpipe") else self.forward_path
            t = max(0.0, (m * whole - (p - 1) * path) / ((m - 1) * (p - 1) + m))
            pipeline = max(pipeline, path + (m - 1) * t)
        if candidate.virtual_pipeline_degree == 1:
            bytes_only = replace(wire, latency=0.0)
            reduce = all_reduce_time(
                self.state(cost_model).gradient_bytes / p, candidate.data_parallel_degree, bytes_only
            )
            pipeline = max(pipeline, (m * whole - self.backward) / p + reduce)
        return pipeline + self.least_optimizer(candidate, cost_model)

    def least_optimizer(self, candidate: Candidate, cost_model: CostModel) -> float:
        """Seconds of the optimizer where every rank has as much to do."""
        return (
            self.state(cost_model).optimizer_traffic / candidate.pipeline_parallel_degree / cost_model.memory_bandwidth
        )


def _longest(trace: Trace, seconds: FloatArray) -> float:
    """Of the chains of nodes that lead to the model's outputs."""
    longest: dict[str, float] = {}
    for node, own in zip(trace.nodes, seconds.tolist(), strict=True):
        longest[node.name] = own + max((longest[name] for name in node.inputs), default=0.0)
    return max((longest[name] for name in trace.output_names), default=0.0)
