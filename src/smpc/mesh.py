"""The mesh: which global rank is which pipeline, tensor and data rank. Pure arithmetic, same on every rank.

Terms
    P, pipeline        pp_rank: which part of the model a rank runs
    T, tensor          tp_rank: which slice of the tensor-parallel modules it holds
    D, reduced data    rdp_rank: which copy of exactly the same parameters it holds
    placement          a permutation of the letters D, P, T; the right-most varies fastest over global ranks.
                       `cluster` is DPT (a replica on neighbours), `spread` is TPD (a replica far apart)
    axis               what a group ranges over:

        axis    ranks of one group                                 size
        WORLD   all                                                pp * tp * rdp
        PP      equal tp_rank and rdp_rank                         pp
        TP      equal pp_rank and rdp_rank                         tp
        RDP     equal pp_rank and tp_rank                          rdp
        DP      equal pp_rank: all that run one part of the model  tp * rdp
        MP      equal rdp_rank: one whole replica of the model     pp * tp

A group lists its global ranks in ascending order, and a rank's number in it is its position there.

    >>> mesh = Mesh(world_size=8, pipeline_parallel_degree=2, placement="spread")
    >>> mesh.groups(Axis.MP)
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> mesh.axis_rank(Axis.DP, 6)
    2

Source: "Ranking Basics" and "Placement Strategy with Tensor Parallelism" in the public configuration
reference of SMP v1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from smpc.config import PLACEMENT_STRATEGIES, Config
from smpc.errors import ConfigError

_NAMED_PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}


class Axis(StrEnum):
    """What a group of ranks ranges over; the table is in the module's docstring."""

    WORLD = "world"
    PP = "pp"
    TP = "tp"
    RDP = "rdp"
    DP = "dp"
    MP = "mp"


# The letters that vary inside a group of each axis.
_VARYING = {Axis.WORLD: "DPT", Axis.PP: "P", Axis.TP: "T", Axis.RDP: "D", Axis.DP: "DT", Axis.MP: "PT"}


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a job, arranged by parallelism. The number of replicas is what the other degrees leave."""

    world_size: int
    pipeline_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    placement: str = "cluster"

    def __post_init__(self) -> None:
        """Raise ConfigError if the degrees do not fit the number of ranks."""
        pp, tp, world = self.pipeline_parallel_degree, self.tensor_parallel_degree, self.world_size
        if self.placement not in PLACEMENT_STRATEGIES:
            options = ", ".join(PLACEMENT_STRATEGIES)
            raise ConfigError(f"placement_strategy: expected one of {options}, found {self.placement!r}")
        if min(world, pp, tp) < 1:
            raise ConfigError(
                f"expected at least 1 process and degrees of at least 1, found {world} processes, "
                f"pipeline_parallel_degree {pp}, tensor_parallel_degree {tp}"
            )
        if world % (pp * tp):
            below = world // (pp * tp) * pp * tp
            counts = f"{below} or {below + pp * tp}" if below else str(pp * tp)
            raise ConfigError(
                f"expected a multiple of {pp * tp} processes (pipeline_parallel_degree {pp} x "
                f"tensor_parallel_degree {tp} make one replica of the model), found {world}; "
                f"start {counts} processes, or change the degrees"
            )

    @classmethod
    def build(cls, config: Config, world_size: int) -> Mesh:
        """The mesh of a configuration on `world_size` processes. Raises ConfigError if they do not match."""
        mesh = cls(
            world_size,
            config.pipeline_parallel_degree,
            config.tensor_parallel_degree,
            config.placement_strategy,
        )
        if mesh.rdp_size > 1 and not config.ddp:
            raise ConfigError(
                f"expected {mesh.mp_size} processes (pipeline_parallel_degree {mesh.pp_size} x "
                f"tensor_parallel_degree {mesh.tp_size}), found {world_size}, which make {mesh.rdp_size} "
                f"data-parallel replicas; set ddp: true for replicas, or start {mesh.mp_size} processes"
            )
        return mesh

    @property
    def pp_size(self) -> int:
        """Ranks over which the model is cut."""
        return self.pipeline_parallel_degree

    @property
    def tp_size(self) -> int:
        """Ranks over which a tensor-parallel module is split."""
        return self.tensor_parallel_degree

    @property
    def rdp_size(self) -> int:
        """Ranks that hold exactly the same parameters: replicas of the model."""
        return self.world_size // (self.pp_size * self.tp_size)

    @property
    def dp_size(self) -> int:
        """Ranks that run the same part of the model."""
        return self.rdp_size * self.tp_size

    @property
    def mp_size(self) -> int:
        """Ranks of one replica of the model."""
        return self.pp_size * self.tp_size

    def size(self, axis: Axis) -> int:
        """Number of ranks in each group of an axis."""
        size = 1
        for letter in _VARYING[axis]:
            size *= self._degrees[letter]
        return size

    def pp_rank(self, rank: int) -> int:
        """Pipeline rank of a global rank."""
        return self._coordinate("P", rank)

    def tp_rank(self, rank: int) -> int:
        """Tensor-parallel rank of a global rank."""
        return self._coordinate("T", rank)

    def rdp_rank(self, rank: int) -> int:
        """Reduced-data-parallel rank of a global rank: the number of its replica."""
        return self._coordinate("D", rank)

    def axis_rank(self, axis: Axis, rank: int) -> int:
        """Position of a global rank in its group of an axis."""
        return self.group(axis, rank).index(rank)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The group of an axis that a global rank belongs to."""
        self._check_rank(rank)
        return next(group for group in self.groups(axis) if rank in group)

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of an axis, by their first rank. Each rank is in exactly one."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            fixed = tuple(self._coordinate(letter, rank) for letter in "DPT" if letter not in _VARYING[axis])
            members.setdefault(fixed, []).append(rank)
        return tuple(map(tuple, members.values()))

    @property
    def _degrees(self) -> dict[str, int]:
        return {"D": self.rdp_size, "P": self.pp_size, "T": self.tp_size}

    def _coordinate(self, letter: str, rank: int) -> int:
        """Position of a rank along a letter: its digit in the mixed base that the placement spells."""
        self._check_rank(rank)
        degrees = self._degrees
        for digit in reversed(_NAMED_PLACEMENTS.get(self.placement, self.placement)):
            if digit == letter:
                return rank % degrees[digit]
            rank //= degrees[digit]
        raise AssertionError(f"no axis {letter!r} in placement {self.placement!r}")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"expected a rank from 0 to {self.world_size - 1}, found {rank}")
