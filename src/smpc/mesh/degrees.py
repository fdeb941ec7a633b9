"""The degrees of a job, and the rules between them: pure arithmetic, checked before any process group is made.

    pipeline x replica x shard x context x tensor = number of processes        replica is what the others leave
    expert divides shard x context, or replica x context where shard is 1      expert ranks lie inside of those

    >>> degrees_that_break = Degrees(world_size=8, tensor=2, shard=2, expert=4)
    >>> check_degrees(degrees_that_break)
    Traceback (most recent call last):
        ...
    smpc.errors.ConfigError: expert_parallel_degree: expected a divisor of 2 (sharded_data_parallel_degree 2 x ...

`check_degrees` reports every broken rule in one error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
