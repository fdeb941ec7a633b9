"""Source: public training scripts for SMP v2."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

__all__ = ["setup_transformer_engine_cp_groups"]


def setup_transformer_engine_cp_groups(model: nn.Module, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Tells TransformerEngine's attention in a model which ranks share a sequence; without such layers it warns, and does nothing."""
    found = [getattr(module, "set_context_parallel_group", None) for module in model.modules()]
    setters = [each for each in found if callable(each)]
    for each in setters:
        each(group, list(ranks), None)
    if not setters:
        warnings.warn(
            "setup_transformer_engine_cp_groups: no layer of TransformerEngine found, so it has no effect", stacklevel=2
        )
