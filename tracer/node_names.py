"""Names of nodes: after what they call, unique, and good as Python variables."""

from __future__ import annotations

import keyword
import re
from typing import Any

from smpc.tracer import targets


class NodeNames:
    """The names given so far in one trace."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def unique(self, base: str) -> str:
        """`base`, or with a number where that is taken."""
        if not base.isidentifier() or keyword.iskeyword(base):
            base = f"_{base}"
        count = self._used.get(base)
        if count is None:
            self._used[base] = 0
            return base
        while True:
            count += 1
            self._used[base] = count
            if f"{base}_{count}" not in self._used:
                self._used[f"{base}_{count}"] = 0
                return f"{base}_{count}"


def short_name(target: str, args: tuple[Any, ...]) -> str:
    """A node name from a target: "torch.Tensor.__rsub__" gives rsub, reading an attribute gives the attribute."""
    if target == targets.GETATTR:
        return str(args[1]).strip("_") or "attribute"
    target = target.removesuffix(targets.APPLY)  # of a custom autograd function: called after its class
    return re.sub(r"\W", "_", target.rpartition(".")[2]).strip("_") or "call"
