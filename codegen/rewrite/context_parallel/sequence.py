"""Where the sequence is: the dimensions of every value that come from it.

It starts at the inputs: by default at every dimension but the first, which is the batch's. From there the sharding rules follow it
through the operations: if an operation can be split by slices of an input along the sequence, its result is sliced along the sequence.
For an operation without a rule, the same dimensions of its result are assumed. In values that depend on no parameter (positions,
masks), dimensions of the same size also count.

These dimensions are those which may be sliced, so one too many can make a plan slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from smpc.codegen.rewrite.tensor_parallel.layouts import Kind, Layout
from smpc.codegen.rewrite.tensor_parallel.rules import strategies
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy
from smpc.tracer.ir import Node, NodeKind

Dims = frozenset[int]


class SequenceDims:
    """The dimensions of each value that are the sequence's, and which strategies slice no others."""

    def __init__(self, facts: Facts, inputs: Mapping[str, Dims]) -> None:
        self._facts = facts
        parameters = {name for state in facts.trace.state if state.is_parameter for name in state.names}
        self._parameters = {n.name for n in facts.trace.nodes if n.kind is NodeKind.GET_ATTR and n.target in parameters}
        self._dims: dict[str, Dims] = {name: dims for name, dims in inputs.items() if dims}
        self._lengths = frozenset(facts.shape(name)[dim] for name, dims in self._dims.items() for dim in dims)
        for node in facts.trace.nodes:
            found = self._of_result(node)
            if found:
                self._dims[node.name] = found

    def dims(self, name: str) -> Dims:
        """The dimensions of a value that are the sequence's."""
        return self._dims.get(name, frozenset())

    def allows(self, node: Node, strategy: Strategy) -> bool:
        """Whether a strategy shares the sequence, or nothing: parameters stay whole."""
        if node.kind is NodeKind.GET_ATTR:
            return strategy.output.kind is Kind.REPLICATED
        if strategy.state:
            return False
        cut = [(name, layout) for name, layout in zip(node.inputs, strategy.inputs, strict=True) if _is_cut(layout)]
        if any(layout.dim not in self.dims(name) and not self._is_free(name) for name, layout in cut):
            return False
        if _is_cut(strategy.output):
            return strategy.output.dim in self.dims(node.name)
        return not cut or any(layout.dim in self.dims(name) for name, layout in cut)

    def _is_free(self, name: str) -> bool:
        """Whether a value is cut as the others of its operation are."""
        return name in self._parameters or name in self._facts.constants

    def _of_result(self, node: Node) -> Dims:
        spec = self._facts.spec(node.name)
        if node.kind is NodeKind.PLACEHOLDER or spec is None:
            return self.dims(node.name)
        found: Dims = frozenset()
        if node.kind in (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE) and any(self.dims(n) for n in node.inputs):
            found = frozenset(dim for dim in self._carried(node) if dim < len(spec.shape))
        if node.name in self._facts.constants:
            found |= {dim for dim, size in enumerate(spec.shape) if size in self._lengths}
        return found

    def _carried(self, node: Node) -> Dims:
        found = set()
        for strategy in strategies(self._facts, node):
            cut = [(name, layout) for name, layout in zip(node.inputs, strategy.inputs, strict=True) if _is_cut(layout)]
            fits = all(layout.dim in self.dims(name) or self._is_free(name) for name, layout in cut)
            if fits and _is_cut(strategy.output) and any(layout.dim in self.dims(name) for name, layout in cut):
                found.add(strategy.output.dim)
        if found:
            return frozenset(found)
        rank = len(self._facts.shape(node.name))
        alike = (self.dims(n) for n in node.inputs if self.dims(n) and len(self._facts.shape(n)) == rank)
        return next(alike, frozenset())


def _is_cut(layout: Layout) -> bool:
    return layout.kind is Kind.SHARDED
