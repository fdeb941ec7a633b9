"""What is searched for: the ranks, the limit, the device, and what is tried of each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from smpc.compile.options import PipelineOptions
from smpc.compile.search.space import ALL_SCHEDULES, Candidate, Tried, wire
from smpc.compile.step import Sharding
from smpc.errors import ConfigError
from smpc.experts.structure import find_experts
from smpc.mesh import Axis
from smpc.partitioner.costs.description import Device


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
