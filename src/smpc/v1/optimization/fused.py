"""The fused optimizers of `smpc.optimizers`, with norms over the ranks of the session.

    optimizer = smp.DistributedOptimizer(smp.optimizers.FusedLamb(model.parameters(), lr=1e-3))
    norm = smp.optimizers.clip_grad_norm_(model.local_parameters(), 1.0)      # on every rank, after the step function

The norm of a parameter that tensor parallelism splits is taken over the whole parameter. The norm of all gradients covers the
whole model, over the stages of the pipeline; a parameter that several stages hold counts once. `shard_group` and `norm_group`
replace this. Without `smp.init` the optimizers behave as in `smpc.optimizers`.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.optimizers").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smpc.optimizers as fused
from smpc.errors import UsageError
from smpc.mesh import Axis
from smpc.nn.script_writes.slice_provenance import refuse_of_slices
from smpc.optimizers import NormGroups
from smpc.optimizers.gradients import clip_by
from smpc.optimizers.norm_groups import sum_norms
from smpc.v1.model.distributed_model import DistributedModel
from smpc.v1.optimization.sharded_optimizer_state import Shards
from smpc.v1.session.process_state import state


@dataclass(frozen=True, slots=True)
class SessionNormGroups(NormGroups):
    """The ranks that hold slices and other stages, as given by the session and its model when norms are computed."""

    def groups_of(self, parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
        """The tensor-parallel group, for a parameter that tensor parallelism splits; the expert-parallel group, for one of experts."""
        found = NormGroups.groups_of(self, parameter)
        model, parameter = _model(), _parameter_of(parameter)
        if model is not None and model.has_experts_apart(parameter):
            found = (*found, state.session.groups[Axis.EP])
        if model is None or not isinstance(parameter, nn.Parameter) or not model.is_distributed_parameter(parameter):
            return found
        return (*found, state.session.groups[Axis.TP])

    def spanning(self) -> dist.ProcessGroup | None:
        """The stages of the pipeline; while an optimizer updates what its rank owns, all ranks."""
        if _shards() is not None:
            return state.session.groups[Axis.WORLD]
        return None if _model() is None or state.cfg.pipeline_parallel_degree == 1 else state.session.groups[Axis.PP]

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank counts the parameter: it is on the first stage that holds it, and is the counting one of its owners."""
        model, parameter, shards = _model(), _parameter_of(parameter), _shards()
        is_first = model is None or not isinstance(parameter, nn.Parameter) or model.is_first_holder(parameter)
        return is_first and (shards is None or shards.is_counted(parameter))

    def total_norm(self, norms: Tensor, parameters: Sequence[Tensor], order: float = 2.0) -> Tensor:
        """See NormGroups; with owners, not all ranks of a shard group count a parameter, but all take its norm."""
        if _shards() is None:
            return NormGroups.total_norm(self, norms, parameters, order)
        kept = [place for place, parameter in enumerate(parameters) if self.counts(parameter)]
        whole = self.whole_norms(norms, parameters, order)[kept]
        total = torch.linalg.vector_norm(whole, order) if kept else norms.new_zeros(())
        return sum_norms(total, order, state.session.groups[Axis.WORLD])


class FusedAdamW(fused.FusedAdamW):
    """`smpc.optimizers.FusedAdamW`."""


class FusedLamb(fused.FusedLamb):
    """`smpc.optimizers.FusedLamb`, over the ranks of the session."""

    norm_groups = SessionNormGroups()


class FusedNovoGrad(fused.FusedNovoGrad):
    """`smpc.optimizers.FusedNovoGrad`, over the ranks of the session."""

    norm_groups = SessionNormGroups()


FusedLAMB = FusedLamb


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    kernel: bool | None = None,
) -> Tensor:
    """`smpc.optimizers.clip_grad_norm_` for the parameters of the DistributedModel. Collective over its ranks.

    With fp16 and bf16 it is `clip_master_grads` of the DistributedOptimizer, for all of its parameters.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_of_slices("clip_grad_norm_: max_norm", max_norm)
    with state.acting(state.script_with(given, "clip_grad_norm_")):
        optimizer = state.optimizer
        parameters = [_parameter_of(tensor) for tensor in given]
        model = _model()
        with contextlib.nullcontext() if model is None else model.watch_exchange("clip_grad_norm_"):
            check_same_number("clip_grad_norm_: max_norm", float(max_norm))
        with clipping_in_join(_model(), parameters, float(max_norm), float(norm_type), error_if_nonfinite):
            if optimizer is not None and optimizer.has_masters:
                total: Tensor = optimizer.clip_gradients(given, max_norm, norm_type, error_if_nonfinite)
                return total
            return clip_by(given, max_norm, norm_type, error_if_nonfinite, SessionNormGroups(), kernel)


def check_same_number(what: str, number: float) -> None:
    """UsageError on all ranks of a replica unless they have the same number. Collective over them, where they have other parameters."""
    mesh = state.session.mesh
    for axis, size in ((Axis.PP, mesh.pp_size), (Axis.TP, mesh.tp_size)):
        if size == 1:
            continue
        found = torch.tensor([number, -number], dtype=torch.float64, device=state.session.message_device)
        state.session.groups[axis].allreduce([found], dist.ReduceOp.MAX).wait()
        largest, smallest = found[0].item(), -found[1].item()
        if largest != smallest:
            raise UsageError(
                f"{what}: expected the same number on all ranks, found {number:g} here, and {smallest:g} to {largest:g} on ranks that have "
                "other parts of the model: it was computed of what each rank has alone; sum that up over the ranks with "
                "torch.distributed.all_reduce, or compute it of model.state_dict()"
            )


def clipping_in_join(
    model: DistributedModel | None, parameters: Sequence[Tensor], *how: Any
) -> contextlib.AbstractContextManager[None]:
    """Around `clip_grad_norm_` of parameters, with its other arguments: in `model.join`, ranks that are over may have to repeat it."""
    join = None if model is None else model.enclosing_join
    return contextlib.nullcontext() if join is None else join.clipping(parameters, *how)


def _parameter_of(entry: Tensor) -> Tensor:
    """The model's parameter, for a master."""
    return entry if state.optimizer is None else state.optimizer.parameter_of(entry)


def _shards() -> Shards | None:
    return None if state.optimizer is None else state.optimizer.stepping_shards


def _model() -> DistributedModel | None:
    model = state.model if state.initialized else None
    return model if isinstance(model, DistributedModel) else None
