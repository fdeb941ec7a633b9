"""What there is to try: the ways to train a model on so many devices.

A shape says who has what: a pipeline of p ranks, each of them t tensor-parallel ranks that share every operation and c context-parallel
ranks that share every sequence, d replicas of it with p t c d = world size, e of which divide the experts of a mixture among them, where
they are, and m microbatches of a replica's part of the batch. A candidate is a shape and how it is trained: the schedule with v stages on
a rank, what replicas divide among them (`smpc.compile.replica_traffic.Sharding`), what is computed again in the backward: what the model
itself asks for ("model"), or some modules as well (`Again`), and whether what these read waits in the host's memory (`offloading`). The
global batch is the same for all, so m times d times the size of a microbatch is. Tensor-parallel ranks are neighbours: they talk in every
block.

    >>> degrees = Tried(tensor=(1,), context=(1,), expert=(1,), sharding=(Sharding.NONE,), again=("model",), schedules=("1f1b",))
    >>> [(c.pipeline_parallel_degree, c.microbatches, c.schedule) for c in candidates(2, 2, find_device("h100"), degrees)]
    [(1, 1, '1f1b'), (2, 1, '1f1b'), (2, 2, '1f1b')]

A `Setting` says what is searched for: the ranks, the limit, the device, and what is tried of each dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from smpc.compile.options import PipelineOptions
from smpc.compile.replica_traffic import Sharding
from smpc.config.numbers import MAX_PIPELINE_RANKS, size_violation
from smpc.errors import ConfigError
from smpc.experts.find_experts import find_experts
from smpc.mesh import Axis, Mesh
from smpc.partitioner.costs.device import Device, Group, Wire
from smpc.partitioner.memory.sharded_blocks import repeated_blocks
from smpc.tracer.ir import ModuleCall, Trace

# name -> stages of a rank that are tried
SCHEDULES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("1f1b", (1,)),
    ("gpipe", (1,)),
    ("zb-h1", (1,)),
    ("zb-h2", (1,)),
    ("interleaved-1f1b", (2, 4, 8)),
    ("zb-v", (2,)),
)
ALL_SCHEDULES = tuple(known for known, _ in SCHEDULES)
_WORTH = 0.15  # of what a block keeps for its backward, for a part of it to be computed again alone
HORIZONS = (4, 1)  # tasks ahead of a backward; with fewer, more is away, and copies have less time
MOST_CONTEXT = 64  # ranks that may share a sequence


@dataclass(frozen=True, slots=True)
class Tried:
    """What is tried of each dimension, beside pipelines, replicas, places and microbatches, of which all are."""

    tensor: tuple[int, ...]
    context: tuple[int, ...]
    expert: tuple[int, ...]
    sharding: tuple[Sharding, ...]
    again: tuple[str, ...] = ("model",)
    schedules: tuple[str, ...] = ALL_SCHEDULES


@dataclass(frozen=True, slots=True)
class Shape:
    """Who has what of the work: see the module docstring."""

    pipeline_parallel_degree: int
    data_parallel_degree: int
    placement_strategy: str
    microbatches: int
    microbatch_size: int
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1

    @property
    def world_size(self) -> int:
        """All ranks."""
        degrees = self.pipeline_parallel_degree, self.tensor_parallel_degree, self.context_parallel_degree
        return degrees[0] * degrees[1] * degrees[2] * self.data_parallel_degree

    @property
    def num_holders(self) -> int:
        """Ranks that run a stage with the same parameters, but for experts that they divide."""
        return self.data_parallel_degree * self.context_parallel_degree

    @property
    def num_expert_holders(self) -> int:
        """The number of these ranks that have the same experts."""
        return self.num_holders // self.expert_parallel_degree

    @property
    def runs_as_it_is(self) -> bool:
        """Whether no program runs, so that each block gathers its own parameters where they are in parts."""
        return self.pipeline_parallel_degree == self.tensor_parallel_degree == self.context_parallel_degree == 1

    @property
    def mesh(self) -> Mesh:
        """Its ranks."""
        return Mesh(
            self.world_size,
            self.pipeline_parallel_degree,
            self.tensor_parallel_degree,
            self.placement_strategy,
            self.context_parallel_degree,
            expert_parallel_degree=self.expert_parallel_degree,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to train: see the module docstring. Fields are named as in the configuration."""

    pipeline_parallel_degree: int
    data_parallel_degree: int
    placement_strategy: str
    virtual_pipeline_degree: int
    microbatches: int
    microbatch_size: int
    schedule: str
    recompute: str = "model"
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    sharding: Sharding = Sharding.NONE
    offload: int = (
        0  # what checkpointed modules read is in the host's memory, and back so many tasks ahead; 0: it stays
    )

    @property
    def shape(self) -> Shape:
        """Who has what."""
        return Shape(
            self.pipeline_parallel_degree,
            self.data_parallel_degree,
            self.placement_strategy,
            self.microbatches,
            self.microbatch_size,
            self.tensor_parallel_degree,
            self.context_parallel_degree,
            self.expert_parallel_degree,
        )

    @property
    def cut(self) -> Candidate:
        """The same for candidates that are cut alike: computation is balanced, whatever the schedule."""
        return replace(self, schedule="", offload=0)

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.pipeline_parallel_degree * self.virtual_pipeline_degree

    @property
    def mesh(self) -> Mesh:
        """Its ranks."""
        return self.shape.mesh


def candidates(world_size: int, batch_size: int, device: Device, tried: Tried) -> Iterator[Candidate]:
    """All candidates, the simple ones first."""
    for shape in shapes(world_size, batch_size, device, tried):
        yield from ways(shape, tried)


def shapes(world_size: int, batch_size: int, device: Device, tried: Tried) -> Iterator[Shape]:
    """All shapes, the simple ones first."""
    for expert in tried.expert:
        for context in tried.context:
            for tensor in tried.tensor:
                if world_size % (tensor * context):
                    continue
                for pipeline in divisors(world_size // (tensor * context)):
                    replicas = world_size // tensor // context // pipeline
                    if batch_size % replicas or pipeline > MAX_PIPELINE_RANKS or replicas % expert:
                        continue
                    for placement in _placements(device, world_size, pipeline, tensor, context, expert):
                        for number in divisors(batch_size // replicas):
                            size = batch_size // replicas // number
                            yield Shape(pipeline, replicas, placement, number, size, tensor, context, expert)


def ways(shape: Shape, tried: Tried) -> Iterator[Candidate]:
    """The candidates of a shape."""
    for schedule, pieces in schedules(shape, tried.schedules):
        for again in tried.again:
            for sharding in shardings(shape, tried.sharding):
                yield candidate_of(shape, schedule, pieces, again, sharding)


def offloading(candidate: Candidate) -> Candidate | None:
    """The same with what its regions read in the host's memory meanwhile, or with more of it there; None: there is no more.

    Offloading makes no step faster. The cut is the same, for it balances computation alone. The order of the tasks of a rank is fixed, and
    copies only let some of them begin later; no task waits for less than without. So a way that fits without offloading needs none, and
    is the parent of one that is tried only where its best cut breaks the limit, with the parent's step as a lower bound.
    """
    later = next((horizon for horizon in HORIZONS if not candidate.offload or horizon < candidate.offload), None)
    return None if later is None else replace(candidate, offload=later)


def candidate_of(shape: Shape, schedule: str, pieces: int, again: str, sharding: Sharding) -> Candidate:
    """A shape, trained in a way."""
    return Candidate(
        shape.pipeline_parallel_degree,
        shape.data_parallel_degree,
        shape.placement_strategy,
        pieces,
        shape.microbatches,
        shape.microbatch_size,
        schedule,
        again,
        shape.tensor_parallel_degree,
        shape.context_parallel_degree,
        shape.expert_parallel_degree,
        sharding,
    )


def shardings(shape: Shape, tried: tuple[Sharding, ...]) -> tuple[Sharding, ...]:
    """What is tried of what ranks with the same parameters divide: nothing where there is one, and not the optimizer's state alone
    where experts are divided.

    Context-parallel ranks hold the same parameters, without replicas too.
    """
    if shape.num_holders == 1:
        return (Sharding.NONE,)
    if shape.expert_parallel_degree > 1:
        return tuple(kind for kind in tried if kind is not Sharding.STATE) or (Sharding.NONE,)
    return tried


def tensor_degrees(world_size: int, device: Device) -> tuple[int, ...]:
    """What is tried of tensor parallelism: the numbers of ranks of one host that divide the world, since wires between hosts are slow."""
    return tuple(degree for degree in divisors(world_size) if device.devices_per_host % degree == 0)


def context_degrees(world_size: int) -> tuple[int, ...]:
    """What is tried of context parallelism."""
    return tuple(degree for degree in divisors(world_size) if degree <= MOST_CONTEXT)


def wire(device: Device, mesh: Mesh, axis: Axis) -> Wire:
    """What the groups of an axis talk over: the wires inside hosts if each group is in one, else those between hosts.

    Ranks of a group have the same distance, so groups fill blocks of distance x size ranks; every host has whole blocks, or one is cut.
    """
    first, per_host = mesh.first_group(axis), device.devices_per_host
    block = len(first) * (first[1] - first[0]) if len(first) > 1 else 1
    is_inside = len(first) == 1 or mesh.world_size <= per_host or per_host % block == 0
    return device.inside_host if is_inside else device.between_hosts


@dataclass(frozen=True, slots=True)
class Again:
    """Modules that are computed again, by what a candidate calls it: names of the repeated blocks, some of them, or parts of each."""

    modules: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"model": ()})

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self.modules[name]

    @property
    def names(self) -> tuple[str, ...]:
        """What there is to choose from, the least that is computed again first."""
        return tuple(self.modules)

    @classmethod
    def of(cls, trace: Trace, seconds: Sequence[float]) -> Again:
        """Every repeated block, every second one, and parts that all blocks have; `seconds`: forward times of the nodes."""
        blocks = repeated_blocks(trace)
        if not blocks:
            return cls()
        found = {"model": (), **_parts_of_blocks(trace, blocks, seconds)}
        if len(blocks) > 2:
            found["half the blocks"] = blocks[::2]
        return cls({**found, "blocks": blocks})


def _parts_of_blocks(trace: Trace, blocks: tuple[str, ...], seconds: Sequence[float]) -> dict[str, tuple[str, ...]]:
    """Sets of children that every block calls: that with the most bytes for the time of its forward, with the next one, and so on.

    A set is worth trying where it saves a good part more than the one before it.
    """
    known = set(blocks)
    calls: dict[str, list[ModuleCall]] = {}
    for call in trace.calls:
        block, _, name = call.fqn.rpartition(".")
        if call.fqn in known or (block in known and sum(time > 0 for time in seconds[call.first : call.last]) > 1):
            calls.setdefault("" if call.fqn in known else name, []).append(call)
    saved = {name: sum(_saved_bytes(trace, call) for call in found) for name, found in calls.items()}
    times = {name: sum(sum(seconds[call.first : call.last]) for call in found) for name, found in calls.items()}
    everywhere = [name for name, found in calls.items() if name and len({call.fqn for call in found}) == len(blocks)]
    cheapest = sorted(everywhere, key=lambda name: times[name] / max(1, saved[name]))
    sets: dict[str, tuple[str, ...]] = {}
    gained = 0
    for i, name in enumerate(cheapest):
        gained += saved[name]
        if gained >= _WORTH * saved[""]:
            chosen = cheapest[: i + 1]
            sets[" + ".join(chosen)] = tuple(dict.fromkeys(call.fqn for part in chosen for call in calls[part]))
            gained = 0
    return sets


def _saved_bytes(trace: Trace, call: ModuleCall) -> int:
    """Bytes that are kept for the backward of a call."""
    kept = {storage for node in trace.nodes[call.first : call.last] for storage in node.saved}
    return sum(trace.storages[storage] for storage in kept)


def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def _placements(
    device: Device, world_size: int, pipeline: int, tensor: int, context: int, expert: int
) -> tuple[str, ...]:
    """Pipelines on neighbours; and replicas on neighbours, where that changes who shares a host. Tensor-parallel ranks always are."""
    found: dict[tuple[object, ...], str] = {}
    for name in ("cluster", "spread" if tensor == 1 else "PDT"):
        mesh = Mesh(world_size, pipeline, tensor, name, context, expert_parallel_degree=expert)
        groups = tuple(Group.of(mesh, axis, device) for axis in (Axis.RDP, Axis.CP, Axis.EP))
        found.setdefault((wire(device, mesh, Axis.PP), *groups), name)
    return tuple(found.values())


def schedules(shape: Shape, wanted: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Schedules and stages of a rank, unless there are too many actions; on one rank all take as long, and 1f1b needs the least memory."""
    pipeline = shape.pipeline_parallel_degree
    known = [known for known in SCHEDULES if known[0] in wanted] if pipeline > 1 else [("1f1b", (1,))]
    for name, numbers in known:
        for pieces in numbers:
            if not size_violation(pipeline * pieces, shape.microbatches, searched=name == "list"):
                yield name, pieces


def sharding_kinds(given: Sequence[str] | None, state: bool | None) -> tuple[Sharding, ...]:
    """What is tried, the simple first. ConfigError for what there is not."""
    if given is None:
        return (Sharding.STATE,) if state else tuple(Sharding)
    wrong = [name for name in given if name not in tuple(Sharding)]
    if wrong or not given:
        raise ConfigError(
            f"shardings: expected some of {', '.join(map(repr, map(str, Sharding)))}, found {', '.join(map(repr, wrong)) or 'none'}"
        )
    return tuple(kind for kind in Sharding if kind in given)


def expert_degrees(model: nn.Module, world_size: int) -> tuple[int, ...]:
    """What is tried of expert parallelism: numbers of ranks that divide the world and the experts of the smallest mixture."""
    fewest = min((found.num_experts for found in find_experts(model)), default=1)
    return tuple(degree for degree in range(1, fewest + 1) if fewest % degree == 0 and world_size % degree == 0)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is searched for, and how long: `effort` multiplies the budget."""

    world_size: int
    limit: int
    device: Device
    optimizer: str
    tried: Tried
    effort: float

    def __post_init__(self) -> None:
        known = list(ALL_SCHEDULES)
        given, tried = self.tried.schedules, self.tried
        wrong = [f"schedules: expected some of {', '.join(known)}, found {n!r}" for n in given if n not in known]
        if not given:
            wrong.append(f"schedules: expected some of {', '.join(known)}, found none")
        if self.world_size < 1:
            wrong.append(f"world_size: expected at least 1, found {self.world_size}")
        by_name = (("tensor", tried.tensor), ("context", tried.context), ("expert", tried.expert))
        wrong += [
            f"{name}_parallel_degrees: expected numbers that divide the world size {self.world_size}, found {degree}"
            for name, degrees in by_name
            for degree in degrees
            if degree < 1 or self.world_size % degree
        ]
        wrong += [
            f"{name}_parallel_degrees: expected some, found none"
            for name, degrees in by_name
            if not degrees and self.world_size >= 1
        ]
        if not self.effort > 0:
            wrong.append(f"effort: expected a number above 0, found {self.effort}")
        if wrong:
            raise ConfigError("\n".join(wrong))

    def options(self, candidate: Candidate, limit: int, modules: Sequence[str] = ()) -> PipelineOptions:
        """How to plan a candidate."""
        link = wire(self.device, candidate.mesh, Axis.PP)
        return PipelineOptions(
            pipeline_parallel_degree=candidate.pipeline_parallel_degree,
            microbatches=candidate.microbatches,
            memory_weight=0.0,
            device=replace(self.device, inside_host=link, between_hosts=link),
            optimizer=self.optimizer,
            memory_limit=limit,
            schedule=candidate.schedule,
            virtual_pipeline_degree=candidate.virtual_pipeline_degree,
            data_parallel_degree=candidate.data_parallel_degree,
            tensor_parallel_degree=candidate.tensor_parallel_degree,
            context_parallel_degree=candidate.context_parallel_degree,
            expert_parallel_degree=candidate.expert_parallel_degree,
            shard_optimizer_state=candidate.sharding is Sharding.STATE,
            fully_shard=candidate.sharding is Sharding.FULL,
            recompute=tuple(modules),
            offload_activations=candidate.offload > 0,
            activation_loading_horizon=max(1, candidate.offload),
        )
