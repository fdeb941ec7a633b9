"""A module call that has not returned yet, as the recorder keeps it."""

from __future__ import annotations

from typing import Any

from torch import nn

from smpc.tracer.ir import Autocast
from smpc.tracer.structure import Structure


class OpenCall:
    """What is known of the call so far; `index` is that of the `ModuleCall` it becomes, `first` its first node."""

    __slots__ = (
        "arguments",
        "autocast",
        "bare",
        "first",
        "fqn",
        "grad_enabled",
        "index",
        "leaves",
        "module",
        "parent",
        "sequence",
    )

    def __init__(self, index: int, fqn: str, module: nn.Module, parent: int, first: int) -> None:
        self.index, self.fqn, self.module, self.parent, self.first = index, fqn, module, parent, first
        self.leaves: tuple[Any, ...] = ()
        self.arguments = Structure()
        self.grad_enabled = True
        self.autocast: Autocast | None = None
        self.bare = False
        self.sequence = -1  # number of the sequence that its children are the layers of
