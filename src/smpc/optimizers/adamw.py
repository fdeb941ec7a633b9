"""`FusedAdamW`: torch.optim.AdamW, for all parameters of a group in one launch.

    optimizer = FusedAdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    optimizer = FusedAdamW(model.parameters(), master_weights=True)         # bf16 or fp16 parameters with fp32 masters

The rule is in `smpc.kernels.optimizers`. It differs from torch's in the state: moments of fp16 and bf16 parameters are fp32.

Source: torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from smpc.kernels.optimizers import AdamWRule, adamw_
from smpc.optimizers.base import Batch, FusedOptimizer


class FusedAdamW(FusedOptimizer):
    """AdamW. Arguments are torch's, with `set_grad_none`, `master_weights` and `kernel` of `FusedOptimizer`."""

    op = "adamw"
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        set_grad_none: bool = True,
        master_weights: bool = False,
        kernel: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "set_grad_none": set_grad_none,
            "master_weights": master_weights,
            "kernel": kernel,
        }
        super().__init__(params, defaults, None, None)

    def _faults(self, options: Mapping[str, Any]) -> list[str]:
        return []

    def _update(self, batches: list[Batch]) -> None:
        for batch in batches:
            group = batch.group
            beta1, beta2 = group["betas"]
            rule = AdamWRule(beta1, beta2, group["eps"], group["weight_decay"], bool(group["amsgrad"]), batch.step)
            adamw_(batch.bucket, rule, batch.learning_rate(), batch.tables)
