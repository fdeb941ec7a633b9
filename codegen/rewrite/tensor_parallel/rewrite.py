"""Rewrites a trace for one rank of a tensor-parallel group: local shapes, and every collective as a call that can be read.

    before    h = F.linear(x, self.up.weight)                                    [2, 8, 128]
              y = F.linear(h, self.down.weight)                                  [2, 8, 32]
    after     x_in = tensor_ops.replicate_in(x, self.tensor_group)
              h = F.linear(x_in, self.up.weight)                                 [2, 8, 32]: the first of four ranks
              y = F.linear(h, self.down.weight)                                  [2, 8, 32], a summand
              y_sum = tensor_ops.all_reduce(y, self.tensor_group)

The program is the same for all ranks of the group; `self.tensor_group`, an attribute of the model, has everything that differs. A
collective comes right before the first operation that needs it. Module calls in which something changed are marked to be written node by
node. The shapes of the new nodes are checked: each is run on fake tensors of its inputs' local shapes.

What a rank runs in place of an operation: the same with the sizes of its parts, or one that talks to the other ranks.

view(x, [2, 8, 32])     on S(2), of two ranks       view(x, [2, 8, 16])
embedding(ids, table)   on a table split by rows    tensor_ops.embedding(ids, table, padding, group): zeros for rows that others have
cross_entropy(x, y)     on split classes            tensor_ops.cross_entropy(x, y, group)
conv2d(x, w, groups=8)  on split channels, 2 ranks  conv2d(x, w, groups=4)
experts(x, i, weights)  on slices of the sequence   experts(x, i, weights, num_sequence_slices=2): a module called whole is told
                        on slices of the experts    tensor_ops.on_summands(experts, ("bias",), group, x, i, weights): a bias added once
                        with some of the experts    by_expert(experts, ("num_experts",), group, x, i, weights): these alone serve tokens
block(x)                with some of the experts    in_segments(block, (("up", ("num_experts",)),), group, x): of modules inside
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from smpc.codegen.rewrite.tensor_parallel.choose_layouts import ShardingChoice
from smpc.codegen.rewrite.tensor_parallel.layouts import (
    BROADCAST,
    PARTIAL,
    REPLICATED,
    CollectiveStep,
    Layout,
    LayoutKind,
    conversion,
    local_state,
    sent_bytes,
)
from smpc.codegen.rewrite.tensor_parallel.rules import localised
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy, argument, draws, short_name
from smpc.config.numbers import format_bytes
from smpc.errors import CodegenError
from smpc.tracer.constants import Ref, map_references, references
from smpc.tracer.ir import ModuleCall, Node, NodeKind, StateSpec, TensorSpec, Trace, contiguous_stride
from smpc.tracer.replay import evaluate
from smpc.tracer.targets import BY_EXPERT, IN_SEGMENTS, ON_SUMMANDS, TENSOR_OPS


def on_parts(facts: Facts, node: Node, strategy: Strategy, group: Ref) -> Node:
    """The node as a rank runs it by a strategy, with the names of its inputs as they are; `group` has the rank's TensorGroup."""
    if strategy.way and node.kind is NodeKind.CALL_MODULE:
        return dataclasses.replace(node, kwargs=(*node.kwargs, (strategy.way, facts.degree)))
    if strategy.experts:
        has_summands = strategy.output == PARTIAL
        caller, names = (BY_EXPERT, strategy.experts[0][1]) if has_summands else (IN_SEGMENTS, strategy.experts)
        return dataclasses.replace(node, kwargs=((caller, (names, group)), *node.kwargs))
    summands = tuple(name.removeprefix(f"{node.target}.") for name, layout in strategy.state if layout == PARTIAL)
    if summands:
        return dataclasses.replace(node, kwargs=((ON_SUMMANDS, (summands, group)), *node.kwargs))
    if strategy.way:
        cut = next(layout for layout in strategy.inputs if layout.kind is LayoutKind.SHARDED)
        args = (group, (cut.dim, cut.blocks, cut.mirrored), *node.args)
        return dataclasses.replace(node, target=f"{TENSOR_OPS}.{strategy.way}", args=args)
    if short_name(node.target) == "cross_entropy" and strategy.sent:
        return _loss_on_parts(node, group)
    if short_name(node.target) == "embedding" and strategy.inputs[1:] == (Layout.sharded(0),):
        args = (*node.args[:2], argument(node, 2, "padding_idx"), group)
        return dataclasses.replace(node, target=f"{TENSOR_OPS}.embedding", args=args, kwargs=())
    return localised(facts, node, strategy)


def _loss_on_parts(node: Node, group: Ref) -> Node:
    options = ((4, "ignore_index", -100), (6, "reduction", "mean"), (7, "label_smoothing", 0.0))
    given = [(name, argument(node, place, name, default), default) for place, name, default in options]
    kwargs = tuple((name, value) for name, value, default in given if value != default)
    args = (argument(node, 0, "input"), argument(node, 1, "target"), group)
    return dataclasses.replace(node, target=f"{TENSOR_OPS}.cross_entropy", args=args, kwargs=kwargs)


RING = "ring_attention"  # the way of attention whose messages go on while it computes
# slices come together, or apart
_MOVING = frozenset({"all_gather", "gather_in", "reduce_scatter", "split", "all_to_all"})
TENSOR, CONTEXT = "tensor", "context"  # what ranks share: the parameters, or the sequence


def group_attribute(axis: str) -> str:
    """The attribute of the model that holds the rank's TensorGroup of that axis."""
    return f"{axis}_group"


GROUP = group_attribute(TENSOR)
_RESHAPING = {"torch.Tensor.view": "torch.Tensor.reshape", "torch.Tensor.view_as": "torch.Tensor.reshape_as"}


@dataclass(frozen=True, slots=True)
class InsertedCollective:
    """One call that the rewrite inserted, with the bytes that a rank sends for it, forward and backward."""

    node: str
    function: str
    value: str
    source: Layout
    target: Layout
    module: str  # FQN of the module that needs it
    forward_bytes: int
    backward_bytes: int
    saved_bytes: int = 0  # what gathering the value for the same operation would send beyond that
    overlaps: bool = False  # it goes on while the operation computes

    @property
    def moves(self) -> bool:
        """Whether it puts slices together or apart, rather than to sum tensors of the same size."""
        return self.function in _MOVING


@dataclass(frozen=True, slots=True)
class ShardedTrace:
    """The trace of one rank, the same for all; how the parameters are sliced; and the inserted calls."""

    trace: Trace
    degree: int
    layouts: tuple[tuple[str, Layout], ...]  # of every parameter that is not whole, by canonical name
    collectives: tuple[InsertedCollective, ...]
    proven: bool = True
    axis: str = TENSOR
    summed: tuple[str, ...] = ()  # parameters whose gradients are summands: what runs the trace sums them once a step

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in one forward and backward."""
        return sum(item.forward_bytes + item.backward_bytes for item in self.collectives)

    @property
    def summed_bytes(self) -> int:
        """Bytes that a rank sends in one step for the gradients that are summed then, of all stages."""
        sizes = (state.spec.num_bytes for state in self.trace.state if state.name in self.summed)
        return round(2 * sum(sizes) * (self.degree - 1) / self.degree)


def rewrite(
    trace: Trace, choice: ShardingChoice, facts: Facts | None = None, axis: str = TENSOR, *, sums_later: bool = False
) -> ShardedTrace:
    """The trace that each of `choice.degree` ranks runs. Raises CodegenError if a shape does not come out right.

    `facts`: those that the choice was made by. `sums_later`: the gradient of a whole parameter of which every rank has a summand stays
    one (`ShardedTrace.summed`), where otherwise each backward sums it.
    """
    return _Writer(trace, choice, facts or Facts(trace, choice.degree), axis, sums_later).write()


def describe(rewritten: ShardedTrace) -> str:
    """For people: the layouts and the collectives of every block, equal ones once, with the bytes that a rank sends."""
    of_module = _by_block(rewritten)
    lines = [
        f"{rewritten.axis} parallel: {rewritten.degree} ranks, {format_bytes(rewritten.sent_bytes)} sent by each in a forward and backward"
    ]
    if rewritten.summed:
        lines.append(
            f"and once a step {format_bytes(rewritten.summed_bytes)} for the gradients of {len(rewritten.summed)} parameters"
        )
    return "\n".join((*lines, *equal_blocks_once(of_module)))


def equal_blocks_once(rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Lines for people, of rows by block: blocks with the same rows share one list."""
    blocks: dict[tuple[str, ...], list[str]] = {}
    for module, own in rows.items():
        blocks.setdefault(tuple(own), []).append(module)
    for same, modules in blocks.items():
        yield from ("", first_of_alike(modules), *(f"    {row}" for row in same))


def first_of_alike(modules: Sequence[str]) -> str:
    """Names of modules that are alike, for people."""
    more = f" and {len(modules) - 1} like it, to {modules[-1]}" if len(modules) > 1 else ""
    return f"{modules[0] or 'the model'}{more}"


def _by_block(rewritten: ShardedTrace) -> dict[str, list[str]]:
    """By block (the members of lists of modules; the model itself for the rest), a line for each layout and collective."""
    found: dict[str, list[str]] = {}
    for name, layout in rewritten.layouts:
        block, _ = block_and_rest(name.rpartition(".")[0])
        found.setdefault(block, []).append(f"{name.removeprefix(f'{block}.'):<40} {layout}")
    for item in rewritten.collectives:
        if item.forward_bytes or item.backward_bytes:
            block, where = block_and_rest(item.module)
            change = f"{item.function} {item.source} -> {item.target}"
            sent = f"{format_bytes(item.forward_bytes)} forward, {format_bytes(item.backward_bytes)} backward"
            sent += f", {format_bytes(item.saved_bytes)} less than gathering" if item.saved_bytes else ""
            sent += ", while it computes" if item.overlaps else ""
            found.setdefault(block, []).append(f"{where:<40} {change:<32} {sent}")
    return found


def block_and_rest(module: str) -> tuple[str, str]:
    """The outermost member of a list of modules that contains a module, and the module in it: `h.3` and `mlp.up` for `h.3.mlp.up`."""
    parts = module.split(".")
    block = next((".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()), "")
    return block, module.removeprefix(block).lstrip(".") or "itself"


@dataclass(slots=True)
class _Writer:
    trace: Trace
    choice: ShardingChoice
    facts: Facts
    axis: str
    sums_later: bool = False
    strategies: Mapping[str, Strategy] = field(init=False)
    parameters: Mapping[str, Layout] = field(init=False)
    nodes: list[Node] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    outputs: frozenset[int] = frozenset()  # storages behind values; others are what operations keep for themselves
    storage_of: dict[str, int] = field(default_factory=dict)  # of the nodes put in, and of views of them
    of_state: frozenset[int] = (
        frozenset()
    )  # storages of parameters and buffers, which no node lists among those that it keeps
    own: dict[str, Layout] = field(default_factory=dict)  # value -> layout in which it is computed
    made: dict[tuple[str, Layout], str] = field(default_factory=dict)  # (value, layout) -> node that has it
    specs: dict[str, TensorSpec] = field(default_factory=dict)  # local
    collectives: list[InsertedCollective] = field(default_factory=list)
    taken: dict[str, None] = field(default_factory=dict)
    group_name: str = ""
    summands: Mapping[str, str] = field(
        default_factory=dict
    )  # reads of parameters in `ShardedTrace.summed`, with those names
    written: set[int] = field(init=False)  # storages
    fakes: dict[str, Any] = field(default_factory=dict)
    empty: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)  # by shape, strides and dtype
    results: dict[str, Any] = field(default_factory=dict)  # of calls on fakes, by all that they depend on
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))

    def __post_init__(self) -> None:
        self.strategies, self.parameters = dict(self.choice.by_node), dict(self.choice.by_parameter)
        self.storages = list(self.trace.storages)
        self.outputs = frozenset(node.storage for node in self.trace.nodes)
        self.of_state = frozenset(state.storage for state in self.trace.state)
        self.taken = dict.fromkeys(node.name for node in self.trace.nodes)
        self.summands = self._find_summands() if self.sums_later else {}
        self.written = {self.trace.node(name).storage for node in self.trace.nodes for name in node.mutates}

    def _find_summands(self) -> dict[str, str]:
        """The reads of parameters that every use takes with a gradient that is a summand, and the parameters' names."""
        trainable = {
            name: state.name
            for state in self.trace.state
            if state.is_parameter and state.spec.requires_grad and state.name not in self.facts.read_inside
            for name in state.names
        }
        read = {
            node.name: trainable[node.target]
            for node in self.trace.nodes
            if node.kind is NodeKind.GET_ATTR and node.target in trainable
        }
        others = [*self.trace.output_names, *(name for node in self.trace.nodes for name in node.mutates)]
        for node in self.trace.nodes:
            strategy = self.strategies.get(node.name)
            layouts = [None] * len(node.inputs) if strategy is None else strategy.inputs
            others += [name for name, layout in zip(node.inputs, layouts, strict=True) if layout != BROADCAST]
        wanted = {read[name] for node in self.trace.nodes for name in node.inputs if name in read}
        wanted -= {read[name] for name in others if name in read}
        return {name: parameter for name, parameter in read.items() if parameter in wanted}

    def write(self) -> ShardedTrace:
        begins, changed = [], []
        group = Node(self._new_name(group_attribute(self.axis)), NodeKind.GET_ATTR, group_attribute(self.axis))
        self.nodes.append(group)
        self.group_name = group.name
        for node in self.trace.nodes:
            begins.append(len(self.nodes))
            written = self._localised(node)
            changed.append(len(self.nodes) > begins[-1] or written != node)
            self.nodes.append(written)
        begins.append(len(self.nodes))
        outputs = {name: self._in_layout(name, REPLICATED, None, 0) for name in self.trace.output_names}
        return self._result(begins, changed, outputs)

    def _result(self, begins: list[int], changed: list[bool], outputs: Mapping[str, str]) -> ShardedTrace:
        trace, degree = self.trace, self.choice.degree
        calls = []
        for index, call in enumerate(trace.calls):
            last = len(self.nodes) if index == 0 else begins[call.last]
            whole = call.whole and not any(changed[call.first : call.last]) and not self._takes_slices(call)
            calls.append(dataclasses.replace(call, first=begins[call.first] if index else 0, last=last, whole=whole))
        regions = [dataclasses.replace(r, first=begins[r.first], last=begins[r.last]) for r in trace.regions]
        layouts = {name: layout for name, layout in self.parameters.items() if layout.kind is LayoutKind.SHARDED}
        state = tuple(local_state(s, layouts[s.name], degree) if s.name in layouts else s for s in trace.state)
        rewritten = dataclasses.replace(
            trace,
            nodes=tuple(self.nodes),
            calls=tuple(calls),
            output_leaves=tuple(map_references(leaf, lambda name: Ref(outputs[name])) for leaf in trace.output_leaves),
            state=state,
            storages=tuple(self.storages),
            regions=tuple(regions),
        )
        return ShardedTrace(
            rewritten,
            degree,
            tuple(layouts.items()),
            tuple(self.collectives),
            self.choice.proven,
            self.axis,
            tuple(sorted({*self.summands.values()})),
        )

    def _takes_slices(self, call: ModuleCall) -> bool:
        """Whether a module that computes what every rank computes is given slices, of which it may ask for the size."""
        given = references(call.argument_leaves) if call.first < call.last else ()
        return any(self.own.get(name, REPLICATED).kind is LayoutKind.SHARDED for name in given)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _localised(self, node: Node) -> Node:
        """The node as a rank runs it, once what it needs has been written before it."""
        if node.kind is NodeKind.GET_ATTR:
            layout = self.parameters.get(node.target, REPLICATED)
            return self._with_layout(node, layout)
        strategy = self.strategies.get(node.name)
        if strategy is None:
            return self._with_layout(node, REPLICATED)
        layouts = dict(zip(node.inputs, strategy.inputs, strict=True))
        names = {name: self._in_layout(name, layout, node, node.call) for name, layout in layouts.items()}
        local = on_parts(self.facts, node, strategy, self._group)
        args = tuple(map_references(arg, lambda name: Ref(names.get(name, name))) for arg in local.args)
        kwargs = tuple(
            (key, map_references(value, lambda name: Ref(names.get(name, name)))) for key, value in local.kwargs
        )
        mutates = tuple(names.get(name, name) for name in local.mutates)
        local = dataclasses.replace(
            local, args=args, kwargs=kwargs, mutates=mutates, storage=self._storage(node, names)
        )
        local = dataclasses.replace(local, saved=self._saved(node, local, names, strategy))
        written = self._with_layout(local, strategy.output)
        if strategy.sent:
            self._note_inside(node, strategy)
        if draws(node) and node.kind is NodeKind.CALL_FUNCTION and strategy.divides_work:
            args = (written.target, self._group, *written.args)
            return dataclasses.replace(written, target=f"{TENSOR_OPS}.draw_apart", args=args)
        return written

    def _storage(self, node: Node, names: Mapping[str, str]) -> int:
        """The memory of a node's result: the converted input's, where the result is a view of one."""
        moved = self._moved(names)
        if node.storage in moved:
            self.storage_of[node.name] = moved[node.storage]
        return moved.get(node.storage, node.storage)

    def _moved(self, names: Mapping[str, str]) -> dict[int, int]:
        """Memory of inputs as recorded -> memory of what a rank has in their place, where it is another."""
        found = ((self.trace.node(name).storage, self.storage_of.get(new, -1)) for name, new in names.items())
        return {old: new for old, new in found if old >= 0 and new not in (-1, old)}

    def _saved(self, node: Node, local: Node, names: Mapping[str, str], strategy: Strategy) -> tuple[int, ...]:
        """The tensors that autograd keeps: converted inputs in place of the original values, and smaller results of this node."""
        moved = self._moved(names)
        for storage in node.saved:
            is_whole = self.trace.storages[storage] == strategy.whole_bytes
            if storage not in self.outputs and strategy.divides_work and not is_whole:
                self.storages[storage] //= self.choice.degree
        state = [name for name in names.values() if self.storage_of.get(name, -1) in self._copies(moved)]
        kept = [self.storage_of[name] for name in state if self._keeps(local, name)]
        return tuple(dict.fromkeys((*(moved.get(storage, storage) for storage in node.saved), *kept)))

    def _copies(self, moved: Mapping[int, int]) -> set[int]:
        """The part of this memory that was made from parameters and buffers: gathered ones, say."""
        return {new for old, new in moved.items() if old in self.of_state}

    def _keeps(self, node: Node, name: str) -> bool:
        """Whether autograd keeps the input `name` of a node: seen in a run on fake tensors. Of what is no function of torch: no."""
        if node.target.startswith(TENSOR_OPS) or node.kind is NodeKind.CALL_MODULE:
            return False
        seen: list[int] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor.untyped_storage()._cdata)
            return tensor

        try:
            with self.mode, torch.set_grad_enabled(node.grad_enabled), saved_tensors_hooks(note, lambda tensor: tensor):
                values = {each: self._apart(each, self.specs[each].requires_grad) for each in node.inputs}
                evaluate(node, values, torch.device("cpu"))
        except Exception:  # an operation that fake tensors cannot do
            return False
        return values[name].untyped_storage()._cdata in seen

    def _note_inside(self, node: Node, strategy: Strategy) -> None:
        """The collectives that an operation makes itself."""
        layouts = [*zip(node.inputs, strategy.inputs, strict=True)]
        value, source = next((pair for pair in layouts if pair[1].kind is LayoutKind.SHARDED), layouts[0])
        spec, instead = self.facts.spec(value), 0
        if spec is not None:
            gathering = conversion(source, REPLICATED, spec, self.choice.degree) or ()
            instead = sum(sum(sent_bytes(step, spec, self.choice.degree)) for step in gathering)
        module, sent, back = self.trace.calls[node.call].fqn, sum(strategy.sent), sum(strategy.sent_back)
        target = strategy.output if strategy.way else REPLICATED
        saved = 0 if strategy.way else max(0, instead - sent)
        overlaps = strategy.way == RING
        name = strategy.way or ("all_reduce" if strategy.experts else short_name(node.target))
        self.collectives.append(
            InsertedCollective(node.name, name, value, source, target, module, sent, back, saved, overlaps)
        )

    @property
    def _group(self) -> Ref:
        return Ref(self.group_name)

    def _with_layout(self, node: Node, layout: Layout) -> Node:
        """The node with the spec, and the work, that it has on a rank."""
        node = self._viewable(node)
        strategy = self.strategies.get(node.name)
        self.made[node.name, layout], self.own[node.name] = node.name, layout
        if node.spec is None or (layout.kind is not LayoutKind.SHARDED and not (strategy and strategy.divides_work)):
            if node.spec is not None:
                self.specs[node.name] = node.spec
            elif strategy is not None and strategy.divides_work:
                self._check(node, None)
                return self._with_work(node, strategy, layout)
            return node
        shape = layout.local_shape(node.spec.shape, self.choice.degree)
        if node.kind is NodeKind.GET_ATTR:
            spec = dataclasses.replace(node.spec, shape=shape, stride=contiguous_stride(shape))
        else:
            found = self._check(node, shape)
            spec = dataclasses.replace(node.spec, shape=shape, stride=found)
        self.specs[node.name] = spec
        is_recorded = 0 <= node.storage < len(self.trace.storages)
        if layout.kind is LayoutKind.SHARDED and is_recorded and not self._is_alias(node):
            self.storages[node.storage] = self.trace.storages[node.storage] // self.choice.degree
        if node.kind is NodeKind.GET_ATTR:
            return dataclasses.replace(node, spec=spec)
        return dataclasses.replace(self._with_work(node, strategy, layout), spec=spec)

    def _with_work(self, node: Node, strategy: Strategy | None, layout: Layout) -> Node:
        moved = self._bytes_moved(node, strategy, layout)
        return dataclasses.replace(node, flops=node.flops // self.choice.degree, bytes_moved=moved)

    def _bytes_moved(self, node: Node, strategy: Strategy | None, layout: Layout) -> int:
        """What a rank reads and writes: slices of what is in slices, all of what is whole, as parameters over slices of a sequence are."""
        degree, moved = self.choice.degree, node.bytes_moved
        if strategy is None:
            return moved // degree
        read = own = 0
        for state in self._state_inside(node):
            size, sliced = state.spec.num_bytes, dict(strategy.state).get(state.name, REPLICATED)
            read += size
            own += size // degree if sliced.kind is LayoutKind.SHARDED else size
        for name, given in zip(self.trace.node(node.name).inputs, strategy.inputs, strict=True):
            spec = self.trace.node(name).spec
            size = 0 if spec is None else spec.touched_bytes
            read += size
            own += size // degree if given.kind is LayoutKind.SHARDED else size
        written = max(0, moved - read)
        own += written // degree if layout.kind is LayoutKind.SHARDED else written
        return max(moved // degree, min(moved, own))

    def _state_inside(self, node: Node) -> list[StateSpec]:
        """The parameters of a module that is called whole."""
        if node.kind is not NodeKind.CALL_MODULE:
            return []
        prefix = f"{node.target}." if node.target else ""
        return [s for s in self.trace.state if s.is_parameter and any(name.startswith(prefix) for name in s.names)]

    def _viewable(self, node: Node) -> Node:
        """`reshape` in place of a view of what has other strides on a rank, unless somebody writes into this memory.

        A trace has no `contiguous` where the whole value was contiguous: attention on slices may give its result in another order.
        """
        is_known = all(name in self.specs for name in node.inputs)
        if node.target not in _RESHAPING or node.storage in self.written or not is_known:
            return node
        try:
            self._run(node)
        except (RuntimeError, ValueError):
            return dataclasses.replace(node, target=_RESHAPING[node.target])
        return node

    def _is_alias(self, node: Node) -> bool:
        return any(
            self.trace.node(name).storage == node.storage for name in node.inputs if name in self.facts.constants
        )

    def _check(self, node: Node, shape: tuple[int, ...] | None) -> tuple[int, ...]:
        """Runs a node on fake tensors; its strides. The shape must be the one that the layout means."""
        if node.target.startswith(TENSOR_OPS) or node.kind is NodeKind.CALL_MODULE:
            return contiguous_stride(shape or ())
        try:
            found = self._run(node)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CodegenError(
                f"expected {node.target} at {node.source} to run on slices of its inputs, found {error}; give its module the "
                "style 'replicate' in an explicit tensor-parallel plan, and report the model"
            ) from error
        self.fakes[node.name] = found
        if shape is None:
            return ()
        if tuple(found.shape) != shape:
            raise CodegenError(
                f"expected {node.target} at {node.source} to give shape {shape} on a rank, found {tuple(found.shape)}; give its module "
                "the style 'replicate' in an explicit tensor-parallel plan, and report the model"
            )
        return tuple(found.stride())

    def _run(self, node: Node) -> Any:
        """The result of a node on fakes: made once for all that are the same, since blocks of a model do the same again and again."""
        values = {name: self._apart(name) if node.mutates else self._fake(name) for name in node.inputs}
        call = map_references((node.args, dict(node.kwargs)), lambda name: _form_of_sharded_call(values[name]))
        form = repr((node.target, call, node.grad_enabled, node.autocast))
        if form not in self.results:
            with self.mode, torch.no_grad():
                self.results[form] = evaluate(node, values, torch.device("cpu"))
        return self.results[form]

    def _fake(self, name: str) -> Any:
        """A fake tensor for a value: one for all values that nothing was run for and that look the same."""
        if name not in self.fakes:
            spec = self.specs[name]
            look = spec.shape, spec.stride, spec.dtype
            if look not in self.empty:
                with self.mode:
                    self.empty[look] = torch.empty_strided(*look[:2], dtype=spec.torch_dtype, device="cpu")
            self.fakes[name] = self.empty[look]
        return self.fakes[name]

    def _apart(self, name: str, requires_grad: bool = False) -> Any:
        """A fake of a value in memory of its own."""
        fake = self._fake(name)
        if not isinstance(fake, torch.Tensor):
            return fake
        with self.mode:
            found = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")
        return found.requires_grad_(requires_grad)

    # -- conversions ---------------------------------------------------------------------------------------------------

    def _in_layout(self, name: str, layout: Layout, user: Node | None, call: int) -> str:
        """The node that has a value in a layout, written now if there is none yet."""
        if (name, layout) in self.made:
            return self.made[name, layout]
        whole = self.facts.spec(name)
        source = self.own[name]
        is_summand = layout == BROADCAST and name in self.summands
        if whole is None or self.facts.is_tuple(name) or is_summand:
            self.made[name, layout] = name
            return name
        steps = conversion(source, layout, whole, self.choice.degree)
        assert steps is not None, f"{name}: {source} -> {layout}"
        current, at = name, source
        for number, step in enumerate(steps):
            to = layout if number == len(steps) - 1 else REPLICATED
            if (name, to) not in self.made:
                self._write_step(name, current, at, to, step, user, call)
            current, at = self.made[name, to], to
        self.made[name, layout] = current
        return current

    def _write_step(
        self,
        value: str,
        current: str,
        source: Layout,
        target: Layout,
        step: CollectiveStep,
        user: Node | None,
        call: int,
    ) -> None:
        whole = self.facts.spec(value)
        assert whole is not None
        shape = target.local_shape(whole.shape, self.choice.degree)
        same_memory = step.function in ("replicate_in", "to_partial")
        stride = self.specs[current].stride if same_memory else contiguous_stride(shape)
        spec = dataclasses.replace(whole, shape=shape, stride=stride)
        storage = self.storage_of.get(current, self.trace.node(value).storage)
        if step.function != "replicate_in":
            storage = len(self.storages)
            self.storages.append(spec.num_bytes)
        node = Node(
            self._new_name(f"{value}_{_SUFFIXES[step.function]}"),
            NodeKind.CALL_FUNCTION,
            f"{TENSOR_OPS}.{step.function}",
            tuple(self._step_args(current, source, target, step)),
            tuple(_pieces_as_step_arguments(source, target, step)),
            spec,
            storage,
            call,
            bytes_moved=0 if step.function == "replicate_in" else 2 * spec.num_bytes,
            grad_enabled=whole.requires_grad or user is None or user.grad_enabled,  # others may use it
            source=user.source if user is not None else "",
        )
        self.nodes.append(node)
        self.specs[node.name], self.storage_of[node.name] = spec, storage
        self.made[value, target] = node.name
        forward, backward = sent_bytes(step, whole, self.choice.degree)
        module = self.trace.calls[call].fqn
        self.collectives.append(
            InsertedCollective(node.name, step.function, value, source, target, module, forward, backward)
        )

    def _step_args(self, current: str, source: Layout, target: Layout, step: CollectiveStep) -> Iterator[Any]:
        yield Ref(current)
        if step.function == "all_to_all":
            yield target.dim
            yield source.dim
        elif target.kind is LayoutKind.SHARDED:
            yield target.dim
        elif source.kind is LayoutKind.SHARDED:
            yield source.dim
        yield self._group

    def _new_name(self, base: str) -> str:
        name, number = base, 0
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken[name] = None
        return name


def _pieces_as_step_arguments(source: Layout, target: Layout, step: CollectiveStep) -> Iterator[tuple[str, Any]]:
    """The pieces of slices, as arguments of the step."""
    if step.function == "all_to_all":
        if not (source.is_plain and target.is_plain):
            yield "split_pieces", (target.blocks, target.mirrored)
            yield "gather_pieces", (source.blocks, source.mirrored)
        return
    cut = target if target.kind is LayoutKind.SHARDED else source
    if cut.kind is LayoutKind.SHARDED and cut.blocks:
        yield "blocks", cut.blocks
    if cut.kind is LayoutKind.SHARDED and cut.mirrored:
        yield "mirrored", True


def _form_of_sharded_call(value: Any) -> Any:
    """The key of a call on fakes: everything that its result depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    return tuple(_form_of_sharded_call(item) for item in value) if isinstance(value, (tuple, list)) else value


_SUFFIXES: Mapping[str, str] = {
    "all_gather": "gathered",
    "all_reduce": "sum",
    "all_to_all": "exchanged",
    "gather_in": "gathered_in",
    "own_part": "part",
    "reduce_scatter": "sum_part",
    "replicate_in": "in",
    "split": "part",
    "to_partial": "summand",
}
