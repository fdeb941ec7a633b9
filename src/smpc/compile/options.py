"""What can be asked of a compilation: one dataclass, from which the arguments of `smpc.compile_model` and `smpc compile` are made.

    PipelineOptions(pipeline_parallel_degree=4, microbatches=8, schedule="zb-h1")
    PipelineOptions.of(config, device="cpu")            as the settings of a script say, but for what is given

What a script can set is declared in `smpc.config.planner`, the rest in `smpc.compile.keys`: name, type, default, meaning, bounds,
and the option of the command. Nothing else lists options.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from smpc.codegen.rewrite.context_parallel.rewrite import AUTO, LAYOUTS, METHODS, ContextTrace, collectives_of
from smpc.codegen.rewrite.expert_parallel import ExpertTrace
from smpc.codegen.rewrite.tensor_parallel.rewrite import ShardedTrace
from smpc.codegen.schedules.named import Choice, choose
from smpc.compile.keys import CompilationKeys
from smpc.config import KEYS, Config
from smpc.config.key import keys_of
from smpc.config.numbers import parse_bytes
from smpc.config.planner import PlannerKeys
from smpc.errors import ConfigError, SmpcError
from smpc.kernels.setting import faults_of
from smpc.mesh import Axis, Mesh
from smpc.partitioner.costs.device import Device, Group
from smpc.partitioner.costs.device_file import find_devices
from smpc.partitioner.costs.named_optimizers import Optimizer, find_optimizer
from smpc.partitioner.costs.node_costs import CostModel, NodeTimes, times_with_collectives
from smpc.tracer.ir import Trace

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class PipelineOptions(CompilationKeys):
    """How to cut and schedule a model; `smpc.config.Config` gives the same keys the same meaning."""

    def __post_init__(self) -> None:
        for name in ("recompute", "leaf_modules", *(() if isinstance(self.kernels, str) else ("kernels",))):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        values = [(field.name, known, getattr(self, field.name)) for field, known in keys_of(PipelineOptions)]
        wrong = [known.out_of_bounds(name, value) for name, known, value in values if isinstance(value, (int, float))]
        shards = self.sharded_data_parallel_degree
        if (self.fully_shard or shards > 1) and self.shard_optimizer_state:
            name = "fully_shard" if self.fully_shard else "sharded_data_parallel_degree"
            wrong.append(f"{name} and shard_optimizer_state exclude each other; keep one")
        replicas = self.data_parallel_degree
        if shards > 0 and replicas % shards:
            more = -(-replicas // shards) * shards
            wrong.append(
                f"sharded_data_parallel_degree: expected a divisor of data_parallel_degree {replicas}, found {shards}: it is how many "
                f"replicas split parameters among them; plan for {more} replicas (smpc compile -d {more}), or change the degree"
            )
        wrong += [
            f"{name}: not with {degree} above 1; leave one of them out"
            for degree in ("tensor_parallel_degree", "context_parallel_degree")
            for name in ("trace_execution_times", "trace_memory_usage")
            if getattr(self, degree) > 1 and getattr(self, name)  # the model at hand is whole
        ]
        wrong += self._wrong_context()
        wrong += self._wrong_experts()
        if any(wrong):
            raise ConfigError("\n".join(filter(None, wrong)))
        _ = self.choice
        _ = self.limit_bytes
        _ = self.devices
        find_optimizer(self.optimizer)
        if faults := faults_of(self.kernels):
            raise ConfigError("\n".join(faults))

    def _wrong_experts(self) -> list[str]:
        """What does not go with experts that are divided over ranks."""
        degree, replicas, context = self.expert_parallel_degree, self.data_parallel_degree, self.context_parallel_degree
        if degree <= 1:
            return []
        others = ("shard_optimizer_state", "trace_execution_times", "trace_memory_usage")
        wrong = [name for name in others if getattr(self, name)]
        found = [f"{name}: not with expert_parallel_degree above 1; leave one of them out" for name in wrong]
        shards = self.sharded_data_parallel_degree
        name, number = ("sharded_data_parallel_degree", shards) if shards > 1 else ("data_parallel_degree", replicas)
        if number * context % degree:
            product = f" x context_parallel_degree {context}" if context > 1 else ""
            found.append(
                f"expert_parallel_degree: expected a divisor of {name} {number}{product}, among whose ranks experts are "
                f"divided, found {degree}"
            )
        return found

    def _wrong_context(self) -> Iterator[str]:
        ways = {name: getattr(self, name) for name in ("context_parallel_attention", "context_parallel_layout")}
        for name, value in ways.items():
            options = METHODS if name.endswith("attention") else LAYOUTS
            if value not in options:
                yield f"{name}: expected one of {', '.join(options)}, found {value!r}"
            elif value != AUTO and self.context_parallel_degree == 1:
                yield f"{name}: {value} has no effect with context_parallel_degree 1; leave it out, or set the degree"
        shared = self.context_parallel_degree > 1 and self.tensor_parallel_degree > 1
        if shared and self.tensor_parallel_plan != "auto":
            yield (
                f"tensor_parallel_plan: expected 'auto' with context_parallel_degree {self.context_parallel_degree}, found "
                f"{self.tensor_parallel_plan!r}: styles do not look through what context-parallel ranks do with weights"
            )

    @classmethod
    def of(cls, config: Config, **others: Any) -> PipelineOptions:
        """As the settings of a script say; `others` win over them."""
        names = [field.name for field, _ in keys_of(PlannerKeys)]
        settings = {name: (KEYS[name].as_option or _same)(getattr(config, name)) for name in names}
        return cls(**{**settings, **others})

    @property
    def cost_model(self) -> CostModel:
        """What nodes and messages cost on the device, and parameters with the optimizer."""
        optimizer, shards = find_optimizer(self.optimizer), self.num_shards
        in_parts = optimizer.fully_sharded(shards) if shards > 1 else None
        return self._cost_models(in_parts or optimizer.replicated(self.num_holders, self.shard_optimizer_state))[0]

    @property
    def num_holders(self) -> int:
        """Ranks that run a stage with the same parameters: replicas, and the ranks of each that share its sequences."""
        return self.data_parallel_degree * self.context_parallel_degree

    @property
    def num_shards(self) -> int:
        """Ranks that have parts of one copy of the parameters; 1: each has all of them."""
        shards = self.sharded_data_parallel_degree
        if shards > 1:  # with fully_shard, too
            return shards * self.context_parallel_degree
        return self.num_holders if self.fully_shard else 1

    @property
    def expert_optimizer(self) -> Optimizer:
        """What it keeps of experts: fewer ranks hold the same ones, and divide them further if they divide parameters."""
        optimizer, degree = find_optimizer(self.optimizer), self.expert_parallel_degree
        if self.num_shards > 1:
            return optimizer.in_parts_on(max(1, self.num_shards // degree))
        return optimizer.summed_at_end(self.num_holders // degree, self.shard_optimizer_state)

    @property
    def mesh(self) -> Mesh:
        """The ranks, replicas far apart."""
        degrees = self.pipeline_parallel_degree, self.tensor_parallel_degree, self.context_parallel_degree
        return Mesh(
            math.prod(degrees) * self.data_parallel_degree,
            degrees[0],
            degrees[1],
            context_parallel_degree=degrees[2],
            sharded_data_parallel_degree=self.sharded_data_parallel_degree,
            expert_parallel_degree=self.expert_parallel_degree,
        )

    @property
    def expert_group(self) -> Group:
        """The ranks that experts are divided over: neighbours among those that run one stage with the same slices of weights."""
        return Group.of(self.mesh, Axis.EP, self.devices[0])

    def expert_times(self, trace: Trace, divided: ExpertTrace) -> NodeTimes:
        """Predicted times of what a rank with some of the experts runs: traffic takes time too. `trace`: `divided`'s, or with kernels."""
        return times_with_collectives(trace, divided.collectives, self.cost_model, self.expert_group, self.devices[0])

    def sharded_times(self, trace: Trace, sharded: ShardedTrace) -> NodeTimes:
        """Predicted times of what a tensor-parallel rank runs: collectives take time too. `trace`: `sharded`'s, with kernels or without."""
        device = self.devices[0]
        group = Group.neighbours(sharded.degree, device)
        return times_with_collectives(trace, sharded.collectives, self.cost_model, group, device)

    def context_times(self, trace: Trace, context: ContextTrace) -> NodeTimes:
        """Predicted times of a context-parallel rank, in groups of ranks that are as far apart as `context_group` says."""
        return times_with_collectives(
            trace, collectives_of(context, trace), self.cost_model, self.context_group, self.devices[0]
        )

    @property
    def context_group(self) -> Group:
        """The ranks that share a sequence: tensor-parallel ranks are neighbours, these are around them."""
        tensor, context = self.tensor_parallel_degree, self.context_parallel_degree
        return Group(context, max(1, min(context, self.devices[0].devices_per_host // tensor)))

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each pipeline rank."""
        return find_devices(self.device, self.pipeline_parallel_degree)

    @property
    def rank_cost_models(self) -> tuple[CostModel, ...]:
        """Where ranks have devices of several kinds, what each costs; empty: all are alike."""
        models = self._cost_models(self.cost_model.optimizer)
        return () if all(device == self.devices[0] for device in self.devices) else models

    def _cost_models(self, optimizer: Optimizer) -> tuple[CostModel, ...]:
        """By rank; all with the slowest of their wires."""
        number = self.pipeline_parallel_degree
        models = [CostModel.of(device, number, optimizer, self.microbatches) for device in self.devices]
        bandwidth, latency = min(m.link_bandwidth for m in models), max(m.link_latency for m in models)
        return tuple(dataclasses.replace(m, link_bandwidth=bandwidth, link_latency=latency) for m in models)

    @property
    def rank_limits(self) -> tuple[int, ...]:
        """Most bytes on each rank: the memory limit, and what the device has where ranks have several kinds; empty: none."""
        limit = self.limit_bytes
        if self.rank_cost_models:
            return tuple(min(limit or device.memory_bytes, device.memory_bytes) for device in self.devices)
        return () if limit is None else (limit,) * self.pipeline_parallel_degree

    @property
    def limit_bytes(self) -> int | None:
        """The memory limit in bytes."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit, "memory_limit")

    def in_flight_of(self, num_ranks: int) -> tuple[int, ...] | None:
        """Microbatches in flight by stage with another number of ranks and one stage on each; None: no such schedule."""
        try:
            choice = dataclasses.replace(self, pipeline_parallel_degree=num_ranks, manual=None).choice
        except SmpcError:
            return None
        return tuple(choice.in_flight) if len(choice.placement) == num_ranks else None

    @property
    def choice(self) -> Choice:
        """The schedule, and the placement of the stages that it needs."""
        return choose(
            self.pipeline_parallel_degree,
            self.microbatches,
            pipeline=self.pipeline,
            schedule=self.schedule,
            num_pieces=self.virtual_pipeline_degree,
            active_microbatches=self.active_microbatches,
        )


def asked_of(function: str, given: Mapping[str, Any]) -> PipelineOptions:
    """The options that a function of this name was called with. TypeError for one that is unknown, or required and missing."""
    known = {field.name: key for field, key in keys_of(PipelineOptions)}
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else f"; expected some of {', '.join(known)}"
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    missing = [name for name in known if known[name].required and name not in given]
    if missing:
        raise TypeError(f"{function}() missing required keyword-only argument: {', '.join(map(repr, missing))}")
    return PipelineOptions(**given)


def takes_options(function: F) -> F:
    """Gives a function with the fields of `PipelineOptions` as `**options` a signature that lists them, and says what they mean."""
    kinds = inspect.Parameter
    shown = inspect.signature(function)
    own = [parameter for parameter in shown.parameters.values() if parameter.kind is not kinds.VAR_KEYWORD]
    found = [
        kinds(
            field.name,
            kinds.KEYWORD_ONLY,
            default=kinds.empty if known.required else field.default,
            annotation=field.type,
        )
        for field, known in keys_of(PipelineOptions)
    ]
    after = sum(parameter.kind is not kinds.KEYWORD_ONLY for parameter in own)
    vars(function)["__signature__"] = shown.replace(parameters=[*own[:after], *found, *own[after:]])
    meanings = [
        textwrap.fill(f"{field.name}: {known.meaning}.", 120, initial_indent="    ", subsequent_indent=" " * 8)
        for field, known in keys_of(PipelineOptions)
    ]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *meanings])
    return function


def _same(value: Any) -> Any:
    return value
