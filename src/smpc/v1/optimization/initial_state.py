"""Initial state for an optimizer that has made no step yet: the state that it would have after one, to load values into.

    make_state(optimizer, [weight, bias])     optimizer.state has entries for both; neither they nor their gradients have changed

It is made by a step with gradients and learning rates of 0, as torch's own `set_optimizer_state_dict` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


@torch.no_grad()
def make_state(optimizer: Optimizer, wanted: Sequence[Tensor]) -> None:
    """Let the optimizer create the state of these entries of its groups."""
    kept = [(entry, entry.grad) for group in optimizer.param_groups for entry in group["params"]]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for entry, _ in kept:
            entry.grad = None
        for entry in wanted:
            entry.grad = torch.zeros_like(entry)
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for entry, grad in kept:
            entry.grad = grad
