"""`smp.optimizers`: the fused optimizers of `smpc.optimizers`, with norms over the ranks of the session.

    optimizer = smp.DistributedOptimizer(smp.optimizers.FusedLamb(model.parameters(), lr=1e-3))
    norm = smp.optimizers.clip_grad_norm_(model.local_parameters(), 1.0)      # on every rank, after the step function

A parameter that tensor parallelism splits has the norm of the whole parameter; the norm of all gradients is that of the whole
model, over the stages of the pipeline, in which a parameter that several stages hold counts once. `shard_group` and
`norm_group` replace this. Without `smp.init` they are those of `smpc.optimizers`.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.optimizers").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smpc.optimizers as fused
from smpc.mesh import Axis
from smpc.optimizers import NormGroups
from smpc.optimizers.gradients import clip_by
from smpc.v1.model import DistributedModel
from smpc.v1.state import state

__all__ = ["FusedAdamW", "FusedLAMB", "FusedLamb", "FusedNovoGrad", "clip_grad_norm_"]


@dataclass(frozen=True, slots=True)
class SessionNormGroups(NormGroups):
    """The ranks that hold slices and other stages, as the session and its model stand when norms are computed."""

    def groups_of(self, parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
        """The tensor-parallel group, for a parameter that tensor parallelism splits."""
        found = NormGroups.groups_of(self, parameter)
        model = _model()
        if model is None or not isinstance(parameter, nn.Parameter) or not model.is_distributed_parameter(parameter):
            return found
        return (*found, state.session.groups[Axis.TP])

    def spanning(self) -> dist.ProcessGroup | None:
        """The stages of the pipeline."""
        return None if _model() is None or state.cfg.pipeline_parallel_degree == 1 else state.session.groups[Axis.PP]

    def counts(self, parameter: Tensor) -> bool:
        """Whether this is the first stage that holds the parameter."""
        model = _model()
        return model is None or not isinstance(parameter, nn.Parameter) or model.is_first_holder(parameter)


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
    """`smpc.optimizers.clip_grad_norm_` for the parameters of the DistributedModel. Collective over its ranks."""
    return clip_by(parameters, max_norm, norm_type, error_if_nonfinite, SessionNormGroups(), kernel)


def _model() -> DistributedModel | None:
    model = state.model if state.initialized else None
    return model if isinstance(model, DistributedModel) else None
