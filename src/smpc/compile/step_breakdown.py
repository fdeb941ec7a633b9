"""Where the time of a training step goes, on the average of the ranks; the parts add up to the whole.

    | gathers | forwards and backwards of all microbatches, and waiting     |
                                            | last backward of a stage  |
                                            | sum over replicas, in buckets ... | last bucket | optimizer | parameters |

    compute     operations, with what is computed again
    bubble      a rank waits for others: for the pipeline to fill and drain, for messages, for slower stages
    waiting     all wait for the slowest of so many devices
    tensor      collectives of tensor-parallel ranks, forward and backward
    data        the part of summing gradients and gathering parameters that no computation hides
    context     collectives over parts of a sequence
    expert      collectives that bring tokens to experts
    offload     the part of the copies to the host and back that makes the step longer (`smpc.codegen.offload`)
    optimizer   reads and writes parameters, gradients and state once
    executor    what the runtime does beside operations and messages, of devices that say how long that takes: for each action, for calls
                whose backward is in two parts, for each step, and for units in parts where the model runs as it is

Gradients of a stage are summed in buckets from its last backward on, one stage of a rank after the other, and that ends no sooner than
one bucket after the backward that made the last gradient. Gradients of experts that ranks divide are summed when all else is done, over the
ranks that have the same ones. Replicas that share the optimizer's state gather the new parameters when it is done; what replicas that share
parameters gather and sum is in the timeline (`smpc.compile.replica_traffic`). How long a collective takes:
`smpc.partitioner.costs.collective_times`.

`useful` is the seconds that the FLOPs of forward and backward, each once, take at the peaks of their dtypes, so useful / total is the MFU.
A causal attention counts with half of its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from smpc.codegen.program import Op
from smpc.codegen.rewrite.context_parallel.rewrite import collectives_of
from smpc.codegen.simulate import Timeline
from smpc.compile.replica_traffic import Sharding, StepSurroundings, parameters_of_stages
from smpc.compile.result import Traced
from smpc.partitioner.costs.collective_times import CollectiveKind, collective_time
from smpc.partitioner.costs.device import Device, Kernels, at
from smpc.partitioner.costs.node_costs import collective_times, useful_times
from smpc.partitioner.graph.plan import Plan, Stage
from smpc.partitioner.graph.recompute_regions import recompute_depths, requested_regions
from smpc.partitioner.memory.sharded_blocks import traced_units
from smpc.tracer.ir import NodeKind, Trace

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step, by part: see the module docstring. `amount` and `unit`: what all ranks together process in it."""

    compute: float
    bubble: float
    tensor: float
    data: float
    optimizer: float
    context: float = 0.0
    expert: float = 0.0
    waiting: float = 0.0
    executor: float = 0.0
    offload: float = 0.0
    useful: float = 0.0
    amount: int = 0
    unit: str = "samples"
    devices: int = 1
    ranks: tuple[float, ...] = field(default=(), compare=False)  # seconds until each pipeline rank is done

    @property
    def pipeline(self) -> float:
        """Seconds of forwards, backwards and waiting for whatever."""
        parts = (
            self.compute,
            self.bubble,
            self.waiting,
            self.tensor,
            self.context,
            self.expert,
            self.executor,
            self.offload,
        )
        return sum(parts)

    @property
    def total(self) -> float:
        """All of it."""
        return self.pipeline + self.data + self.optimizer

    @property
    def mfu(self) -> float:
        """The share of the peak that useful FLOPs get."""
        return self.useful / self.total if self.total else 0.0

    @property
    def rate(self) -> float:
        """Tokens or samples for each device and second."""
        return self.amount / self.total / self.devices if self.total else 0.0


def step_parts(
    traced: Traced, plan: Plan, timeline: Timeline, around: StepSurroundings, recompute: Sequence[str] = ()
) -> StepParts:
    """The parts of a plan's step."""
    microbatches, num_ranks = plan.schedule.num_microbatches, plan.pipeline_parallel_degree
    ends = rank_ends(plan, timeline, around, traced)
    pipeline = timeline.makespan
    exchanged = sum(stage.exchange.in_step(microbatches) for stage in plan.stages if stage.exchange) / num_ranks
    busy = sum(timeline.busy) / num_ranks - exchanged
    shares = (microbatches * seconds / num_ranks for seconds in _exchange_seconds_of_step(traced, around, recompute))
    tensor, expert, context = shares
    kernels = around.devices[0].kernels
    inside = min(busy, microbatches * _executor_seconds_of_step(plan, timeline, kernels) / num_ranks)
    num_devices = num_ranks * around.tensor.size * around.replicas.size
    slowdown = around.devices[0].slowdown(num_devices)
    useful = microbatches * float(useful_times(traced.trace, around.devices[0]).sum()) / num_ranks
    amount, unit = _amount_in_step(traced.trace)
    return StepParts(
        max(0.0, busy - inside - tensor - expert - context),
        pipeline - busy - exchanged - timeline.stalled,
        min(tensor, busy),
        exchanged + max(ends.summed) - pipeline + ends.gathered,
        max(ends.updated),
        expert=min(expert, busy),
        context=min(context, max(0.0, busy - tensor)),
        waiting=(pipeline - exchanged) * slowdown,
        executor=inside
        + kernels.step
        + _agreement_seconds(around)
        + sum(
            at(kernels.unit_step, size) + microbatches * at(kernels.unit, size) for size in _units(traced, plan, around)
        ),
        offload=timeline.stalled,
        useful=useful,
        amount=amount * microbatches * around.replicas.size // around.context.size,
        unit=unit,
        devices=num_devices,
        ranks=ends.summed,
    )


@dataclass(frozen=True, slots=True)
class Ends:
    """By rank: when its gradients are summed, and seconds of its optimizer; seconds of gathering that nothing hides."""

    summed: tuple[float, ...]
    updated: tuple[float, ...]
    gathered: float


def rank_ends(plan: Plan, timeline: Timeline, around: StepSurroundings, traced: Traced) -> Ends:
    """What follows the forwards and backwards of each rank."""
    by_rank: list[list[Stage]] = [[] for _ in range(plan.pipeline_parallel_degree)]
    for stage in plan.stages:
        by_rank[stage.rank].append(stage)
    shares = _shares_of_stages(plan, traced)
    last = {event.action.stage: event for event in timeline.events if event.action.op in (Op.BACKWARD, Op.WEIGHT)}
    done = [0.0] * len(by_rank)
    for event in timeline.events:
        done[event.rank] = max(done[event.rank], event.end)
    summed, updated, gathered = [], [], [0.0]
    for rank, stages in enumerate(by_rank):
        device, end, free = around.devices[rank], done[rank], 0.0
        for stage in sorted(stages, key=lambda stage: (last[stage.index].end, stage.index)):
            whole, bucket = _reduce_times(shares[stage.index].others.gradients, around, device)
            free = max(last[stage.index].end + bucket, max(last[stage.index].start, free) + whole)
        experts = sum(shares[stage.index].experts.gradients for stage in stages)
        same = around.holders(of_experts=True).every
        end = max(end, free) if not around.divides_parameters else end
        after = 0.0 if around.divides_parameters else collective_time(CollectiveKind.ALL_REDUCE, experts, same, device)
        summed.append(end + after)
        traffic = sum(_optimizer_traffic(stage, shares[stage.index], around) for stage in stages)
        updated.append(device.kernels.memory_time(traffic, device.memory_bandwidth) / device.kernels.optimizer)
        if around.sharding is Sharding.STATE:
            held = sum(stage.parameter_bytes for stage in stages)
            gathered.append(collective_time(CollectiveKind.ALL_GATHER, held, around.replicas, device))
    return Ends(tuple(summed), tuple(updated), max(gathered))


@dataclass(frozen=True, slots=True)
class _Share:
    """Bytes of parameters, and of their gradients."""

    parameters: float
    gradients: float


@dataclass(frozen=True, slots=True)
class _Shares:
    """The shares of a stage: of experts that ranks divide, and of all else."""

    experts: _Share
    others: _Share


def _shares_of_stages(plan: Plan, traced: Traced) -> dict[int, _Shares]:
    """The shares by stage. Sizes of gradients are the plan's, as they may be wider than parameters."""
    held, names = parameters_of_stages(plan, traced.trace), traced.experts
    found = {}
    for stage in plan.stages:
        own = held[stage.index]
        trained = float(sum(state.spec.num_bytes for state in own if state.spec.requires_grad))
        experts = [state for state in own if state.name in names]
        of_experts = sum(state.spec.num_bytes for state in experts)
        learning = sum(state.spec.num_bytes for state in experts if state.spec.requires_grad)
        gradients = stage.gradient_bytes * learning / max(1.0, trained)
        whole = sum(state.spec.num_bytes for state in own)
        others = _Share(whole - of_experts, stage.gradient_bytes - gradients)
        found[stage.index] = _Shares(_Share(of_experts, gradients), others)
    return found


def _executor_seconds_of_step(plan: Plan, timeline: Timeline, kernels: Kernels) -> float:
    """Seconds of the executor in one microbatch's forwards and backwards, over all stages."""
    split = {event.action.stage for event in timeline.events if event.action.op is Op.WEIGHT}
    return sum(2 * kernels.action + (stage.split_time if stage.index in split else 0.0) for stage in plan.stages)


def _agreement_seconds(around: StepSurroundings) -> float:
    """Seconds in which ranks that share operations or gradients agree on the end of a step, where steps take time beside operations."""
    device = around.devices[0]
    groups = (around.tensor, around.replicas, around.context) if device.kernels.step else ()
    return sum(collective_time(CollectiveKind.ALL_REDUCE, 8, group, device) for group in groups)


def _units(traced: Traced, plan: Plan, around: StepSurroundings) -> list[int]:
    """Bytes of the units of a model that runs as it is with its parameters in parts; of others there are none."""
    if not around.divides_parameters or traced.has_program(len(plan.stages)):
        return []
    trace = traced.trace
    units = traced_units(trace, range(len(trace.nodes)), range(len(trace.state)), traced.units, traced.experts)
    return [sum(trace.state[i].spec.num_bytes for i in unit.state) for unit in units]


def _reduce_times(gradients: float, around: StepSurroundings, device: Device) -> tuple[float, float]:
    """Seconds to sum gradients over the replicas: all, and one bucket."""
    whole, bucket = (
        collective_time(CollectiveKind.ALL_REDUCE, size, around.replicas, device)
        for size in (gradients, min(gradients, BUCKET_BYTES))
    )
    return whole, bucket


def _optimizer_traffic(stage: Stage, shares: _Shares, around: StepSurroundings) -> float:
    """Bytes that the optimizer moves: gradients are read, parameters and state read and written; of each what the rank has of it."""
    moved, buckets = 0.0, 0.0
    for share, of_experts in ((shares.others, False), (shares.experts, True)):
        holders = around.holders(of_experts=of_experts)
        parts = {Sharding.NONE: 1, Sharding.STATE: holders.every.size, Sharding.FULL: holders.parts.size}
        moved += (2 * share.parameters + share.gradients) / parts[around.sharding]
        has_buckets = holders.every.size > 1 and not around.divides_parameters and not of_experts
        buckets += share.gradients if has_buckets else 0.0
    return moved + 2 * max(0.0, stage.optimizer_bytes - buckets)


def _exchange_seconds_of_step(
    traced: Traced, around: StepSurroundings, recompute: Sequence[str]
) -> tuple[float, float, float]:
    """Seconds of the collectives of one microbatch, over all stages: of tensor-parallel ranks, of experts, of context-parallel ranks.

    Those that are computed again count again, those that go on while an operation computes not at all.
    """
    sharded = () if traced.sharded is None else traced.sharded.collectives
    divided = () if traced.divided is None else traced.divided.collectives
    context = () if traced.context is None else collectives_of(traced.context, traced.trace)
    if not sharded and not divided and not context:
        return 0.0, 0.0, 0.0
    again = recompute_depths(requested_regions(traced.trace, tuple(recompute)).regions)
    reruns = np.zeros(len(traced.trace.nodes))
    for position, count in again.items():
        reruns[position] = count
    groups = (around.tensor, around.experts or around.tensor, around.context)
    seconds = []
    for collectives, group in zip((sharded, divided, context), groups, strict=True):
        shown = [item for item in collectives if not item.overlaps]
        forward, backward = collective_times(traced.trace, shown, group, around.devices[0])
        seconds.append(float((forward * (1 + reruns) + backward).sum()))
    return seconds[0], seconds[1], seconds[2]


def _amount_in_step(trace: Trace) -> tuple[int, str]:
    """What a microbatch has: tokens, where an input holds whole numbers in two dimensions; else samples."""
    specs = [node.spec for node in trace.nodes if node.kind is NodeKind.PLACEHOLDER and node.spec is not None]
    tokens = [spec.num_elements for spec in specs if len(spec.shape) == 2 and spec.dtype in ("int64", "int32")]
    if tokens:
        return max(tokens), "tokens"
    return max((spec.shape[0] for spec in specs if spec.shape), default=0), "samples"
