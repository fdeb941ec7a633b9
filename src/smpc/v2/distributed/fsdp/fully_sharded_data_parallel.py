"""`register_tp_processing_pre_comm_hook`, which scripts call after they have wrapped a model.

Source: public training scripts for SMP v2.
"""

from __future__ import annotations

from torch import nn

from smpc.errors import UsageError

__all__ = ["register_tp_processing_pre_comm_hook"]


def register_tp_processing_pre_comm_hook(model: nn.Module) -> None:
    """Changes nothing: gradients of weights that tensor-parallel ranks have whole are the whole ones already, on each of them.

    SMP v2 sums partial gradients here. Raises UsageError for anything but a module.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"register_tp_processing_pre_comm_hook: expected a model, found {type(model).__name__}")
