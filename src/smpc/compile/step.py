"""Where the time of a training step goes, on the average of the ranks; the parts add up to the whole.

    | gathers | forwards and backwards of all microbatches, and waiting     |
                                            | last backward of a stage  |
                                            | sum over replicas, in buckets ... | last bucket | optimizer | parameters |

    compute     operations, with what is computed again
    bubble      a rank waits for others: for the pipeline to fill and drain, for messages, for slower stages
    waiting     all wait for the slowest of so many devices
    tensor      collectives of tensor-parallel ranks, forward and backward
    data        of the sum of gradients, and of gathering parameters, what no computation hides
    context     collectives over parts of a sequence
    expert      collectives that bring tokens to experts
    offload     of the copies to the host and back, what makes the step longer (`smpc.codegen.offload`)
    optimizer   reads and writes parameters, gradients and state once
    executor    what the runtime does beside operations and messages, of devices that say how long that takes: for each action, for calls
                whose backward is in two parts, for each step, and for units in parts where the model runs as it is

Gradients of a stage are summed in buckets from its last backward on, one stage of a rank after the other, and that ends no sooner than
one bucket after the backward that made the last gradient. Replicas that share the optimizer's state gather the new parameters when it is
done; replicas that share parameters gather those of a stage before its first forward, layer by layer while it runs, and send each other
parts of gradients in place of whole ones. How long a collective takes: `smpc.partitioner.costs.collectives`. Over gloo torch's
fully_shard waits for each of them, so nothing hides them. Where a model runs as it is, each of its units has collectives of its own.

`useful` are the seconds in which the FLOPs of forward and backward, each once, take at the peaks of their dtypes, so useful / total is the
MFU. A causal attention counts with half of its products.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from smpc.codegen.program import Op
from smpc.codegen.rewrite.context_parallel.rewrite import collectives_of
from smpc.codegen.simulate import Timeline
from smpc.compile.options import PipelineOptions
from smpc.compile.result import Traced
from smpc.mesh import Axis, Mesh
from smpc.partitioner.costs.collectives import CollectiveKind, collective_time
from smpc.partitioner.costs.cost import collective_times, useful_times
from smpc.partitioner.costs.device import Device, Group, Kernels
from smpc.partitioner.graph.plan import Plan, Stage
from smpc.partitioner.graph.recompute import recompute_depths, requested_regions
from smpc.tracer.ir import NodeKind, Trace

_NUMBERED = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")  # `transformer.h.0` of `transformer.h.0.mlp.1`
BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default


class Sharding(StrEnum):
    """What replicas split among them."""

    NONE = "nothing"
    STATE = "optimizer state"
    FULL = "parameters, gradients and optimizer state"


@dataclass(frozen=True, slots=True)
class StepSurroundings:
    """What a pipeline's ranks are in: the devices of its ranks, the groups that share operations, and replicas.

    `replicas` have the same parameters; those of a group of `context` share sequences.
    """

    devices: tuple[Device, ...]
    tensor: Group
    replicas: Group
    sharding: Sharding = Sharding.NONE
    experts: Group | None = None  # None: every rank has all of them
    context: Group = field(default_factory=lambda: Group(1, 1))

    @classmethod
    def of(cls, options: PipelineOptions) -> StepSurroundings:
        """As the options say, with replicas far apart and tensor-parallel ranks on neighbours."""
        pipeline, tensor = options.pipeline_parallel_degree, options.tensor_parallel_degree
        context = options.context_parallel_degree
        world = pipeline * tensor * context * options.data_parallel_degree
        mesh = Mesh(world, pipeline, tensor, context_parallel_degree=context)
        around = cls.on(mesh, options.devices, sharding_of(options))
        return (
            dataclasses.replace(around, experts=options.expert_group) if options.expert_parallel_degree > 1 else around
        )

    @classmethod
    def on(cls, mesh: Mesh, devices: Sequence[Device], sharding: Sharding) -> StepSurroundings:
        """The groups of a mesh."""
        tensor, replicas = Group.of(mesh, Axis.TP, devices[0]), Group.of(mesh, Axis.RDP, devices[0])
        return cls(tuple(devices), tensor, replicas, sharding, context=Group.of(mesh, Axis.CP, devices[0]))


def sharding_of(options: PipelineOptions) -> Sharding:
    """What the replicas of these options split."""
    if options.num_holders == 1:
        return Sharding.NONE
    if options.fully_shard:
        return Sharding.FULL
    return Sharding.STATE if options.shard_optimizer_state else Sharding.NONE


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
    units = _unit_bytes(traced.trace, around)
    ends = rank_ends(plan, timeline, around, units)
    pipeline = timeline.makespan
    busy = sum(timeline.busy) / num_ranks
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
        pipeline - busy - timeline.stalled,
        min(tensor, busy),
        max(ends.summed) - pipeline + ends.gathered,
        max(ends.updated),
        expert=min(expert, busy),
        context=min(context, max(0.0, busy - tensor)),
        waiting=pipeline * slowdown,
        executor=inside
        + kernels.step
        + _agreement_seconds(around)
        + len(units) * (kernels.unit_step + microbatches * kernels.unit),
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


def rank_ends(plan: Plan, timeline: Timeline, around: StepSurroundings, units: Sequence[int] = ()) -> Ends:
    """What follows the forwards and backwards of each rank. `units`: see `_unit_bytes`."""
    by_rank: list[list[Stage]] = [[] for _ in range(plan.pipeline_parallel_degree)]
    for stage in plan.stages:
        by_rank[stage.rank].append(stage)
    last = {event.action.stage: event for event in timeline.events if event.action.op in (Op.BACKWARD, Op.WEIGHT)}
    done = [0.0] * len(by_rank)
    for event in timeline.events:
        done[event.rank] = max(done[event.rank], event.end)
    summed, updated, gathered = [], [], [0.0]
    for rank, stages in enumerate(by_rank):
        device, end = around.devices[rank], done[rank]
        free = 0.0
        for stage in sorted(stages, key=lambda stage: (last[stage.index].end, stage.index)):
            whole, bucket = _reduce_times(stage, around, device, units)
            first = last[stage.index].end if _step_waits(around, device) else last[stage.index].start
            free = max(last[stage.index].end + bucket, max(first, free) + whole)
        summed.append(max(end, free) if around.replicas.size > 1 else end)
        traffic = sum(_optimizer_traffic(stage, around) for stage in stages)
        updated.append(device.kernels.memory_time(traffic, device.memory_bandwidth) / device.kernels.optimizer)
        gathered.append(_gather_seconds_of_step(stages, around, device, units))
    return Ends(tuple(summed), tuple(updated), max(gathered))


def _executor_seconds_of_step(plan: Plan, timeline: Timeline, kernels: Kernels) -> float:
    """Seconds of the executor in one microbatch's forwards and backwards, over all stages."""
    split = {event.action.stage for event in timeline.events if event.action.op is Op.WEIGHT}
    return sum(2 * kernels.action + (stage.split_time if stage.index in split else 0.0) for stage in plan.stages)


def _agreement_seconds(around: StepSurroundings) -> float:
    """Seconds in which ranks that share operations or gradients agree on the end of a step, where steps take time beside operations."""
    device = around.devices[0]
    groups = (around.tensor, around.replicas, around.context) if device.kernels.step else ()
    return sum(collective_time(CollectiveKind.ALL_REDUCE, 8, group, device) for group in groups)


def _unit_bytes(trace: Trace, around: StepSurroundings) -> tuple[int, ...]:
    """Bytes of the parameters of each unit of a model that runs as it is with its parameters in parts: the outermost numbered modules
    and, last, the model itself. Empty for others.
    """
    if (
        around.sharding is not Sharding.FULL
        or len(around.devices) > 1
        or around.tensor.size > 1
        or around.context.size > 1
    ):
        return ()
    found, own = dict[str, int](), 0
    for state in trace.state:
        match = _NUMBERED.match(state.name)
        if state.is_parameter and match:
            found[match[0]] = found.get(match[0], 0) + state.spec.num_bytes
        elif state.is_parameter:
            own += state.spec.num_bytes
    return *found.values(), own


def _step_waits(around: StepSurroundings, device: Device) -> bool:
    """Whether a rank does nothing else while parameters are gathered and gradients summed."""
    return around.sharding is Sharding.FULL and device.transport == "gloo"


def _in_units(
    kind: CollectiveKind, num_bytes: float, around: StepSurroundings, device: Device, units: Sequence[int]
) -> float:
    """Seconds of collectives of so many bytes: of one, or of one for each unit, by its part of the bytes of all."""
    whole = sum(units)
    sizes = [num_bytes * unit / whole for unit in units] if whole else [num_bytes]
    return sum(collective_time(kind, size, around.replicas, device) for size in sizes)


def _reduce_times(stage: Stage, around: StepSurroundings, device: Device, units: Sequence[int]) -> tuple[float, float]:
    """Seconds to sum a stage's gradients over the replicas: all, and one bucket."""
    kind = CollectiveKind.REDUCE_SCATTER if around.sharding is Sharding.FULL else CollectiveKind.ALL_REDUCE
    whole = _in_units(kind, stage.gradient_bytes, around, device, units)
    return whole, collective_time(kind, min(stage.gradient_bytes, BUCKET_BYTES), around.replicas, device)


def _gather_seconds_of_step(
    stages: Sequence[Stage], around: StepSurroundings, device: Device, units: Sequence[int]
) -> float:
    """Seconds of a rank's gathers of parameters that no computation hides."""
    if around.sharding is Sharding.NONE:
        return 0.0
    held = sum(stage.parameter_bytes for stage in stages)
    whole = _in_units(CollectiveKind.ALL_GATHER, _whole_bytes(held, around), around, device, units)
    if around.sharding is Sharding.STATE or _step_waits(around, device):
        return whole
    hidden = sum(
        stage.forward_time for stage in stages
    )  # all but the first layer's are under way while the one before works
    first = collective_time(
        CollectiveKind.ALL_GATHER, min(_whole_bytes(held, around), BUCKET_BYTES), around.replicas, device
    )
    return max(first, whole - hidden)


def _whole_bytes(parameter_bytes: int, around: StepSurroundings) -> float:
    """Bytes of the whole parameters of a stage; one whose parameters are in parts has its part beside them."""
    if around.sharding is not Sharding.FULL:
        return parameter_bytes
    return parameter_bytes * around.replicas.size / (around.replicas.size + 1)


def _optimizer_traffic(stage: Stage, around: StepSurroundings) -> float:
    """Bytes that the optimizer moves: gradients are read, parameters and state read and written; of each what the rank has of it."""
    size = around.replicas.size
    buckets = stage.gradient_bytes if size > 1 and around.sharding is not Sharding.FULL else 0
    shards = 1 if around.sharding is Sharding.NONE else size
    held = 2 * _whole_bytes(stage.parameter_bytes, around) + stage.gradient_bytes
    return held / shards + 2 * max(0, stage.optimizer_bytes - buckets)


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
