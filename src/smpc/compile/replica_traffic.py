"""What ranks with the same parameters exchange in a step, where parameters are in parts on them: how often, and how long it takes.

Where a program runs, a stage has one gather in its first forward, and one sum in its last backward; nothing else goes on meanwhile, on
any device: the stage begins with what it has gathered, and hands on its gradients when they are summed. Experts that ranks divide have
one of each of their own, among the ranks that have the same ones (`smpc.executor.replicas.fully_shard`).

    rank 0    gather F0 F1 .. .. .. .. B0 B1 sum
    rank 1    .. .. .. gather F0 B0 F1 B1 sum

Without a program each unit (`smpc.partitioner.memory.sharded_blocks`) has its own, by how long it stays whole:

    step          a gather before the first forward, a sum after the last backward, one unit after the other
    microbatch    a gather in each forward, a sum in each backward
    never         the same, and a gather in each backward

Over gloo a rank does nothing else meanwhile. Otherwise a unit's gather goes on while the unit before it works, and its sum while the unit
in front of it does, so that only what takes longer than that counts, and the ends: the first gathers, the last sums. Ranks also tell each
other which blocks they call (`smpc.sharding.same_blocks`), in a few bytes.

`StepSurroundings` are the groups of a pipeline's ranks, `with_exchanges` a plan whose stages have these seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from smpc.compile.options import PipelineOptions
from smpc.compile.result import Traced
from smpc.config.keep import Keep
from smpc.mesh import Axis, Mesh
from smpc.partitioner.costs.collective_times import CollectiveKind, collective_time
from smpc.partitioner.costs.device import Device, Group
from smpc.partitioner.costs.node_costs import NodeTimes
from smpc.partitioner.graph.plan import Plan, Stage, StageExchange
from smpc.partitioner.memory.sharded_blocks import traced_units
from smpc.tracer.ir import StateSpec, Trace

_ALONE = Group(1, 1)
_TOLD = 8  # bytes in which a rank says what it calls


class Sharding(StrEnum):
    """What replicas split among them."""

    NONE = "nothing"
    STATE = "optimizer state"
    FULL = "parameters, gradients and optimizer state"


@dataclass(frozen=True, slots=True)
class Holders:
    """Ranks that hold the same parameters: all of them; those that have the parts of one copy; those that have the same part."""

    every: Group
    parts: Group
    copies: Group = _ALONE

    def gather_time(self, num_bytes: float, device: Device) -> float:
        """Seconds in which parts become whole parameters of so many bytes."""
        return collective_time(CollectiveKind.ALL_GATHER, num_bytes, self.parts, device)

    def sum_time(self, num_bytes: float, device: Device) -> float:
        """Seconds in which whole gradients are summed, and each rank keeps its part."""
        own = collective_time(CollectiveKind.ALL_REDUCE, num_bytes / self.parts.size, self.copies, device)
        return collective_time(CollectiveKind.REDUCE_SCATTER, num_bytes, self.parts, device) + own


@dataclass(frozen=True, slots=True)
class StepSurroundings:
    """What a pipeline's ranks are in: the devices of its ranks, the groups that share operations, and replicas.

    `replicas` have the same parameters; the ranks of a `context` group share sequences. `parts` and `copies`: see `Holders`.
    """

    devices: tuple[Device, ...]
    tensor: Group
    replicas: Group
    sharding: Sharding = Sharding.NONE
    experts: Group | None = None  # None: every rank has all of them
    context: Group = field(default_factory=lambda: Group(1, 1))
    parts: Group | None = None  # None: all replicas
    copies: Group = _ALONE
    same_experts: Holders | None = None  # where ranks divide experts

    @classmethod
    def of(cls, options: PipelineOptions) -> StepSurroundings:
        """As the options say, with replicas far apart and tensor-parallel ranks on neighbours."""
        return cls.on(options.mesh, options.devices, sharding_of(options))

    @classmethod
    def on(cls, mesh: Mesh, devices: Sequence[Device], sharding: Sharding) -> StepSurroundings:
        """The groups of a mesh."""

        def group(axis: Axis) -> Group:
            return Group.of(mesh, axis, devices[0])

        experts, same = None, None
        if mesh.ep_size > 1:
            experts, every = group(Axis.EP), group(Axis.EXPERT_DATA)
            same = Holders(every, every)
            if mesh.shard_size > 1:
                same = Holders(every, group(Axis.EXPERT_FSDP), group(Axis.REPLICA))
        return cls(
            tuple(devices),
            group(Axis.TP),
            group(Axis.RDP),
            sharding,
            experts,
            group(Axis.CP),
            group(Axis.FSDP) if mesh.shard_size > 1 else None,
            group(Axis.REPLICA) if mesh.shard_size > 1 else _ALONE,
            same,
        )

    @property
    def divides_parameters(self) -> bool:
        """Whether parameters are in parts."""
        return self.sharding is Sharding.FULL

    def holders(self, *, of_experts: bool) -> Holders:
        """The ranks that hold the same parameters, or the same experts."""
        if of_experts and self.same_experts is not None:
            return self.same_experts
        return Holders(self.replicas, self.replicas if self.parts is None else self.parts, self.copies)


def sharding_of(options: PipelineOptions) -> Sharding:
    """What the replicas of these options split."""
    if options.num_holders == 1:
        return Sharding.NONE
    if options.num_shards > 1:
        return Sharding.FULL
    return Sharding.STATE if options.shard_optimizer_state else Sharding.NONE


@dataclass(frozen=True, slots=True)
class ExchangedUnit:
    """Parameters that are gathered, and whose gradients are summed, together. `parameters`, `gradients`: bytes.

    first, last: when it begins and ends, as parts of a microbatch's forward; behind: and of its backward, what is done before the unit's
    own begins, and before it has ended.
    """

    parameters: float
    gradients: float
    keep: Keep = Keep.STEP
    is_apart: bool = False
    first: float = 0.0
    behind: tuple[float, float] = (0.0, 1.0)


def units_in_time(
    trace: Trace, parameters: Sequence[StateSpec], times: NodeTimes, experts: frozenset[str], limits: tuple[int, int]
) -> tuple[ExchangedUnit, ...]:
    """The units of a model that runs as it is. `limits`: see `traced_units`."""
    places = {state.name: i for i, state in enumerate(trace.state)}
    own = [places[state.name] for state in parameters]
    forward, backward = (
        np.append(0.0, np.cumsum(column)) / max(float(column.sum()), 1e-30)
        for column in (times.forward, times.backward)
    )
    return tuple(
        ExchangedUnit(
            sum(trace.state[i].spec.num_bytes for i in unit.state),
            _trained_bytes([trace.state[i] for i in unit.state]),
            unit.keep,
            unit.is_apart,
            float(forward[unit.first]),
            (1.0 - float(backward[unit.last + 1]), 1.0 - float(backward[unit.first])),
        )
        for unit in traced_units(trace, range(len(trace.nodes)), own, limits, experts)
    )


def units_in_programs(parameters: Sequence[StateSpec], experts: frozenset[str]) -> tuple[ExchangedUnit, ...]:
    """The units of a stage of a program: all that it has, and its experts where ranks divide them."""
    kinds = [
        (is_apart, [state for state in parameters if (state.name in experts) == is_apart]) for is_apart in (False, True)
    ]
    return tuple(
        ExchangedUnit(sum(state.spec.num_bytes for state in own), _trained_bytes(own), is_apart=is_apart)
        for is_apart, own in kinds
        if own
    )


def _trained_bytes(parameters: Sequence[StateSpec]) -> float:
    return float(sum(state.spec.num_bytes for state in parameters if state.spec.requires_grad))


def exchange_of_units(
    units: Sequence[ExchangedUnit],
    around: StepSurroundings,
    device: Device,
    *,
    seconds: tuple[float, float] = (0.0, 0.0),
) -> StageExchange:
    """What nothing hides of the exchanges of some units, in the order in which they end; `seconds`: of a forward and of a backward."""
    gathers = [around.holders(of_experts=unit.is_apart).gather_time(unit.parameters, device) for unit in units]
    sums = [around.holders(of_experts=unit.is_apart).sum_time(unit.gradients, device) for unit in units]
    timed = list(zip(units, gathers, sums, strict=True))
    stays = [item for item in timed if item[0].keep is Keep.STEP]
    live = [item for item in timed if item[0].keep is not Keep.STEP]
    again = [gather if unit.keep is Keep.NEVER else 0.0 for unit, gather, _ in live]
    whole = sum(again) + sum(total for *_, total in live)
    told = collective_time(CollectiveKind.ALL_GATHER, _TOLD * around.replicas.size, around.replicas, device)
    if device.transport == "gloo":
        forward = sum(gather for _, gather, _ in live) + len(live) * told
        backward = whole + (told if live else 0.0)
    else:
        forward = _exposed_forward(live, seconds[0]) + (told if live else 0.0)
        backward = max(_exposed_backward(live, again, seconds[1]), whole - seconds[1])
    return StageExchange(sum(gather for _, gather, _ in stays), forward, backward, sum(total for *_, total in stays))


_Timed = tuple[ExchangedUnit, float, float]


def _exposed_forward(live: Sequence[_Timed], forward: float) -> float:
    """The part of the gathers of a microbatch's forward that takes longer than the unit before."""
    found, before = 0.0, 0.0
    for unit, gather, _ in sorted(live, key=lambda item: item[0].first):
        found += max(0.0, gather - (unit.first - before) * forward)
        before = unit.first
    return found


def _exposed_backward(live: Sequence[_Timed], again: Sequence[float], backward: float) -> float:
    """The same of the gathers and sums of its backward, which goes from the last unit to the first."""
    found, begun = 0.0, 0.0
    turns = list(zip(live, again, strict=True))[::-1]
    for (unit, _, _), gather in turns:
        found += max(0.0, gather - (unit.behind[0] - begun) * backward)
        begun = unit.behind[0]
    ends = sorted((unit.behind[1], total) for (unit, _, total), _ in turns)
    for (end, total), following in zip(ends, [*(end for end, _ in ends[1:]), 1.0], strict=False):
        found += max(0.0, total - (following - end) * backward)
    return found


def parameters_of_stages(plan: Plan, trace: Trace) -> dict[int, list[StateSpec]]:
    """By stage, its parameters, but for those that an earlier stage of its rank has."""
    by_name = {state.name: state for state in trace.state}
    seen: set[tuple[int, str]] = set()
    found: dict[int, list[StateSpec]] = {}
    for stage in plan.stages:
        found[stage.index] = [by_name[name] for name in stage.parameters if (stage.rank, name) not in seen]
        seen.update((stage.rank, name) for name in stage.parameters)
    return found


def with_exchanges(plan: Plan, traced: Traced, around: StepSurroundings, times: NodeTimes) -> Plan:
    """The plan with what its stages exchange; as it is where parameters are whole."""
    if not around.divides_parameters:
        return plan
    held, experts = parameters_of_stages(plan, traced.trace), traced.experts
    runs_as_it_is = not traced.has_program(len(plan.stages))

    def exchange(stage: Stage) -> StageExchange:
        parameters = held[stage.index]
        in_time = runs_as_it_is and units_in_time(traced.trace, parameters, times, experts, traced.units)
        units = in_time or units_in_programs(parameters, experts)
        wider = stage.gradient_bytes / max(1.0, sum(unit.gradients for unit in units))
        units = tuple(dataclasses.replace(unit, gradients=unit.gradients * wider) for unit in units)
        seconds = stage.forward_time, stage.backward_time
        return exchange_of_units(units, around, around.devices[stage.rank], seconds=seconds)

    stages = tuple(dataclasses.replace(stage, exchange=exchange(stage)) for stage in plan.stages)
    return dataclasses.replace(plan, stages=stages)
