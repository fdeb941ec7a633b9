"""`FusedNovoGrad`: stochastic gradients normalised by layer, with apex's interface.

    optimizer = FusedNovoGrad(model.parameters(), lr=1e-2, betas=(0.95, 0.98), weight_decay=1e-3)

The running norm `n` of each tensor's gradients is one number, state `norm`:

    norm_type 2      n = sqrt(b2 n^2 + (1 - b2) ||g||^2)
    norm_type 0      n = b2 n + (1 - b2) max |g|

It starts at the first gradient's norm, or at 0 with `init_zero`. d = n / sqrt(1 - b2^t) + eps (n + eps without bias correction) is the
denominator of the rule in `smpc.kernels.optimizers`; `reg_inside_moment` puts the weight decay inside the moment.

Different from apex: steps and norms are kept by parameter and not by group, so apex's states have no `norm` and are not loaded; fp64 is
computed in fp64; `master_weights`; sharded parameters, whose norms are taken over whole tensors (see `smpc.optimizers.norm_groups`).

Source: apex.optimizers.FusedNovoGrad; Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from smpc.errors import ConfigUnsupportedError
from smpc.kernels.optimizers import NovoGradRule, novograd_, tensor_norms
from smpc.optimizers.base import Batch, FusedOptimizer
from smpc.optimizers.norm_groups import ShardGroup


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad; see the module's docstring."""

    op = "novograd"
    moments = ("exp_avg",)
    numbers = ("norm",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        *,
        master_weights: bool = False,
        kernel: bool | None = None,
        shard_group: ShardGroup | None = None,
    ) -> None:
        if amsgrad:
            raise ConfigUnsupportedError(
                "FusedNovoGrad: expected amsgrad False, found True; NovoGrad has no AMSGrad variant"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
            "set_grad_none": set_grad_none,
            "master_weights": master_weights,
            "kernel": kernel,
        }
        super().__init__(params, defaults, shard_group, None)

    def _faults(self, options: Mapping[str, Any]) -> list[str]:
        if options["norm_type"] in (0, 2) and not isinstance(options["norm_type"], bool):
            return []
        return [f"expected norm_type 2, or 0 for the largest magnitude, found {options['norm_type']!r}"]

    def _update(self, batches: list[Batch]) -> None:
        for batch in batches:
            novograd_(batch.bucket, self._rule(batch, self._running_norms(batch)), batch.tables)

    def _rule(self, batch: Batch, norms: Tensor) -> NovoGradRule:
        """The factors of this step; everything that has one value a tensor is fp64."""
        group, step, lr = batch.group, batch.step, batch.learning_rate()
        lr = lr.to(torch.float64) if isinstance(lr, Tensor) else lr
        beta1, beta2 = group["betas"]
        beta3 = 1.0 - beta1 if group["grad_averaging"] else 1.0
        correction1, correction2 = 1.0, 1.0
        if group["bias_correction"]:
            correction1, correction2 = 1.0 - beta1**step, math.sqrt(1.0 - beta2**step)
        denominators = norms / correction2 + group["eps"]
        ones = torch.ones_like(denominators)
        if group["reg_inside_moment"]:
            gradient, update = beta3 / denominators, ones * (lr / correction1)
            return NovoGradRule(gradient, update, 1.0 - beta1, beta3 * group["weight_decay"], None)
        outer = ones * (lr * group["weight_decay"]) if group["weight_decay"] else None
        return NovoGradRule(ones * beta3, lr / (correction1 * denominators), 1.0 - beta1, 0.0, outer)

    def _running_norms(self, batch: Batch) -> Tensor:
        """n of every tensor, [tensors] in fp64, after this step's gradients; kept in the state, in its dtype."""
        group = batch.group
        order = 2.0 if group["norm_type"] == 2 else math.inf
        states = [self.state[parameter]["norm"] for parameter in batch.parameters]
        norms = tensor_norms(batch.bucket.grads, order, batch.tables).to(torch.float64)
        norms = self.norm_groups.whole_norms(norms, batch.parameters, order)
        if batch.step > 1 or group["init_zero"]:
            beta2 = group["betas"][1]
            before = torch.stack(states).to(torch.float64)
            power = 2.0 if order == 2.0 else 1.0
            norms = (beta2 * before**power + (1.0 - beta2) * norms**power) ** (1.0 / power)
        torch._foreach_copy_(states, list(norms.unbind()))
        return norms
