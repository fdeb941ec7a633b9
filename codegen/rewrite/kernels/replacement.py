"""The findings of a rewrite: nodes that an op of `smpc.kernels` can replace, or why it cannot.

    Replacement    `replaced`, of which the last is the result, are to become `calls`
    Refusal        a place that looks like the op, and what about it the op cannot do

Nothing is replaced because a rewrite says so: `smpc.codegen.rewrite.kernels.check` runs both sides first.

A call's arguments have the form of a node's: trees with `Ref`s to nodes, or to earlier calls of the replacement by the names
"#0", "#1", ... The value of the last call replaces the result. Calls that give several values are followed by
`_operator.getitem` of each that is needed; `also` says which other replaced nodes are read on, and the calls that give them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from smpc.codegen.rewrite.kernels.graph import Graph


@dataclass(frozen=True, slots=True)
class Call:
    """One call that replaces nodes."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Replacement:
    """Nodes to be replaced by calls; see the module's docstring.

    `given` are nodes that stay, but whose computation the check must know, since the calls rest on it: that both halves of a table
    are equal, say. `labels` are integer inputs with the number of classes that they count.
    """

    op: str
    replaced: tuple[str, ...]
    calls: tuple[Call, ...]
    given: tuple[str, ...] = ()
    labels: tuple[tuple[str, int], ...] = ()
    also: tuple[tuple[str, str], ...] = ()

    @property
    def results(self) -> tuple[tuple[str, str], ...]:
        """The nodes whose values are read on, with the calls that give them; the result is the last."""
        return (*self.also, (self.result, f"#{len(self.calls) - 1}"))

    @property
    def result(self) -> str:
        """The node whose value the last call gives."""
        return self.replaced[-1]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`node` stays as it is, and why."""

    op: str
    node: str
    reason: str


Find = Callable[[Graph], Iterator[Replacement | Refusal]]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite: the name of the op that it calls, and how it finds what it replaces."""

    op: str
    find: Find
