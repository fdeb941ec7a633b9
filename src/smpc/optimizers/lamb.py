"""`FusedLamb` (also `FusedLAMB`): layer-wise adaptive large-batch training, with apex's interface.

    optimizer = FusedLamb(model.parameters(), lr=1e-3, weight_decay=0.01, max_grad_norm=1.0)

Gradients are divided by gn / max_grad_norm where gn, the norm of all gradients of all groups, is larger; they are left as they are
for the caller to read. The rule is in `smpc.kernels.optimizers`. A tensor gets a trust ratio if its group has weight decay,
or always with `use_nvlamb`.

Different from apex: `max_grad_norm=0` (or None) means no clipping, where apex's kernel zeroes every gradient; steps are counted
by parameter and not by group; fp64 is computed in fp64; `master_weights`; sharded parameters.

Sharded parameters: both norms of a trust ratio, and gn, are taken over whole tensors. DTensors (FSDP2) know their ranks;
for others `shard_group` gives the ranks with parts, and `norm_group` the ranks with other parameters: see
`smpc.optimizers.norm_groups`.

Source: apex.optimizers.FusedLAMB; You et al., "Large Batch Optimization for Deep Learning", 2020.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import ConfigUnsupportedError
from smpc.kernels.optimizers import LambRule, lamb_
from smpc.optimizers.base import Batch, FusedOptimizer, is_number
from smpc.optimizers.gradients import batch_norm
from smpc.optimizers.norm_groups import ShardGroup


class FusedLamb(FusedOptimizer):
    """LAMB; see the module's docstring."""

    op = "lamb"
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        *,
        master_weights: bool = False,
        kernel: bool | None = None,
        shard_group: ShardGroup | None = None,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        if amsgrad:
            raise ConfigUnsupportedError("FusedLamb: expected amsgrad False, found True; LAMB has no AMSGrad variant")
        if max_grad_norm == 0:
            warnings.warn(
                "FusedLamb: max_grad_norm=0 means no clipping (apex would zero all gradients); pass None to say so",
                stacklevel=2,
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "set_grad_none": set_grad_none,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
            "master_weights": master_weights,
            "kernel": kernel,
        }
        super().__init__(params, defaults, shard_group, norm_group)

    def _faults(self, options: Mapping[str, Any]) -> list[str]:
        limit = options["max_grad_norm"]
        if limit is None or (is_number(limit) and 0.0 <= limit < math.inf):
            return []
        return [f"expected max_grad_norm to be None or at least 0, found {limit!r}"]

    def _update(self, batches: list[Batch]) -> None:
        clips = any(group["max_grad_norm"] for group in self.param_groups)
        norm = batch_norm(batches, self.param_groups, self.norm_groups) if clips else None
        for batch in batches:
            group, step = batch.group, batch.step
            beta1, beta2 = group["betas"]
            correct = group["bias_correction"]
            rule = LambRule(
                beta1,
                beta2,
                1.0 - beta1 if group["grad_averaging"] else 1.0,
                1.0 - beta1**step if correct else 1.0,
                1.0 - beta2**step if correct else 1.0,
                group["eps"],
                group["weight_decay"],
                bool(group["adam_w_mode"]),
                bool(group["use_nvlamb"] or group["weight_decay"]),
            )
            lamb_(
                batch.bucket,
                rule,
                batch.learning_rate(),
                _lamb_clip(norm, group["max_grad_norm"], batch.bucket.params[0].device),
                functools.partial(self.norm_groups.whole_norms, parameters=batch.parameters),
                batch.tables,
            )


def _lamb_clip(norm: Tensor | None, limit: float | None, device: torch.device) -> Tensor | None:
    """The divisor of gradients; the host does not wait for it."""
    if norm is None or not limit:
        return None
    return torch.where(norm > limit, norm / limit, 1.0).to(device)


FusedLAMB = FusedLamb
