"""Equal iterations of a loop that a model's Python unrolled: what is decided for one holds for all.

The scan of a state-space model is one such loop: `state = decay[:, :, i] * state + update[:, :, i]`, for every position i of the sequence.

Nodes first, first + 1, ... are an iteration of `length` nodes if the next `length` nodes are the same again: same operations on values of
the same specs, the same constants but for numbers that index, and the same values, counted from the start of the iteration if they are in
this one or the one before, by name otherwise. Strategies must be the same, too. The first iteration takes its state from elsewhere, so
the second one represents the others; nodes that read parameters are in no loop.

    >>> iterations(trace, facts, range(40))            # doctest: +SKIP
    {12: 6, 13: 7, 14: 8, 18: 6, ...}                  # nodes 12 to 17 and 18 to 23 are what nodes 6 to 11 are
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from smpc.codegen.rewrite.tensor_parallel.rules import strategies
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts
from smpc.tracer.constants import map_references
from smpc.tracer.ir import Node, NodeKind, Trace
from smpc.tracer.targets import GETITEM, SETITEM

_LEAST = 3  # iterations that make a loop
_LONGEST = 256  # nodes of an iteration
_TRIES = 16  # lengths that are tried for an iteration from one node on


def iterations(trace: Trace, facts: Facts, positions: Sequence[int]) -> dict[int, int]:
    """Maps the positions of nodes of a loop's third and later iterations to those of the second; among `positions`, which ascend."""
    nodes = [trace.nodes[position] for position in positions]
    kinds = [_kind(facts, node) for node in nodes]
    index = {node.name: i for i, node in enumerate(nodes)}
    found: dict[int, int] = {}
    start = 0
    while start < len(nodes):
        end = start + 1
        for length in _lengths(kinds, start):
            count = _count(facts, nodes, kinds, index, start, length)
            if count >= _LEAST:
                end = start + count * length
                second = start + length
                found |= {positions[i]: positions[second + (i - second) % length] for i in range(second + length, end)}
                break
        start = end
    return found


def _kind(facts: Facts, node: Node) -> Hashable:
    """A node's operation without its operands: equal for nodes that may correspond in two iterations."""
    spec = None if node.spec is None else (node.spec.shape, node.spec.dtype, node.spec.requires_grad)
    arguments = map_references((node.args, dict(node.kwargs)), lambda name: _spec(facts, name))
    return repr(
        (node.kind.value, node.target, _unnumbered(node, arguments), spec, len(node.mutates), node.grad_enabled)
    )


def _spec(facts: Facts, name: str) -> Any:
    spec = facts.spec(name)
    return None if spec is None else ("value", spec.shape, spec.dtype, spec.requires_grad)


def _unnumbered(node: Node, arguments: Any) -> Any:
    """An index without its numbers, which count the iterations."""
    return re.sub(r"\b\d+\b", "*", repr(arguments)) if node.target in (GETITEM, SETITEM) else arguments


def _lengths(kinds: Sequence[Hashable], start: int) -> Iterator[int]:
    """After how many nodes the same seems to come again."""
    ends = range(start + 1, min(start + _LONGEST, len(kinds) - 1) + 1)
    again = (i - start for i in ends if kinds[i] == kinds[start])
    return (
        length
        for length in itertools.islice(again, _TRIES)
        if kinds[start : start + length] == kinds[start + length : start + 2 * length]
    )


def _count(
    facts: Facts, nodes: Sequence[Node], kinds: Sequence[Hashable], index: dict[str, int], start: int, length: int
) -> int:
    """How many equal iterations there are, the first with what it takes from elsewhere."""
    block = kinds[start : start + length]
    second: list[Any] | None = None
    for count in itertools.count(1):
        begin = start + count * length
        if kinds[begin : begin + length] != block:
            return count
        own = nodes[begin : begin + length]
        form = [(_references(facts, node, index, begin, length), _strategies(facts, node)) for node in own]
        if second is not None and form != second:
            return count
        second = form
    raise AssertionError("a trace has an end")


def _references(facts: Facts, node: Node, index: dict[str, int], begin: int, length: int) -> tuple[Any, ...]:
    """The operands of a node of the iteration that begins there."""

    def form(name: str) -> Any:
        if name in facts.constants:
            return "constant"
        place = index.get(name, -1) - begin
        return place if -length <= place < length and name in index else name

    return tuple(form(name) for name in node.inputs)


def _strategies(facts: Facts, node: Node) -> Any:
    return strategies(facts, node) if node.kind in (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE) else ()
