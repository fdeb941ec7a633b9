"""What sharding rules are made of: strategies, and what a rule may ask about the trace.

A strategy says in which layouts an operation takes its inputs and in which it gives its output. A rule lists the strategies of one kind
of operation; what holds for every operation (all whole, or all broadcast) is added to them in `smpc.codegen.rewrite.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smpc.codegen.rewrite.shapes import carried
from smpc.codegen.rewrite.sharding import BROADCAST, PARTIAL, Kind, Layout
from smpc.tracer.ir import Node, NodeKind, TensorSpec, Trace
from smpc.tracer.literals import Ref
from smpc.tracer.targets import GETITEM

_CHANGES_SHAPE = ("view", "reshape", "flatten", "unflatten")


@dataclass(frozen=True, slots=True)
class Strategy:
    """Layouts by `Node.inputs`, and of the output; of a tuple's parts, which all have the same.

    `state`: layouts of parameters that a module called whole reads itself. `sent`: bytes that a rank sends in each of the collectives
    inside the operation, which are all in the forward pass.
    """

    inputs: tuple[Layout, ...]
    output: Layout
    state: tuple[tuple[str, Layout], ...] = ()
    sent: tuple[int, ...] = ()

    @property
    def divides_work(self) -> bool:
        """Whether each rank does a part of it only."""
        layouts = (*self.inputs, self.output, *(layout for _, layout in self.state))
        return any(layout.kind is Kind.SHARDED for layout in layouts)


def short_name(target: str) -> str:
    """ "add" of "torch.Tensor.add" and of "torch.add"; "" of what is not torch's."""
    return target.rpartition(".")[2] if target.startswith("torch.") and not target.startswith("torch.ops.") else ""


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by place or by name."""
    return node.args[position] if len(node.args) > position else dict(node.kwargs).get(name, default)


class Facts:
    """A trace and the number of ranks, with what rules ask about them."""

    def __init__(self, trace: Trace, degree: int) -> None:
        self.trace, self.degree = trace, degree
        self._parts: dict[str, list[TensorSpec]] = {}
        for node in trace.nodes:
            source = node.args[0] if node.target == GETITEM else None
            if isinstance(source, Ref) and node.spec is not None and trace.node(source.name).spec is None:
                self._parts.setdefault(source.name, []).append(node.spec)
        self.constants = self._find_constants()
        self._blocks = self._find_blocks()

    def spec(self, name: str) -> TensorSpec | None:
        """The spec of a value; of a tuple, that of its first part in use. None: it has none."""
        spec = self.trace.node(name).spec
        return spec if spec is not None else next(iter(self._parts.get(name, ())), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value with a spec."""
        spec = self.spec(name)
        assert spec is not None, name
        return spec.shape

    def is_tuple(self, name: str) -> bool:
        """Whether a value is several tensors."""
        return self.trace.node(name).spec is None

    def requires_grad(self, name: str) -> bool:
        """Whether gradients flow back to it."""
        spec = self.trace.node(name).spec
        if spec is not None:
            return spec.requires_grad
        return any(part.requires_grad for part in self._parts.get(name, ()))

    def layouts(self, dim: int, size: int, in_blocks: bool = True) -> Iterator[Layout]:
        """The ways to slice a dimension."""
        if size and size % self.degree == 0:
            yield Layout.sharded(dim)
            for blocks in self._blocks.get(size, ()) if in_blocks else ():
                yield Layout.sharded(dim, blocks)

    def along(
        self,
        node: Node,
        dims: Mapping[str, int | None],
        output: int | None,
        size: int,
        others: Mapping[str, Layout] | None = None,
    ) -> Iterator[Strategy]:
        """Strategies that slice one dimension of the operation, which the inputs have as `dims` and the output as `output`.

        Inputs without it are broadcast; an output without it is partial. `others` are layouts of some inputs in place of these.
        """
        for way in self.layouts(0, size):
            inputs = []
            for name in node.inputs:
                dim = dims.get(name)
                plain = BROADCAST if dim is None else Layout.sharded(dim, way.blocks)
                inputs.append((others or {}).get(name, plain))
            yield Strategy(tuple(inputs), PARTIAL if output is None else Layout.sharded(output, way.blocks))

    def _find_constants(self) -> frozenset[str]:
        """Values that no parameter has a part in: whole on every rank."""
        parameters = {name for state in self.trace.state if state.is_parameter for name in state.names}
        found: dict[str, None] = {}
        for node in self.trace.nodes:
            reads_parameter = node.kind is NodeKind.GET_ATTR and node.target in parameters
            if node.kind is NodeKind.CALL_MODULE or reads_parameter:
                continue
            if all(name in found for name in node.inputs):
                found[node.name] = None
        return frozenset(found)

    def _find_blocks(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """By size of a dimension, the blocks in which it is taken apart somewhere."""
        found: dict[int, dict[tuple[int, ...], None]] = {}
        for node in self.trace.nodes:
            if node.name in self.constants or not node.inputs or self.trace.node(node.inputs[0]).spec is None:
                continue
            for blocks in self._blocks_of(node):
                if len(blocks) > 1 and all(size % self.degree == 0 for size in blocks):
                    found.setdefault(sum(blocks), {})[blocks] = None
        return {size: tuple(blocks) for size, blocks in found.items()}

    def _blocks_of(self, node: Node) -> Iterator[tuple[int, ...]]:
        name = short_name(node.target)
        if name in ("split", "chunk"):
            yield split_sizes(node, self.shape(node.inputs[0]))
        elif name in _CHANGES_SHAPE and node.spec is not None:
            for way in carried(self.shape(node.inputs[0]), node.spec.shape, self.degree):
                yield from (blocks for blocks in (way.source_blocks, way.target_blocks) if blocks)


def split_sizes(node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the parts that a split or chunk makes."""
    dim = argument(node, 2, "dim", 0)
    total = shape[dim % len(shape)]
    if short_name(node.target) == "chunk":
        count = argument(node, 1, "chunks")
        each = -(-total // count)
    else:
        each = argument(node, 1, "split_size", dict(node.kwargs).get("split_size_or_sections"))
    if isinstance(each, (tuple, list)):
        return tuple(each)
    if not isinstance(each, int) or each < 1:
        return (total,)
    return tuple(min(each, total - start) for start in range(0, total, each))
