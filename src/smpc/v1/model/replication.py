"""How a model is replicated: the hooks that average its gradients, and the settings and attributes of sharded parameters.

The configuration chooses the hooks over replicas and tensor-parallel ranks. They are made with the model's stages:

fully_shard                  `StageShards`: parameters are in parts on the replicas; `ModuleShards` without a pipeline. Experts that ranks
                             divide are in parts on the replicas that have the same ones
several replicas             `StageReplicas`: DistributedDataParallel for each stage
tensor-parallel modules      around these: `Distribution.hooks`
experts that ranks divide    around these: `DividedExperts.hooks`

Of sharded parameters without a pipeline, keys say how long blocks stay whole, and scripts read attributes:

    sdp_max_live_parameters            a rank whose model has at most so many elements keeps each block whole from its forward to its
                                       backward; of a larger model, blocks let go of their parameters in between
    sdp_param_persistence_threshold    blocks whose parameters all have fewer elements stay whole for the step

    p.ds_shape, p.ds_numel             the shape and the number of elements of the whole parameter (with tensor parallelism: of the slice)
    p.ds_tensor                        this rank's part; `p.ds_tensor.ds_numel` is the size of the largest part, alike on all ranks
    p.ds_param_shard_group             the ranks that have the other parts

`Replicated` is `model.module` with `ddp`: a wrapper around the model, which scripts written for `ddp` expect.

    model = smp.DistributedModel(net)     # with ddp: true
    model.module                          # Replicated
    model.module.module                   # net

Names are the model's, without a prefix, and attributes that the wrapper does not have are the model's. Hooks on the wrapper are hooks
on the model, as steps call the model itself.

Source: public SMP v1 reference ("Sharded Data Parallelism") for the keys; public training scripts for the names, which are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from smpc.config import Config
from smpc.config.keep import keep_of
from smpc.errors import ConfigError, ConfigUnsupportedError, UsageError
from smpc.executor import StageReplicas
from smpc.executor.replicas.divided_modules import ExpertsApart
from smpc.executor.replicas.fully_shard import ModuleShards, StageShards
from smpc.executor.replicas.group_hooks import StepHooks
from smpc.mesh import Axis
from smpc.mesh.device_mesh import device_mesh
from smpc.nn.init.note_slices import note_parts
from smpc.nn.script_writes.between_steps import notice_again
from smpc.sharding import ShardingOptions, Unit, find_units
from smpc.sharding.dtensors import local
from smpc.sharding.wide_gradients import widen
from smpc.tracer.state.fakes import check_own_memory
from smpc.v1.session.process_state import Session
from smpc.v1.session.wait_limits import exchange
from smpc.v1.steps.context import StepContext


def units_to_keep(module: nn.Module, config: Config, apart: ExpertsApart | None) -> list[Unit]:
    """The units of a model, and how long each stays whole. The parameters in `apart` form units inside the blocks."""
    inner = [] if apart is None else apart.units(module)
    taken = {unit.name for unit in inner}
    units = [*inner, *(Unit(name) for name in find_units(module) if name not in taken)]
    total = sum(parameter.numel() for parameter in module.parameters())
    limits = config.sdp_param_persistence_threshold, config.sdp_max_live_parameters
    names = [unit.name for unit in units]
    return [replace(unit, keep=keep_of(_largest(module, unit.name, names), total, *limits)) for unit in units]


def _largest(module: nn.Module, name: str, names: Iterable[str]) -> int:
    """Elements of the largest parameter of a unit."""
    inside = [other for other in names if other and other != name and (not name or other.startswith(f"{name}."))]
    taken = {id(parameter) for other in inside for parameter in module.get_submodule(other).parameters()}
    own = [parameter.numel() for parameter in module.get_submodule(name).parameters() if id(parameter) not in taken]
    return max(own, default=0)


def sparse_parameters(module: nn.Module) -> list[Tensor]:
    """The weights of embeddings whose gradients are sparse."""
    embeddings = (each for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag))
    return [each.weight for each in embeddings if each.sparse]


def name_parts(parameters: Iterable[nn.Parameter], group_of: Callable[[nn.Parameter], dist.ProcessGroup]) -> None:
    """Give sharded parameters the attributes that scripts read. `group_of`: the ranks that hold the shards of a parameter."""
    for parameter in parameters:
        group = group_of(parameter)
        part: Any = local(parameter.detach())
        part.ds_numel = 1  # without dimensions there are no parts
        if parameter.dim():
            rows = -(-parameter.shape[0] // group.size())
            part.ds_numel = rows * (parameter.numel() // max(1, parameter.shape[0]))
        found: Any = parameter
        found.ds_tensor, found.ds_param_shard_group = part, group
        found.ds_shape, found.ds_numel = parameter.shape, parameter.numel()


class Replication:
    """The replication of one model. `options`: DistributedModel's options for replicas, by their names in `StageReplicas`."""

    def __init__(self, context: StepContext, options: Mapping[str, Any]) -> None:
        self._context, self.options = context, options
        self.replicas: StageReplicas | None = None
        self.hooks: StepHooks | None = None  # with the hooks of the groups around them
        self.exchanged: Mapping[nn.Parameter, nn.Parameter] = {}  # replacements of parameters
        self._comm_hook: tuple[object, Callable[[Any, Any], Any]] | None = None

    def make(self, stages: Mapping[int, nn.Module]) -> StepHooks | None:
        """The hooks that average the gradients of this rank's stages, or None. Collective over the replicas."""
        self.hooks = self._make(stages)
        return self.hooks

    def _make(self, stages: Mapping[int, nn.Module]) -> StepHooks | None:
        context = self._context
        session, options = context.session, self.options
        if context.precision.dtype is not None and session.config._fp32_grad_accumulation:
            widen(parameter for index in sorted(stages) for parameter in stages[index].parameters())
        if session.is_sharded:
            passes = options["backward_passes_per_step"]
            parts = context.distribution.hooks(stages, self._make_shards(stages), passes)
            return parts if context.experts is None else context.experts.hooks_of_parts(stages, parts, passes)
        if session.mesh.rdp_size > 1:
            with exchange("making the replicas equal"):
                apart = () if context.experts is None else context.experts.held(stages)
                sparse = sparse_parameters(context.module)
                self.replicas = StageReplicas(stages, session.groups[Axis.RDP], apart=apart, sparse=sparse, **options)
            if self._comm_hook is not None:
                self.replicas.register_comm_hook(*self._comm_hook)
        hooks = context.distribution.hooks(stages, self.replicas, options["backward_passes_per_step"])
        if context.experts is None:
            return hooks
        return context.experts.hooks(stages, hooks, options["backward_passes_per_step"])

    def _make_shards(self, stages: Mapping[int, nn.Module]) -> StageShards | ModuleShards:
        context, session = self._context, self._context.session
        group, mesh, buffers = session.groups[Axis.RDP], shard_mesh(session), self.options["broadcast_buffers"]
        experts = context.experts
        apart = None if experts is None else experts.apart(stages, shard_mesh(session, of_experts=True))
        note_parts()
        check_own_memory(context.module)
        shards: StageShards | ModuleShards
        with exchange("dividing parameters over the replicas"):
            if not context.has_program:
                keep = partial(units_to_keep, config=session.config, apart=apart)
                shards = ModuleShards(
                    stages[0], group, mesh, keep, ShardingOptions(), broadcast_buffers=buffers, apart=apart
                )
            else:
                shards = StageShards(stages, group, mesh, broadcast_buffers=buffers, apart=apart)
        self.exchanged = shards.exchanged
        if experts is not None:
            experts.exchange(shards.exchanged)
        if session.mesh.shard_size > 1:
            name_parts(shards.exchanged.values(), self._group_of_parts)
        context.placement.exchange(shards.exchanged)
        context.distribution.exchange(shards.exchanged)
        if context.script.optimizer is not None:
            context.script.optimizer.exchange(shards.exchanged)
        notice_again(context.module)
        return shards

    def _group_of_parts(self, parameter: nn.Parameter) -> ProcessGroup:
        """The ranks that together hold one copy of a parameter."""
        experts, groups = self._context.experts, self._context.session.groups
        return groups[Axis.FSDP if experts is None or parameter not in experts else Axis.EXPERT_FSDP]

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """See `DistributedModel.register_comm_hook`."""
        session = self._context.session
        if session.mesh.rdp_size == 1:
            raise ConfigError(
                "register_comm_hook: there are no data-parallel replicas; set ddp: true, and start several replicas"
            )
        if session.mesh.cp_size > 1:
            raise ConfigUnsupportedError(
                "register_comm_hook: with context_parallel_degree above 1 gradients of replicas are summands; leave one of the two out"
            )
        if session.is_sharded:
            raise ConfigUnsupportedError(
                "register_comm_hook: with fully_shard there is no such hook; leave one of the two out"
            )
        if self._comm_hook is not None:
            raise UsageError("register_comm_hook: there is a hook already")
        self._comm_hook = (state, hook)
        self._context.divisor = 1
        if self.replicas is not None:
            self.replicas.register_comm_hook(state, hook)


def shard_mesh(session: Session, *, of_experts: bool = False) -> DeviceMesh:
    """The ranks over which parameters are sharded, and the replicas of the shards if there are several."""
    mesh = session.mesh
    every, parts = (Axis.EXPERT_DATA, Axis.EXPERT_FSDP) if of_experts else (Axis.RDP, Axis.FSDP)
    axes: tuple[Axis, ...] = (every,)
    if mesh.shard_size > 1:
        axes = (Axis.REPLICA, parts) if mesh.replica_size > 1 else (parts,)
    # torch caches layouts by equal meshes, even if their groups were destroyed, so each group gets its own names.
    names = [f"{axis}_{session.groups[axis].group_name}" for axis in axes]
    return device_mesh(mesh, session.rank, session.device.type, axes, session.groups, names)


_MODULE_HOOKS = [name for name in dir(nn.Module) if name.startswith("register_") and name.endswith("_hook")]
# Names of nn.Module that the wrapper takes from the model.
_OF_THE_MODEL = frozenset(
    (*_MODULE_HOOKS, "named_parameters", "named_buffers", "named_modules", "state_dict", "load_state_dict", "compile")
)


class Replicated(nn.Module):
    """A model, wrapped; see above."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def __getattribute__(self, name: str) -> Any:
        return getattr(self.module, name) if name in _OF_THE_MODEL else super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result."""
        return self.module(*args, **kwargs)
