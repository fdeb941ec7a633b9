"""The blocks with experts of a transformed model, for `isinstance`, as scripts tell FSDP what to wrap. A block stays of its own class.

Source: public training scripts for SMP v2.
"""

from __future__ import annotations

from torch import nn

__all__ = ["MoELayer"]
_MARK = "_smpc_experts_block"


class _Blocks(type):
    """A class of all modules that are marked."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Module) and _MARK in vars(instance)


class MoELayer(metaclass=_Blocks):
    """Any block of a transformed model that has a router and experts."""


def mark_block(block: nn.Module) -> None:
    """Says that a module is such a block."""
    vars(block)[_MARK] = True
