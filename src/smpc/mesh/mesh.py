"""The mesh: what each global rank does of every parallelism. Pure arithmetic, same on every rank.

Terms
    P, pipeline        pp_rank: which part of the model a rank runs
    T, tensor          tp_rank: which slice of the tensor-parallel modules it holds
    D, reduced data    rdp_rank: its place among the ranks that have the same part and slices of the model. It is made of
        R, replica     which copy of the parameters
        S, shard       which part of that copy, where parameters are in parts (FSDP)
        C, context     which slice of the sequence; its ranks hold parts of parameters, too
    placement          a permutation of the letters D, P, T; the right-most varies fastest over global ranks.
                       `cluster` is DPT (a replica on neighbours), `spread` is TPD (a replica far apart). D means RSC in this order
    expert view        for experts, S x C is folded otherwise, right-most fastest; or R x S x C, where S x C has too few ranks:
        X              which part of an expert's parameters, or which copy of them
        E, expert      which of the experts
    axis               what a group ranges over:

        axis            varies    ranks of one group                                       size
        WORLD           all       all                                                      pp * tp * rdp
        PP              P         equal tp_rank and rdp_rank                               pp
        TP              T         equal pp_rank and rdp_rank                               tp
        RDP             R S C     equal pp_rank and tp_rank                                rdp = replica * shard * context
        DP              R S C T   equal pp_rank: all that run one part of the model        tp * rdp
        MP              P T       equal rdp_rank: a pipeline with its tensor slices        pp * tp
        REPLICA         R         hold the same parts of parameters: gradients all-reduced replica
        SHARD           S         divide parameters among them, and have other samples     shard
        CP              C         have slices of the same samples                          context
        FSDP            S C       hold all parts of one copy of the parameters             shard * context
        DATA            R S       have samples of their own (on each tp_rank)              replica * shard
        EP              E         hold different experts                                   expert
        EXPERT_FSDP     X         hold all parts of one set of experts                     shard * context / expert
        EXPERT_DATA     R X       hold, or have parts of, the same experts                 rdp / expert

A group lists its global ranks in ascending order, and a rank's number in it is its position there.

    >>> mesh = Mesh(world_size=8, pipeline_parallel_degree=2, placement="spread")
    >>> mesh.groups(Axis.MP)
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> mesh.axis_rank(Axis.DP, 6)
    2
    >>> mesh = Mesh(world_size=8, tensor_parallel_degree=2, sharded_data_parallel_degree=2)
    >>> mesh.groups(Axis.SHARD), mesh.groups(Axis.REPLICA)
    (((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)))

Source: "Ranking Basics" and "Placement Strategy with Tensor Parallelism" in the public configuration
reference of SMP v1.

The degrees of a job, and the rules between them: pure arithmetic, checked before any process group is made.

    pipeline x replica x shard x context x tensor = number of processes        replica is what the others leave
    expert divides shard x context, or replica x context where shard is 1      expert ranks are inside of those

    >>> degrees_that_break = Degrees(world_size=8, tensor=2, shard=2, expert=4)
    >>> check_degrees(degrees_that_break)
    Traceback (most recent call last):
        ...
    smpc.errors.ConfigError: expert_parallel_degree: expected a divisor of 2 (sharded_data_parallel_degree 2 x ...

`check_degrees` reports every broken rule in one error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from smpc.config import PLACEMENT_STRATEGIES, Config
from smpc.errors import ConfigError

# The keys of the configuration, by the degrees that they set.
KEYS = {
    "pipeline": "pipeline_parallel_degree",
    "tensor": "tensor_parallel_degree",
    "context": "context_parallel_degree",
    "shard": "sharded_data_parallel_degree",
    "expert": "expert_parallel_degree",
}


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many ranks each parallelism has, of `world_size` processes. Not checked: see `check_degrees`."""

    world_size: int
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    shard: int = 1
    expert: int = 1

    @property
    def replica_size(self) -> int:
        """The number of ranks that together hold one replica of the model."""
        return self.pipeline * self.tensor * self.context * self.shard

    @property
    def num_replicas(self) -> int:
        """The number of replicas: processes divided by the other degrees."""
        return self.world_size // self.replica_size


def check_degrees(degrees: Degrees) -> None:
    """Raise ConfigError, with a line for each broken rule, unless the degrees fit each other and the number of processes."""
    faults = list(_degree_faults(degrees))
    if faults:
        raise ConfigError("\n".join(faults))


def _degree_faults(degrees: Degrees) -> Iterator[str]:
    """What is wrong with degrees of parallelism."""
    below_one = {KEYS[name]: value for name, value in _by_name(degrees).items() if value < 1}
    if below_one or degrees.world_size < 1:
        found = ", ".join(
            [f"{degrees.world_size} processes", *(f"{name} {value}" for name, value in below_one.items())]
        )
        yield f"expected at least 1 process and degrees of at least 1, found {found}"
        return
    size, world = degrees.replica_size, degrees.world_size
    if world % size:
        below = world // size * size
        counts = f"{below} or {below + size}" if below else str(size)
        yield (
            f"expected a multiple of {size} processes ({_product_of_degrees(degrees)} make one replica of the model), found {world}; "
            f"start {counts} processes, or change the degrees"
        )
    divides_parameters = degrees.shard > 1
    inside = degrees.context * (degrees.shard if divides_parameters else max(1, degrees.num_replicas))
    if inside % degrees.expert:
        factor = (
            f"sharded_data_parallel_degree {degrees.shard}"
            if divides_parameters
            else f"data-parallel replicas {degrees.num_replicas}"
        )
        yield (
            f"expert_parallel_degree: expected a divisor of {inside} ({factor} x context_parallel_degree {degrees.context}, among whose "
            f"ranks experts are divided), found {degrees.expert}"
        )


def _by_name(degrees: Degrees) -> dict[str, int]:
    return {name: getattr(degrees, name) for name in KEYS}


def _product_of_degrees(degrees: Degrees) -> str:
    """The factors of a replica: pipeline and tensor always, the others where they are more than 1."""
    factors = ("pipeline", "tensor", "context", "shard")
    shown = [name for name in factors if name in ("pipeline", "tensor") or getattr(degrees, name) > 1]
    return " x ".join(f"{KEYS[name]} {getattr(degrees, name)}" for name in shown)


_NAMED_PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}


class Axis(StrEnum):
    """What a group of ranks ranges over; the table is in the module's docstring."""

    WORLD = "world"
    PP = "pp"
    TP = "tp"
    RDP = "rdp"
    DP = "dp"
    MP = "mp"
    REPLICA = "replica"
    SHARD = "shard"
    CP = "cp"
    FSDP = "fsdp"
    DATA = "data"
    EP = "ep"
    EXPERT_FSDP = "expert_fsdp"
    EXPERT_DATA = "expert_data"


# The letters that vary inside a group of each axis; D in a placement is RSC, and RXE for axes with an X or E.
_VARYING = {
    Axis.WORLD: "RSCPT",
    Axis.PP: "P",
    Axis.TP: "T",
    Axis.RDP: "RSC",
    Axis.DP: "RSCT",
    Axis.MP: "PT",
    Axis.REPLICA: "R",
    Axis.SHARD: "S",
    Axis.CP: "C",
    Axis.FSDP: "SC",
    Axis.DATA: "RS",
    Axis.EP: "E",
    Axis.EXPERT_FSDP: "X",
    Axis.EXPERT_DATA: "RX",
}


def _is_of_experts(axis: Axis) -> bool:
    return any(letter in "XE" for letter in _VARYING[axis])


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a job, arranged by parallelism. The number of replicas follows from the other degrees.

    `sharded_data_parallel_degree`: ranks that shard each parameter, in addition to the context-parallel ranks, which also shard
    it.
    """

    world_size: int
    pipeline_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    placement: str = "cluster"
    context_parallel_degree: int = 1
    sharded_data_parallel_degree: int = 1
    expert_parallel_degree: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError if the degrees do not fit each other, or the number of ranks."""
        if self.placement not in PLACEMENT_STRATEGIES:
            options = ", ".join(PLACEMENT_STRATEGIES)
            raise ConfigError(f"placement_strategy: expected one of {options}, found {self.placement!r}")
        check_degrees(self.degrees)

    @classmethod
    def of(cls, degrees: Degrees, placement: str = "cluster") -> Mesh:
        """The mesh of some degrees. Raises ConfigError if they do not fit each other."""
        return cls(
            degrees.world_size,
            degrees.pipeline,
            degrees.tensor,
            placement,
            degrees.context,
            degrees.shard,
            degrees.expert,
        )

    @classmethod
    def build(cls, config: Config, world_size: int) -> Mesh:
        """The mesh of a configuration on `world_size` processes. Raises ConfigError if they do not match."""
        mesh = cls(
            world_size,
            config.pipeline_parallel_degree,
            config.tensor_parallel_degree,
            config.placement_strategy,
            config.context_parallel_degree,
            config.sharded_data_parallel_degree,
            config.expert_parallel_degree,
        )
        if mesh.rdp_size > 1 and not config.ddp:
            raise ConfigError(
                f"expected {mesh.mp_size} processes (pipeline_parallel_degree {mesh.pp_size} x "
                f"tensor_parallel_degree {mesh.tp_size}), found {world_size}, which make {mesh.rdp_size} "
                f"data-parallel replicas; set ddp: true for replicas, or start {mesh.mp_size} processes"
            )
        return mesh

    @property
    def degrees(self) -> Degrees:
        """The degrees alone."""
        return Degrees(
            self.world_size,
            self.pipeline_parallel_degree,
            self.tensor_parallel_degree,
            self.context_parallel_degree,
            self.sharded_data_parallel_degree,
            self.expert_parallel_degree,
        )

    @property
    def pp_size(self) -> int:
        """Ranks over which the model is cut."""
        return self.pipeline_parallel_degree

    @property
    def tp_size(self) -> int:
        """Ranks over which a tensor-parallel module is split."""
        return self.tensor_parallel_degree

    @property
    def cp_size(self) -> int:
        """Ranks over which a sequence is cut."""
        return self.context_parallel_degree

    @property
    def shard_size(self) -> int:
        """Ranks with samples of their own over which a parameter is sharded."""
        return self.sharded_data_parallel_degree

    @property
    def ep_size(self) -> int:
        """Ranks over which experts are divided."""
        return self.expert_parallel_degree

    @property
    def rdp_size(self) -> int:
        """Ranks that have the same part and slices of the model: replicas, or parts of them."""
        return self.world_size // (self.pp_size * self.tp_size)

    @property
    def replica_size(self) -> int:
        """Copies of the parameters: `rdp_size` divided by the degrees of sharding and context parallelism."""
        return self.rdp_size // self.fsdp_size

    @property
    def fsdp_size(self) -> int:
        """Ranks over which a parameter is sharded, if it is."""
        return self.shard_size * self.cp_size

    @property
    def dp_size(self) -> int:
        """Ranks that run the same part of the model."""
        return self.rdp_size * self.tp_size

    @property
    def mp_size(self) -> int:
        """Ranks of one pipeline with its tensor slices."""
        return self.pp_size * self.tp_size

    def size(self, axis: Axis) -> int:
        """Number of ranks in each group of an axis."""
        degrees = self._degrees(axis)
        return math.prod(degrees[letter] for letter in _VARYING[axis])

    def pp_rank(self, rank: int) -> int:
        """Pipeline rank of a global rank."""
        return self.axis_rank(Axis.PP, rank)

    def tp_rank(self, rank: int) -> int:
        """Tensor-parallel rank of a global rank."""
        return self.axis_rank(Axis.TP, rank)

    def rdp_rank(self, rank: int) -> int:
        """Reduced-data-parallel rank of a global rank: without sharding and context parallelism the number of its replica."""
        return self.axis_rank(Axis.RDP, rank)

    def axis_rank(self, axis: Axis, rank: int) -> int:
        """Position of a global rank in its group of an axis: the mixed-radix number of its coordinates along the axis's letters."""
        self._check_rank(rank)
        degrees = self._degrees(axis)
        position, weight = 0, 1
        for letter in reversed(self._letters(axis)):
            rank, digit = divmod(rank, degrees[letter])
            if letter in _VARYING[axis]:
                position += digit * weight
                weight *= degrees[letter]
        return position

    def data_place(self, rank: int, *, tensor_ranks_share: bool) -> tuple[int, int]:
        """Which of how many parts of the data a global rank reads, by number and count.

        Ranks of one pipeline, and of one sequence, read the same part; so do ranks of a tensor-parallel group, if they share their samples.
        """
        shared = (Axis.CP, Axis.TP) if tensor_ranks_share else (Axis.CP,)
        own = [self.axis_rank(axis, rank) for axis in shared]
        readers = [
            other for other in self.group(Axis.DP, rank) if [self.axis_rank(axis, other) for axis in shared] == own
        ]
        return readers.index(rank), len(readers)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The group of an axis that a global rank belongs to."""
        self._check_rank(rank)
        return next(group for group in self.groups(axis) if rank in group)

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of an axis, by their first rank. Each rank is in exactly one."""
        varying = _VARYING[axis]
        others = "".join(letter for letter in self._letters(axis) if letter not in varying)
        offsets = self.first_group(axis)
        return tuple(tuple(rank + offset for offset in offsets) for rank in self._origins(axis, others))

    def first_group(self, axis: Axis) -> tuple[int, ...]:
        """The group of rank 0."""
        return self._origins(axis, _VARYING[axis])

    def _origins(self, axis: Axis, varying: str) -> tuple[int, ...]:
        """The ranks at the origin of all letters but these."""
        degrees = self._degrees(axis)
        found, step = [0], 1
        for letter in reversed(self._letters(axis)):
            if letter in varying:
                moves = range(0, degrees[letter] * step, step)
                found = [move + rank for move in moves for rank in found]
            step *= degrees[letter]
        return tuple(found)

    def _degrees(self, axis: Axis) -> dict[str, int]:
        """The ranks of each letter as the axis sees them."""
        degrees = {
            "P": self.pp_size,
            "T": self.tp_size,
            "R": self.replica_size,
            "S": self.shard_size,
            "C": self.cp_size,
        }
        if not _is_of_experts(axis):
            return degrees
        folded = self.rdp_size if self.fsdp_size % self.ep_size else self.fsdp_size
        return degrees | {"R": self.rdp_size // folded, "X": folded // self.ep_size, "E": self.ep_size}

    def _letters(self, axis: Axis) -> str:
        """The letters of the placement as the axis sees them, the right-most fastest."""
        letters = _NAMED_PLACEMENTS.get(self.placement, self.placement)
        return letters.replace("D", "RXE" if _is_of_experts(axis) else "RSC")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"expected a rank from 0 to {self.world_size - 1}, found {rank}")
