"""What averages a model's gradients over replicas and tensor-parallel ranks: chosen by the configuration, made with its stages.

fully_shard                  `StageShards`: parameters lie in parts on the replicas; `ModuleShards` without a pipeline
several replicas             `StageReplicas`: DistributedDataParallel for each stage
tensor-parallel modules      around these: `Distribution.hooks`
experts that ranks divide    around these: `DividedExperts.hooks`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smpc.errors import ConfigError, ConfigUnsupportedError, UsageError
from smpc.executor import StageReplicas
from smpc.executor.replicas.fully_shard import StageShards
from smpc.executor.replicas.module_shards import ModuleShards
from smpc.executor.replicas.step_hooks import StepHooks
from smpc.mesh import Axis
from smpc.mesh.device_mesh import device_mesh
from smpc.sharding import ShardingOptions
from smpc.sharding.wide_gradients import widen
from smpc.v1.model.sharded_names import name_parts, units_to_keep
from smpc.v1.session.state import Session
from smpc.v1.session.watched import exchange
from smpc.v1.steps.context import StepContext


class Replication:
    """Of one model. `options`: those of DistributedModel that concern replicas, by their names in `StageReplicas`."""

    def __init__(self, context: StepContext, options: Mapping[str, Any]) -> None:
        self._context, self.options = context, options
        self.replicas: StageReplicas | None = None
        self.exchanged: Mapping[nn.Parameter, nn.Parameter] = {}  # what has come in the places of parameters
        self._comm_hook: tuple[object, Callable[[Any, Any], Any]] | None = None

    def make(self, stages: Mapping[int, nn.Module]) -> StepHooks | None:
        """What averages the gradients of this rank's stages; None where nothing does. Collective over the replicas."""
        context = self._context
        session, options = context.session, self.options
        if context.precision.dtype is not None and session.config._fp32_grad_accumulation:
            widen(parameter for index in sorted(stages) for parameter in stages[index].parameters())
        if session.is_sharded:
            return context.distribution.hooks(stages, self._make_shards(stages), options["backward_passes_per_step"])
        if session.mesh.rdp_size > 1:
            with exchange("making the replicas equal"):
                apart = () if context.experts is None else context.experts.held(stages)
                self.replicas = StageReplicas(stages, session.groups[Axis.RDP], apart=apart, **options)
            if self._comm_hook is not None:
                self.replicas.register_comm_hook(*self._comm_hook)
        hooks = context.distribution.hooks(stages, self.replicas, options["backward_passes_per_step"])
        if context.experts is None:
            return hooks
        return context.experts.hooks(stages, hooks, options["backward_passes_per_step"])

    def _make_shards(self, stages: Mapping[int, nn.Module]) -> StageShards | ModuleShards:
        context, session = self._context, self._context.session
        group, mesh, buffers = session.groups[Axis.RDP], shard_mesh(session), self.options["broadcast_buffers"]
        shards: StageShards | ModuleShards
        with exchange("dividing parameters over the replicas"):
            if not context.has_program:
                keep = partial(units_to_keep, config=session.config)
                shards = ModuleShards(stages[0], group, mesh, keep, ShardingOptions(), broadcast_buffers=buffers)
            else:
                shards = StageShards(stages, group, mesh, broadcast_buffers=buffers)
        self.exchanged = shards.exchanged
        if session.mesh.shard_size > 1:
            name_parts(shards.exchanged.values(), session.groups[Axis.FSDP])
        context.placement.exchange(shards.exchanged)
        context.distribution.exchange(shards.exchanged)
        if context.script.optimizer is not None:
            context.script.optimizer.exchange(shards.exchanged)
        return shards

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
        if session.mesh.ep_size > 1:
            raise ConfigUnsupportedError(
                "register_comm_hook: with expert_parallel_degree above 1 gradients of experts are averaged over other ranks; leave one of "
                "the two out"
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


def shard_mesh(session: Session) -> DeviceMesh:
    """The ranks over which parameters lie in parts, and the replicas of them if there are several."""
    mesh = session.mesh
    axes: tuple[Axis, ...] = (Axis.RDP,)
    if mesh.shard_size > 1:
        axes = (Axis.REPLICA, Axis.FSDP) if mesh.replica_size > 1 else (Axis.FSDP,)
    # torch keeps layouts by meshes that are equal, even of groups that were destroyed: names of their own for each group.
    names = [f"{axis}_{session.groups[axis].group_name}" for axis in axes]
    return device_mesh(mesh, session.rank, session.device.type, axes, session.groups, names)
