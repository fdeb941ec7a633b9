"""The configuration of SMP v2: its keys, their meaning, defaults and bounds, and the rules between degrees.

    >>> Config.parse({"tensor_parallel_degree": 2}, world_size=8).shard_degree(8)
    4

Sources are a dict, flat or nested as a SageMaker estimator takes it, the text of a JSON object, or the path of a file with one; the JSON
object in the environment variable SM_HP_MP_PARAMETERS overrides it. Everything that is wrong is said in one error
(`smpc.config.violations`), before anything is started.

Degrees of parallelism keep rules on a number of ranks (`broken_rules`).

Terms, with the letters of the rules below
    W   world size
    T   tensor_parallel_degree: ranks that share a layer's weights
    H   shard degree: ranks over which parameters are sharded. hybrid_shard_degree, or W / T where that is 0
    C   context_parallel_degree: ranks of those H that share a sequence
    E   expert_parallel_degree: ranks of those H that share the experts

    W = replicas x H x T          C divides H          E divides H

    >>> list(broken_rules(8, hybrid_shard_degree=3))[0].split(";")[0]
    'hybrid_shard_degree: expected 0 or a divisor of 8 (8 processes / tensor_parallel_degree 1), found 3'

Source: the public configuration reference of SMP v2.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smpc.config import parse_json, read_file
from smpc.config.key import key
from smpc.config.numbers import MAX_COUNT, MAX_RANKS, MAX_SEED
from smpc.config.violations import Report, Schema
from smpc.errors import ConfigError, ConfigTypeError


def broken_rules(
    world_size: int,
    hybrid_shard_degree: int = 0,
    tensor_parallel_degree: int = 1,
    context_parallel_degree: int = 1,
    expert_parallel_degree: int = 1,
) -> Iterator[str]:
    """The violations of degrees on this many ranks, a line each. They are at least 1 (`hybrid_shard_degree`: 0)."""
    world, shard, tensor = world_size, hybrid_shard_degree, tensor_parallel_degree
    if world % tensor:
        yield (
            f"tensor_parallel_degree: expected a divisor of the number of processes, {world}, found {tensor}; use one of "
            f"{_divisors(world)}, or start a multiple of {tensor} processes"
        )
        return  # the other degrees divide what is left
    left = world // tensor
    if shard and left % shard:
        yield (
            f"hybrid_shard_degree: expected 0 or a divisor of {left} ({world} processes / tensor_parallel_degree {tensor}), found {shard}; "
            f"use one of 0, {_divisors(left)}, or start a multiple of {shard * tensor} processes"
        )
        return
    effective = shard or left
    written = f"hybrid_shard_degree {shard}" if shard else f"hybrid_shard_degree 0, which is {left} here"
    for name, degree in (
        ("context_parallel_degree", context_parallel_degree),
        ("expert_parallel_degree", expert_parallel_degree),
    ):
        if effective % degree:
            bound = f"at most {effective}" if degree > effective else f"a divisor of {effective}"
            yield f"{name}: expected {bound} ({written}), found {degree}; use one of {_divisors(effective)}, or another hybrid_shard_degree"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


_DEGREES = (
    "hybrid_shard_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
)
_FSDP_DOES = "FSDP1 and FSDP2 both keep empty shards, and checkpoints of either are saved and loaded"


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """One checked, immutable configuration. Build it with `SessionConfig.parse`."""

    hybrid_shard_degree: int = key(
        0,
        "Number of ranks over which parameters are sharded. 0: what the script's FSDP does; with tensor parallelism, all ranks that it "
        "leaves",
        minimum=0,
        limit=MAX_RANKS,
    )
    sm_activation_offloading: bool = key(
        True,
        "Whether offloaded activations are prefetched; otherwise PyTorch's own offloading is used. It acts where the script applies "
        "offload_wrapper",
    )
    activation_loading_horizon: int = key(
        2,
        "Most checkpointed or offloaded layers whose inputs may be in GPU memory at a time",
        minimum=1,
        limit=MAX_COUNT,
    )
    fsdp_cache_flush_warnings: bool = key(
        True, "Whether flushes of the caching allocator are reported: accepted, and without effect yet"
    )
    allow_empty_shards: bool = key(
        False, "Whether tensors that do not divide may have empty shards", no_effect=_FSDP_DOES
    )
    tensor_parallel_degree: int = key(1, "Number of ranks that share a layer's weights", minimum=1, limit=MAX_RANKS)
    context_parallel_degree: int = key(1, "Number of ranks that share a sequence", minimum=1, limit=MAX_RANKS)
    expert_parallel_degree: int = key(1, "Number of ranks that share the experts", minimum=1, limit=MAX_RANKS)
    random_seed: int = key(
        12345,
        "Seed of the random numbers of modules that tensor or expert parallelism distributes",
        minimum=0,
        limit=MAX_SEED,
    )

    @classmethod
    def parse(
        cls,
        source: Mapping[str, Any] | str | os.PathLike[str] | None,
        world_size: int,
        environ: Mapping[str, str] | None = None,
    ) -> SessionConfig:
        """The configuration of `world_size` ranks. Raises ConfigError or one of its subclasses, listing everything that is wrong."""
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(f"expected at least 1 process, found {world_size!r}")
        report = Report(Schema.of(cls, _rules_of(world_size)))
        origin, parameters = _read_source(source)
        report.add_source(origin, parameters)
        report.add_environment(environ or {})
        report.check(report.values).raise_if_any()
        return cls(**report.values)

    def shard_degree(self, world_size: int) -> int:
        """Ranks over which parameters are sharded: `hybrid_shard_degree`, or where that is 0 all that tensor parallelism leaves."""
        return self.hybrid_shard_degree or world_size // self.tensor_parallel_degree

    @property
    def is_native(self) -> bool:
        """Whether nothing is left to smpc: PyTorch does what the script says."""
        inner = (self.tensor_parallel_degree, self.context_parallel_degree, self.expert_parallel_degree)
        return self.hybrid_shard_degree < 2 and inner == (1, 1, 1)

    def ignored(self) -> Iterator[str]:
        """Settings that change nothing here, each with the reason."""
        for field in dataclasses.fields(self):
            reason, value = field.metadata["key"].no_effect, getattr(self, field.name)
            if reason and value != field.default:
                yield f"{field.name}: {value!r} has no effect here: {reason}"


def _read_source(source: Any) -> tuple[str, Mapping[str, Any]]:
    """What a source is called in messages, and its parameters."""
    if source is None:
        return "config", {}
    if isinstance(source, Mapping):
        return "config", source
    if isinstance(source, str) and source.lstrip()[:1] == "{":
        return "config", parse_json(source, "config")
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        return path, read_file(path)
    raise ConfigTypeError(
        f"config: expected a dict, the text of a JSON object, or the path of a .json file, found {type(source).__name__}"
    )


def _rules_of(world_size: int) -> Callable[[Mapping[str, Any], Callable[[str], str]], Iterator[str]]:
    """The rules between keys, on so many ranks."""

    def rules(sound: Mapping[str, Any], where: Callable[[str], str]) -> Iterator[str]:
        degrees = {name: sound[name] for name in _DEGREES if name in sound}
        above = [name for name, degree in degrees.items() if degree > world_size]
        for name in above:
            lowest = 0 if name == "hybrid_shard_degree" else 1
            yield (
                f"{name}: expected from {lowest} to the number of processes, {world_size}, found {degrees[name]}{where(name)}; "
                "use less, or start more processes"
            )
        if not above:
            yield from broken_rules(world_size, **degrees)

    return rules
