"""Optimizers that update many tensors at a time, the norm of gradients, and clipping by it. `smpc.v1`: `smp.optimizers`."""

from smpc.optimizers.adamw import FusedAdamW
from smpc.optimizers.gradients import clip_grad_norm_, global_norm
from smpc.optimizers.lamb import FusedLAMB, FusedLamb
from smpc.optimizers.norm_groups import NormGroups
from smpc.optimizers.novograd import FusedNovoGrad

__all__ = [
    "FusedAdamW",
    "FusedLAMB",
    "FusedLamb",
    "FusedNovoGrad",
    "NormGroups",
    "clip_grad_norm_",
    "global_norm",
]
