"""The plan: which stage runs what, what crosses between stages, and what it is predicted to cost.

Terms
    stage       a set of nodes that one rank runs as a unit; numbered in pipeline order
    edge        the values that one stage sends to another, once for every microbatch; source INPUTS (-1) stands for the
                model's own inputs, which start on pipeline rank 0
    assignment  node name -> stage, for every node that computes (inputs and attribute reads belong to no stage)
    recomputed  nodes that a stage runs although another stage owns them: cheap values of inputs and buffers (masks,
                positions)

All sizes are bytes, times are seconds and describe the device that the cost model assumes. A plan is immutable;
`to_json` gives the same bytes for the same input, and `fingerprint` is their SHA-256.

A value that several later stages use travels along the chain of its consumers: made by 1 and used by 3 and 4 it crosses
on the edges 1 -> 3 and 3 -> 4, so at most one edge carries a value out of a stage.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from smpc.kernels.setting import KernelUse
from smpc.tracer.ir import Region

INPUTS = -1
PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class StageExchange:
    """Seconds in which a stage waits for parameters in parts to be gathered, and for their gradients to be summed."""

    first_forward: float = 0.0  # before the first forward of a step
    forward: float = 0.0  # in every one
    backward: float = 0.0
    last_backward: float = 0.0  # after the last backward, or weight gradients

    def in_step(self, num_microbatches: int) -> float:
        """All of it."""
        return self.first_forward + num_microbatches * (self.forward + self.backward) + self.last_backward


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage and its predicted cost."""

    index: int
    rank: int  # pipeline rank that runs it
    modules: tuple[str, ...]  # FQNs of the largest module calls that are wholly in the stage, in order of execution
    parameters: tuple[str, ...]  # canonical FQNs of the parameters it uses, shared ones included
    buffers: tuple[str, ...]
    recomputed: tuple[str, ...]  # nodes of other stages that it runs again
    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes_per_microbatch: int
    num_in_flight: int  # microbatches whose activations are held at the peak of the schedule
    peak_memory_bytes: int  # where its rank has other stages: what it holds when all of them hold most
    forward_flops: int
    forward_time: float
    backward_time: float
    cost: float  # its value in the objective
    buffer_bytes: int = 0
    communication_bytes: int = 0  # messages under way, received ahead or not yet given up
    transient_bytes: int = 0  # at the peak, beyond all of the above
    checkpoints: tuple[Region, ...] = ()  # what it computes again for the backward pass, outer ones first
    recompute_time: float = 0.0  # part of backward_time
    device: str = ""  # of its rank, where ranks have several kinds
    offloaded_bytes_per_microbatch: int = 0  # of the activations, what waits for the backward in CPU memory
    weight_time: float = 0.0  # part of backward_time: the parameters' gradients that a split backward computes later
    split_time: float = 0.0  # beside forward_time and backward_time, where the backward is split
    deferred_bytes_per_microbatch: int = 0  # there, of the activations, what the later part reads, and gradients for it
    in_flight_bytes: int | None = None  # at the peak, of all microbatches in flight; None: activations of each
    exchange: StageExchange | None = None  # beside forward_time and backward_time, where parameters are in parts


@dataclass(frozen=True, slots=True)
class Edge:
    """Values that cross from one stage to another. `num_bytes` is for one microbatch, forward direction."""

    index: int
    source: int  # stage, or INPUTS
    destination: int
    values: tuple[str, ...]  # node names, in execution order
    num_bytes: int
    gradient_bytes: int = 0  # what comes back for them; 0 if no value needs a gradient, and from the model's inputs


@dataclass(frozen=True, slots=True)
class Objective:
    """How good the plan is: no plan can have a bottleneck below `lower_bound`; gap = bottleneck / lower_bound - 1.

    Nothing is proven where `lower_bound` is 0 and the gap infinite.
    """

    memory_weight: float
    bottleneck: float
    lower_bound: float
    gap: float
    solver: str  # "chain", "graph", "manual"; within a memory limit also "ilp"
    note: str = ""  # a solver limit that was hit, for instance
    memory_limit: int = 0  # most bytes that a rank may hold at its peak; 0: no limit


@dataclass(frozen=True, slots=True)
class ScheduleSummary:
    """The schedule that the plan was made for. `bubble_fraction` = 1 - busy time / (ranks x makespan), simulated."""

    name: str
    num_microbatches: int
    active_microbatches: int
    bubble_fraction: float
    step_time: float
    link_bandwidth: float = 50e9  # bytes/s between two ranks
    link_latency: float = 50e-6  # s for one message


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several stages use: each holds a replica, their gradients are summed at the end of the step."""

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostLink:
    """What activations are offloaded over, in one direction; both work at once."""

    rate: float  # bytes/s that large copies get
    latency: float  # s for one
    overlaps: bool  # the device computes meanwhile; a CPU does not


@dataclass(frozen=True)
class Plan:
    """A partition of a traced model into pipeline stages."""

    model_class: str
    pipeline_parallel_degree: int
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    shared_parameters: tuple[SharedParameter, ...]
    objective: Objective
    schedule: ScheduleSummary
    assignment: tuple[tuple[str, int], ...]
    trace_fingerprint: str
    version: int = PLAN_VERSION
    device: str = ""  # the kind of device that times and sizes are predicted for
    optimizer: str = ""
    notes: tuple[str, ...] = ()  # what was asked for and is not done
    split_checkpoints: tuple[tuple[str, tuple[int, ...]], ...] = ()  # modules to checkpoint that are on several stages
    loading_horizon: int = 0  # activations are offloaded, and loaded back so many tasks ahead; 0: they stay
    kernels: tuple[KernelUse, ...] = ()  # what was replaced by ops of smpc.kernels, and what was not
    host_link: HostLink | None = None  # None: nothing is offloaded

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything but itself."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the content of plan.json."""
        return {**self._content(), "fingerprint": self.fingerprint}

    def _content(self) -> dict[str, Any]:
        """The fields as plain data; `kernels`, `host_link`, split backwards and exchanges only where there is something to say."""
        data = {key: value for key, value in asdict(self).items() if value or key not in ("kernels", "host_link")}
        for stage in data["stages"]:
            for name in ("split_time", "deferred_bytes_per_microbatch"):
                if not stage[name]:
                    del stage[name]
            for name in ("in_flight_bytes", "exchange"):
                if stage[name] is None:
                    del stage[name]
        return data

    def to_json(self) -> str:
        """Indented JSON, one trailing newline; the same plan gives the same bytes."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`."""
        data: dict[str, Any] = json.loads(text)
        expected = data.pop("fingerprint")
        plan = cls(
            **{
                **data,
                "stages": tuple(_stage_of_plan(stage) for stage in data["stages"]),
                "edges": tuple(Edge(**_tuples_of_plan(edge)) for edge in data["edges"]),
                "shared_parameters": tuple(SharedParameter(**_tuples_of_plan(s)) for s in data["shared_parameters"]),
                "objective": Objective(**data["objective"]),
                "schedule": ScheduleSummary(**data["schedule"]),
                "notes": tuple(data.get("notes", ())),
                "kernels": tuple(KernelUse(**use) for use in data.get("kernels", ())),
                "host_link": HostLink(**data["host_link"]) if data.get("host_link") else None,
                "split_checkpoints": tuple((name, tuple(on)) for name, on in data.get("split_checkpoints", ())),
                "assignment": tuple((name, stage) for name, stage in data["assignment"]),
            }
        )
        if plan.fingerprint != expected:
            raise ValueError(f"plan.json was changed: its fingerprint is {plan.fingerprint}, it says {expected}")
        return plan


def _stage_of_plan(data: dict[str, Any]) -> Stage:
    regions = tuple(Region(**region) for region in data.get("checkpoints", ()))
    exchange = StageExchange(**data["exchange"]) if data.get("exchange") else None
    return Stage(**{**_tuples_of_plan(data), "checkpoints": regions, "exchange": exchange})


def _tuples_of_plan(data: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


def plan_warnings(plan: Plan) -> tuple[str, ...]:
    """What was asked for and is not done, for people."""
    split = [
        f"{name or 'the model'} is not checkpointed: the partition puts it on stages {', '.join(map(str, stages))}"
        for name, stages in plan.split_checkpoints
    ]
    idle = plan.loading_horizon and not any(stage.checkpoints for stage in plan.stages)
    nothing = ["offload_activations has no effect: no module is checkpointed, and only what those keep is offloaded"]
    unused = [
        f"kernels: {use.op} is not used"
        + (f" at {use.first or 'the model'}" if use.count else "")
        + (f" and {use.count - 1} more" if use.count > 1 else "")
        + f": {use.reason}"
        for use in plan.kernels
        if use.reason
    ]
    return (*plan.notes, *split, *(nothing if idle else ()), *unused)
