"""Rewrites a trace for one rank of a context-parallel group: parameters whole, the sequence cut.

It uses the search of `smpc.codegen.rewrite.tensor_parallel` with other limits: parameters are whole, and only dimensions that come from
the sequence are sliced (`SequenceDims`). The cost is the work and memory of a rank beyond its share.
Inputs are whole on every rank, so labels, positions and masks are computed whole, and cut where slices meet them.

    layout        slices
    contiguous    S: rank r of n has the r-th of n pieces
    zigzag        Z: it has pieces r and 2n - 1 - r of 2n, so that causal attention is as much work on every rank
    auto          zigzag where the model has causal attention

An operation that no rule can share is computed whole on every rank: `ContextTrace.whole` names it.

`SequenceDims` has the dimensions of every value that come from the sequence. It starts at the inputs: by default at every dimension but the
first, which is the batch's. From there the sharding rules follow it through the operations: if an operation can be split by slices of an
input along the sequence, its result is sliced along the sequence. For an operation without a rule, the same dimensions of its result are
assumed. In values that depend on no parameter (positions, masks), dimensions of the same size also count.

These dimensions are those which may be sliced, so one too many can make a plan slower, never wrong.

How the ranks that share a sequence compute its attention, and which way is the cheapest for each.

    way          what travels                                       what it can do
    p2p          keys and values, from rank to rank in a ring       causal or not, padding of keys; no dropout
    all_gather   keys and values, to every rank at once             any mask
    a2a          slices of the sequence for slices of the heads     any mask; heads and key heads that the ranks divide
    auto         the cheapest of these

p2p overlaps: a step's transfer costs only the time by which it exceeds the step's work. Where a way does not apply, all_gather is used.
For p2p attention becomes `flash_attention` first (`smpc.codegen.rewrite.kernels`): key heads unrepeated, masks read as a triangle and
hidden keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from smpc.codegen.rewrite import whole_draws
from smpc.codegen.rewrite.context_parallel.rules import (
    ATTENTION,
    EXCHANGE_WAY,
    RULES,
    can_exchange,
    heads,
    is_causal,
    of_tokens,
)
from smpc.codegen.rewrite.kernels.pattern_graph import NodeUsers, Refusal, Replacement, Rewrite
from smpc.codegen.rewrite.kernels.patterns import flash_attention
from smpc.codegen.rewrite.kernels.rewrite import rewrite_kernels
from smpc.codegen.rewrite.tensor_parallel.choose_layouts import ShardingChoice, choose
from smpc.codegen.rewrite.tensor_parallel.layout_problem import Weights
from smpc.codegen.rewrite.tensor_parallel.layouts import Layout, LayoutKind
from smpc.codegen.rewrite.tensor_parallel.rewrite import (
    CONTEXT,
    InsertedCollective,
    ShardedTrace,
    block_and_rest,
    describe,
    equal_blocks_once,
    rewrite,
)
from smpc.codegen.rewrite.tensor_parallel.rules import strategies
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy, argument, of_module, short_name
from smpc.config.planner import CONTEXT_LAYOUTS, CONTEXT_METHODS
from smpc.errors import ConfigError
from smpc.tracer.constants import Ref
from smpc.tracer.ir import Node, NodeKind, TensorSpec, Trace
from smpc.tracer.targets import TENSOR_OPS

METHODS = CONTEXT_METHODS
AUTO, P2P, ALL_GATHER, A2A = METHODS


def with_rings(trace: Trace, degree: int, method: str, weights: Weights) -> Trace:
    """The trace with those attentions as `flash_attention` that are to go around in a ring, and can."""
    attentions = [node for node in trace.nodes if short_name(node.target) == ATTENTION]
    if method not in (AUTO, P2P) or not attentions:
        return trace
    facts = Facts(trace, degree)
    wanted = frozenset(node.name for node in attentions if _cheapest_method(facts, node, method, weights) == P2P)
    if not wanted:
        return trace

    def find(graph: NodeUsers) -> Iterator[Replacement | Refusal]:
        for proposal in flash_attention.REWRITE.find(graph):
            if isinstance(proposal, Replacement) and proposal.result in wanted and _can_ring(proposal, graph, degree):
                yield proposal

    return rewrite_kernels(trace, (Rewrite(flash_attention.REWRITE.op, find),)).trace


def ways_of(facts: Facts, method: str, weights: Weights) -> Mapping[str, str]:
    """By attention that does not go around in a ring: all_gather or a2a."""
    rest = ALL_GATHER if method == P2P else method
    nodes = (node for node in facts.trace.nodes if short_name(node.target) == ATTENTION)
    return {
        node.name: ALL_GATHER if (way := _cheapest_method(facts, node, rest, weights)) == P2P else way for node in nodes
    }


def fits(ways: Mapping[str, str], node: Node, strategy: Strategy) -> bool:
    """Whether a strategy shares an attention in the way that it has, if at all."""
    way = ways.get(node.name)
    if way is None or strategy.output.kind is not LayoutKind.SHARDED or strategy.output.dim != _sequence_dim(node):
        return True
    return (strategy.way == EXCHANGE_WAY) == (way == A2A)


def _sequence_dim(node: Node) -> int:
    return len(node.spec.shape) - 2 if node.spec is not None else -1


def _can_ring(proposal: Replacement, graph: NodeUsers, degree: int) -> bool:
    """Whether slices of this attention's queries and keys can go around."""
    call = proposal.calls[-1]
    lengths = [graph.shape(ref.name)[2] for ref in call.args[:2]]
    options = dict(call.kwargs)
    causal = bool(options.get("causal", False))
    equal = lengths[0] == lengths[1] and not options.get("causal_offset")
    distinct = len({ref.name for ref in call.args[:3]}) == 3
    return distinct and all(length % degree == 0 for length in lengths) and (equal or not causal)


def _cheapest_method(facts: Facts, node: Node, method: str, weights: Weights) -> str:
    """The cheapest way of those that there are, in bytes sent by a rank forward and backward; equal ones in this order."""
    if method == A2A:
        return A2A if can_exchange(facts, node) else ALL_GATHER
    if method != AUTO:
        return method
    names, spec = heads(node), node.spec
    if names is None or spec is None:
        return ALL_GATHER
    queries, keys, values = (facts.shape(name) for name in names)
    n, size = facts.degree, spec.torch_dtype.itemsize
    share = (n - 1) / n
    pair = size * (math.prod(keys) + math.prod(values))
    work = weights.per_flop * 4 * math.prod(queries) * keys[-2] / n * (0.5 if is_causal(node) else 1.0)
    costs = {ALL_GATHER: 2 * share * pair + 4 * weights.latency_bytes}
    if argument(node, 4, "dropout_p", 0.0) == 0.0:
        steps = (3 * n - 2) * weights.latency_bytes
        costs[P2P] = max(0.0, share * pair - work * share) + max(0.0, 2 * share * pair - 2.5 * work * share) + steps
    if can_exchange(facts, node):
        costs[A2A] = 2 * share * (size * math.prod(queries) + pair + spec.num_bytes) / n + 8 * weights.latency_bytes
    return min(costs, key=lambda way: (costs[way], METHODS.index(way)))


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
            return strategy.output.kind is LayoutKind.REPLICATED
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
    return layout.kind is LayoutKind.SHARDED


LAYOUTS = CONTEXT_LAYOUTS
CONTIGUOUS, ZIGZAG = LAYOUTS[1:]

WEIGHTS = Weights(state=0.0, vector_state=0.0, latency_bytes=2.0**14, activation=1000.0, sums_gradients=False)


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """How ranks share the sequence. `dims`: by input, dimensions that are the sequence's; inputs left out: all but the first.

    `attention`: a way of the table above. `output_dim`: outputs that are sliced along it stay slices.
    `sums_later`: the runtime sums gradients of parameters once a step (`ShardedTrace.summed`), not in each backward.
    """

    layout: str = AUTO
    attention: str = AUTO
    dims: tuple[tuple[str, tuple[int, ...]], ...] = ()
    output_dim: int | None = None
    sums_later: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"context_parallel_layout: expected one of {', '.join(LAYOUTS)}, found {self.layout!r}")
        if self.attention not in METHODS:
            raise ConfigError(
                f"context_parallel_attention: expected one of {', '.join(METHODS)}, found {self.attention!r}"
            )


@dataclass(frozen=True, slots=True)
class WholeOperations:
    """Operations of one kind in one module that every rank does whole, on values that have the sequence as a dimension."""

    module: str
    function: str
    source: str
    count: int


@dataclass(frozen=True, slots=True)
class ContextTrace:
    """The trace of one rank, the same for all; its layout; and the operations that are not split.

    `slices`: with an `output_dim`, the leaves of the output that are slices along it, by position, and those that every rank has whole
    though it is the sequence's.
    """

    sharded: ShardedTrace
    layout: str
    whole: tuple[WholeOperations, ...]
    slices: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def share_sequence(
    trace: Trace,
    degree: int,
    plan: ContextPlan | None = None,
    *,
    draws_whole: bool = False,
    experts: Sequence[str] = (),
) -> ContextTrace:
    """The trace that each of `degree` ranks runs; `draws_whole`: see `Facts`. `experts`: modules whose experts ranks divide among them.

    ConfigError for lengths that cannot be cut, or inputs that there are not.
    """
    plan = plan or ContextPlan()
    trace = with_rings(trace, degree, plan.attention, WEIGHTS)
    inputs = _sequence_inputs(trace, plan)
    layout = plan.layout
    if layout == AUTO:
        fits_zigzag = not _uncut(trace, inputs, 2 * degree, plan)
        layout = ZIGZAG if fits_zigzag and any(is_causal(node) for node in trace.nodes) else CONTIGUOUS
    _check_lengths(trace, inputs, degree, layout, plan)
    facts = Facts(
        trace,
        degree,
        mirrored=layout == ZIGZAG,
        inner=True,
        more={**RULES, **whole_draws.RULES, **{of_module(name): of_tokens for name in experts}},
        draws_whole=draws_whole,
    )
    sequence = SequenceDims(facts, inputs)
    ways = ways_of(facts, plan.attention, WEIGHTS)

    def allowed(node: Node, strategy: Strategy) -> bool:
        return sequence.allows(node, strategy) and fits(ways, node, strategy)

    choice = choose(trace, degree, allowed, WEIGHTS, facts=facts)
    sharded, whole = (
        rewrite(trace, choice, facts, CONTEXT, sums_later=plan.sums_later),
        _whole_operations(facts, sequence, choice),
    )
    if plan.output_dim is None:
        return ContextTrace(sharded, layout, whole)
    return ContextTrace(*_with_slices(sharded, sequence, trace, plan.output_dim, layout, whole))


def collectives_of(context: ContextTrace, trace: Trace) -> tuple[InsertedCollective, ...]:
    """The collectives as they are in a trace that was rewritten further: of slices for tensor-parallel ranks they send that share."""
    found = []
    names = {node.name for node in trace.nodes}
    for item in context.sharded.collectives:
        before = context.sharded.trace.node(item.node).spec
        after = trace.node(item.node).spec if item.node in names else None
        if before is not None and after is not None and before.num_elements:
            share = after.num_elements / before.num_elements
            forward, backward = round(item.forward_bytes * share), round(item.backward_bytes * share)
            found.append(dataclasses.replace(item, forward_bytes=forward, backward_bytes=backward))
    return tuple(found)


def describe_context(found: ContextTrace) -> str:
    """A text for people: the layout, the collectives of every block, and operations that every rank computes whole."""
    lines = [f"sequence slices: {found.layout}", describe(found.sharded)]
    if found.whole:
        rows: dict[str, list[str]] = {}
        for item in found.whole:
            block, where = block_and_rest(item.module)
            times = f" x {item.count}" if item.count > 1 else ""
            rows.setdefault(block, []).append(f"{where:<40} {f'{item.function}{times}':<32} {item.source}")
        lines += ["", "computed whole on every rank, as no rule shares it", *equal_blocks_once(rows)]
    return "\n".join(lines)


def _with_slices(
    sharded: ShardedTrace,
    sequence: SequenceDims,
    trace: Trace,
    dim: int,
    layout: str,
    whole: tuple[WholeOperations, ...],
) -> tuple[ShardedTrace, str, tuple[WholeOperations, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    """A function that makes a `ContextTrace` whose outputs are not gathered along `dim`."""
    rewritten = sharded.trace
    leaves, cut, left = list(rewritten.output_leaves), [], []
    for position, (leaf, before) in enumerate(zip(leaves, trace.output_leaves, strict=True)):
        if not isinstance(leaf, Ref) or not isinstance(before, Ref):
            continue
        node = rewritten.node(leaf.name)
        if node.target == f"{TENSOR_OPS}.all_gather" and node.args[1] == dim:
            leaves[position] = node.args[0]
            cut.append(position)
        elif dim in sequence.dims(before.name):
            left.append(position)
    rewritten = dataclasses.replace(rewritten, output_leaves=tuple(leaves))
    live = rewritten.live
    kept = tuple(item for item in sharded.collectives if item.node in live)
    found = dataclasses.replace(sharded, trace=rewritten, collectives=kept)
    return found, layout, whole, (tuple(cut), tuple(left))


def _sequence_inputs(trace: Trace, plan: ContextPlan) -> Mapping[str, Dims]:
    """By placeholder, the dimensions that are the sequence's."""
    given = {name: frozenset(dims) for name, dims in plan.dims}
    found: dict[str, Dims] = {}
    names = []
    for node in trace.nodes:
        if node.kind is NodeKind.PLACEHOLDER and node.spec is not None:
            names.append(node.target)
            rank = len(node.spec.shape)
            found[node.name] = given.get(node.target, frozenset(range(1, rank)))
            if any(not 0 <= dim < rank for dim in found[node.name]):
                raise ConfigError(
                    f"sequence_dims: expected dimensions of {node.target} from 0 to {rank - 1}, found {sorted(found[node.name])}"
                )
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ConfigError(f"sequence_dims: expected inputs among {', '.join(names)}, found {', '.join(unknown)}")
    return found


def _check_lengths(trace: Trace, inputs: Mapping[str, Dims], degree: int, layout: str, plan: ContextPlan) -> None:
    """ConfigError if a sequence cannot be cut."""
    pieces = 2 * degree if layout == ZIGZAG else degree
    wrong = _uncut(trace, inputs, pieces, plan)
    if wrong:
        why = (
            f"{degree} context-parallel ranks with two pieces each (layout 'zigzag')"
            if layout == ZIGZAG
            else f"{degree} ranks"
        )
        raise ConfigError(
            f"expected sequences of a length that {pieces} divides, for {why}; found: {'; '.join(wrong)}; pad them"
            + (", or use the layout 'contiguous'" if layout == ZIGZAG else "")
        )


def _uncut(trace: Trace, inputs: Mapping[str, Dims], pieces: int, plan: ContextPlan) -> list[str]:
    """Sequences that cannot be cut in so many pieces: of the inputs that the plan names, otherwise of token ids, [batch, sequence].

    Of integers only those that are as long as the longest ones are taken for token ids; shorter ones (categories, say) may stay whole.
    """
    named = {name for name, _ in plan.dims}
    given = [node for node in trace.nodes if node.kind is NodeKind.PLACEHOLDER and node.spec is not None]
    integers = {node.target: node.spec.shape[1] for node in given if node.spec is not None and _is_integers(node.spec)}
    tokens = {name for name, length in integers.items() if length == max(integers.values())}
    wrong = []
    for node in given:
        if node.spec is not None and node.target in (named or tokens):
            sizes = [(dim, node.spec.shape[dim]) for dim in sorted(inputs[node.name])]
            wrong += [f"{node.target} has {size} in dimension {dim}" for dim, size in sizes if size % pieces]
    return wrong


def _is_integers(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.dtype in ("int64", "int32")


def _whole_operations(facts: Facts, sequence: SequenceDims, choice: ShardingChoice) -> tuple[WholeOperations, ...]:
    """The operations on the sequence that every rank computes whole."""
    strategies = dict(choice.by_node)
    found: Counter[tuple[str, str, str]] = Counter()
    for node in facts.trace.nodes:
        strategy = strategies.get(node.name)
        if strategy is None or strategy.divides_work or not _has_work(facts, node):
            continue
        if sequence.dims(node.name) or any(sequence.dims(name) for name in node.inputs):
            module = facts.trace.calls[node.call].fqn
            found[module, short_name(node.target) or node.target.rpartition(".")[2], node.source] += 1
    return tuple(WholeOperations(*key, count) for key, count in found.items())


def _has_work(facts: Facts, node: Node) -> bool:
    """Whether it is more than a scalar or a view."""
    spec = facts.spec(node.name)
    big = spec is not None and spec.num_elements > 1
    return node.kind is NodeKind.CALL_MODULE or (bool(node.bytes_moved) and big)
