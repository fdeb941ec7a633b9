"""Lightning's `grad_norm` of a module whose network is spread over ranks: the norms of whole gradients, as in one process.

    from lightning.pytorch.utilities import grad_norm              # earlier or later

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, norm_type=2))                # on every rank

By itself it has the gradients of this rank's stage, or parts of them. Scripts hold the function, so its code is exchanged, and no name.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.grads import grad_norm
from torch import nn

from smpc.v1.optimization.gradient_norms import whole_gradient_norms

_own = types.FunctionType(grad_norm.__code__, grad_norm.__globals__, grad_norm.__name__, grad_norm.__defaults__)


def exchange_grad_norm() -> Callable[[], None]:
    """Have Lightning's function count all ranks; the function that takes it back."""
    grad_norm.__code__ = _counting_all_ranks.__code__

    def take_back() -> None:
        grad_norm.__code__ = _own.__code__

    return take_back


def _counting_all_ranks(module: Any, norm_type: Any, group_separator: Any = "/") -> Any:
    """What Lightning's function runs: it has that one's globals, and so imports."""
    from smpc.integrations.lightning_norms import norms_by_name

    return norms_by_name(module, norm_type, group_separator)


def norms_by_name(module: nn.Module, norm_type: float | str, group_separator: str) -> dict[str, Any]:
    """What Lightning's function returns for a module in one process. Collective over the ranks of the module's network."""
    order = float(norm_type)
    if order <= 0:
        found: dict[str, Any] = _own(module, norm_type, group_separator)  # its error
        return found
    whole = whole_gradient_norms(dict(module.named_parameters()), order)
    norms = {f"grad_{order}_norm{group_separator}{name}": norm for name, norm in whole.items()}
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.stack([*norms.values()]).norm(order)
    return norms
