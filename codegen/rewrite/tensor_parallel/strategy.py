"""What sharding rules are made of: strategies, and what a rule may ask about the trace.

A strategy says in which layouts an operation takes its inputs and in which it gives its output. A rule lists the strategies of one kind
of operation; what holds for every operation (all whole, or all broadcast) is added to them in `smpc.codegen.rewrite.tensor_parallel.rules`.

How dimensions survive a change of shape: `view`, `reshape`, `flatten` and the like.

A change of shape falls into groups of neighbouring dimensions whose products agree: [2, 8, 32] -> [16, 4, 8] has the groups (2, 8) -> (16)
and (32) -> (4, 8). A slice along a dimension is one along another where the group keeps its elements in one run, or in equal runs:

    32 -> 4, 8     S of the 32 is S of the 4
    96 -> 3, 4, 8  S of the 4 is S of the 96 in three blocks of 32
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from smpc.codegen.rewrite.tensor_parallel.layouts import BROADCAST, PARTIAL, Layout, LayoutKind
from smpc.tracer.constants import Ref
from smpc.tracer.ir import Node, NodeKind, TensorSpec, Trace
from smpc.tracer.targets import GETITEM

SDPA = "scaled_dot_product_attention"
CONVOLUTIONS = tuple(f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3))
_CHANGES_SHAPE = ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")


@dataclass(frozen=True, slots=True)
class Strategy:
    """Layouts by `Node.inputs`, and of the output; of a tuple's parts, which all have the same.

    `state`: layouts of parameters that a module called whole reads itself; of a summand (P) every rank holds the whole. `sent`: bytes that
    a rank sends in each of the collectives inside the operation, forward and backward. `way`: the operation of
    `smpc.executor.tensor_ops` that does it on slices, where that is not the operation itself; of a module called whole, the argument by
    which it is told of how many slices one is. `experts`: of a module in which ranks have whole experts, the names of those with experts
    ("": itself), and the attributes that count these in each. `whole_bytes`: of what an operation that divides its work keeps, what has
    this size is whole on every rank.
    """

    inputs: tuple[Layout, ...]
    output: Layout
    state: tuple[tuple[str, Layout], ...] = ()
    sent: tuple[int, ...] = ()
    sent_back: tuple[int, ...] = ()
    way: str = ""
    experts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    whole_bytes: int = 0

    @property
    def divides_work(self) -> bool:
        """Whether each rank does a part of it only."""
        layouts = (*self.inputs, self.output, *(layout for _, layout in self.state))
        return any(layout.kind is LayoutKind.SHARDED for layout in layouts)


def short_name(target: str) -> str:
    """ "add" of "torch.Tensor.add" and of "torch.add"; "" of what is not torch's."""
    return target.rpartition(".")[2] if target.startswith("torch.") and not target.startswith("torch.ops.") else ""


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by place or by name."""
    return node.args[position] if len(node.args) > position else dict(node.kwargs).get(name, default)


def num_groups(node: Node) -> int:
    """In how many groups a convolution has its channels; 1 of what is none."""
    groups = argument(node, 6, "groups", 1) if short_name(node.target) in CONVOLUTIONS else 1
    return groups if isinstance(groups, int) else 1


def draws(node: Node) -> bool:
    """Whether an operation draws random numbers: torch marks attention without dropout, too."""
    return (
        node.random and argument(node, 4, "dropout_p", 0.0) != 0.0 if short_name(node.target) == SDPA else node.random
    )


Rule = Callable[["Facts", Node], Iterator[Strategy]]


def of_module(name: str) -> str:
    """What the rule of a module called whole is known by, in `Facts.more`."""
    return f"module {name}"


def operands(*values: Any) -> tuple[str, ...] | None:
    """Names of operands; None if one is no tensor of the trace, or is there twice."""
    if not all(isinstance(value, Ref) for value in values):
        return None
    names = tuple(value.name for value in values)
    return names if len(dict.fromkeys(names)) == len(names) else None


class Facts:
    """A trace and the number of ranks, with what rules ask about them.

    `mirrored`: slices are Z, not S. `inner`: whether slices of an inner dimension are followed through changes of shape that join it to an
    outer one which could be sliced as well. `more`: rules by short name, by target, or by `of_module`, beside those that every trace has.
    `draws_whole`: whether what draws random numbers runs whole, so that ranks draw alike.
    """

    def __init__(
        self,
        trace: Trace,
        degree: int,
        mirrored: bool = False,
        inner: bool = False,
        more: Mapping[str, Rule] = MappingProxyType({}),
        draws_whole: bool = False,
    ) -> None:
        self.trace, self.degree, self.mirrored, self.inner, self.more = trace, degree, mirrored, inner, more
        self.draws_whole = draws_whole
        self.num_pieces = degree * 2 if mirrored else degree  # that a dimension is cut in
        self._parts: dict[str, list[TensorSpec]] = {}
        for node in trace.nodes:
            source = node.args[0] if node.target == GETITEM else None
            if isinstance(source, Ref) and node.spec is not None and trace.node(source.name).spec is None:
                self._parts.setdefault(source.name, []).append(node.spec)
        self.constants = self._find_constants()
        self._read = frozenset(node.target for node in trace.nodes if node.kind is NodeKind.GET_ATTR)
        self.read_inside = self._find_read_inside()
        self._blocks = self._find_blocks()

    def spec(self, name: str) -> TensorSpec | None:
        """The spec of a value. For a tuple: the spec of its first part in use. None: it has none."""
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

    def is_shorter(self, name: str, other: str) -> bool:
        """Whether a value holds less exactly what another one does, of floating point: in fewer bytes, or as whole numbers."""
        own, given = self.spec(name), self.spec(other)
        if own is None or given is None or not given.torch_dtype.is_floating_point:
            return False
        return not own.torch_dtype.is_floating_point or own.torch_dtype.itemsize < given.torch_dtype.itemsize

    def is_read(self, state: str) -> bool:
        """Whether an operation of the trace reads a parameter or buffer, by its canonical name."""
        return state in self._read

    def layouts(self, dim: int, size: int, in_blocks: bool = True) -> Iterator[Layout]:
        """The ways to slice a dimension."""
        if size and size % self.num_pieces == 0:
            yield self.sharded(dim)
        if size and size % self.degree == 0:
            for blocks in self._blocks.get(size, ()) if in_blocks else ():
                yield self.sharded(dim, blocks)

    def sharded(self, dim: int, blocks: tuple[int, ...] = ()) -> Layout:
        """A slice along a dimension."""
        return Layout.sharded(dim, blocks, self.mirrored)

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
                plain = BROADCAST if dim is None else self.sharded(dim, way.blocks)
                inputs.append((others or {}).get(name, plain))
            yield Strategy(tuple(inputs), PARTIAL if output is None else self.sharded(output, way.blocks))

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

    def _find_read_inside(self) -> Mapping[str, int]:
        """By the names of parameters and buffers, how many calls of whole modules read them."""
        calls = Counter(node.target for node in self.trace.nodes if node.kind is NodeKind.CALL_MODULE)
        found: dict[str, int] = {}
        for state in self.trace.state if calls else ():
            parts = [name.split(".") for name in state.names]
            owners = dict.fromkeys(".".join(own[:end]) for own in parts for end in range(1, len(own)))
            found[state.name] = sum(calls[owner] for owner in owners)
        return {name: count for name, count in found.items() if count}

    def _find_blocks(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """By size of a dimension, the blocks in which it is taken apart somewhere."""
        found: dict[int, dict[tuple[int, ...], None]] = {}
        for node in self.trace.nodes:
            if node.name in self.constants or not node.inputs or self.trace.node(node.inputs[0]).spec is None:
                continue
            for blocks in self._blocks_of(node):
                if len(blocks) > 1 and all(size % self.num_pieces == 0 for size in blocks):
                    found.setdefault(sum(blocks), {})[blocks] = None
        return {size: tuple(blocks) for size, blocks in found.items()}

    def _blocks_of(self, node: Node) -> Iterator[tuple[int, ...]]:
        name = short_name(node.target)
        groups = num_groups(node)
        if groups > 1 and groups % self.degree and node.spec is not None:
            for channels in (self.shape(node.inputs[0])[1], node.spec.shape[1]):
                yield (channels // groups,) * groups
        if name in ("split", "chunk"):
            yield split_sizes(node, self.shape(node.inputs[0]))
        elif name in _CHANGES_SHAPE and node.spec is not None:
            for way in carried(self.shape(node.inputs[0]), node.spec.shape, self.num_pieces, self.inner):
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


Shape = tuple[int, ...]
Group = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Carried:
    """A slice along `source` (in blocks) of the input is one along `target` (in blocks) of the output.

    `any_blocks`: the dimension itself is unchanged, so its blocks are kept, whatever they are.
    """

    source: int
    target: int
    source_blocks: Shape = ()
    target_blocks: Shape = ()
    any_blocks: bool = False


def dimension_groups(source: Shape, target: Shape) -> tuple[Group, ...]:
    """The groups of dimensions, without dimensions of size 1; empty if the shapes hold no elements."""
    if 0 in source or math.prod(source) != math.prod(target):
        return ()
    groups: list[Group] = []
    ins, outs = [d for d, n in enumerate(source) if n != 1], [d for d, n in enumerate(target) if n != 1]
    i = o = 0
    while i < len(ins):
        first_i, first_o = i, o
        size_i, size_o = source[ins[i]], target[outs[o]]
        i, o = i + 1, o + 1
        while size_i != size_o:
            if size_i < size_o:
                size_i, i = size_i * source[ins[i]], i + 1
            else:
                size_o, o = size_o * target[outs[o]], o + 1
        groups.append((tuple(ins[first_i:i]), tuple(outs[first_o:o])))
    return tuple(groups)


def carried(source: Shape, target: Shape, degree: int, inner: bool = False) -> Iterator[Carried]:
    """Every slicing that survives, for this number of slices; of inner dimensions that are joined the first, or with `inner` all."""
    for ins, outs in dimension_groups(source, target):
        outer = source[ins[0]] % degree == 0 and target[outs[0]] % degree == 0
        if outer:
            yield Carried(ins[0], outs[0], any_blocks=len(ins) == len(outs) == 1)
        if outer and not inner:
            continue
        if len(ins) == len(outs) == 1:
            continue
        if len(ins) == 1:
            for dim, blocks in _in_blocks(outs, target, degree, inner):
                yield Carried(ins[0], dim, source_blocks=blocks)
        elif len(outs) == 1:
            for dim, blocks in _in_blocks(ins, source, degree, inner):
                yield Carried(dim, outs[0], target_blocks=blocks)


def _in_blocks(dims: tuple[int, ...], shape: Shape, degree: int, every: bool) -> Iterator[tuple[int, Shape]]:
    """The first of the inner dimensions that can be sliced, or every one, and the blocks of the product that this means."""
    total = math.prod(shape[dim] for dim in dims)
    count = shape[dims[0]]
    for dim in dims[1:]:
        if shape[dim] % degree == 0:
            yield dim, (total // count,) * count
            if not every:
                return
        count *= shape[dim]
