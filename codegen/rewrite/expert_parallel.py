"""Rewrites a trace for one rank of a group that experts are divided over: fewer experts, and the traffic of their tokens.

    before   y = mlp.experts(h, index, weights)      gate_up_proj [8, ..]
    after    y = mlp.experts(h, index, weights)      gate_up_proj [4, ..]: the first of two ranks; sends rows of h, and of y back

Experts are modules that are called whole, and stay so: the exchange of tokens is decided inside them when they run (`smpc.experts`),
since it depends on values. Known in advance: a rank's tokens make as many rows as before. If experts are chosen evenly, (n - 1) / n of
the rows go to the other ranks, and equally many come back. So a rank does the same work as before, and holds an nth of the experts.
The trace is for the rank that holds most of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED
from smpc.codegen.rewrite.tensor_parallel.rewrite import InsertedCollective, first_of_alike
from smpc.config.numbers import format_bytes
from smpc.errors import PartitionError
from smpc.tracer.ir import Node, NodeKind, StateSpec, TensorSpec, Trace, contiguous_stride
from smpc.tracer.targets import GETITEM

PARTS = "_smpc_expert_parallel"  # the attribute of a module that holds some of the experts: what it knows of the whole
SLICES = "num_sequence_slices"  # the argument by which such a module is told that its tokens are a slice of a sequence

_FUNCTION = "dispatch and combine"


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a model, by names. `module`: what is called with tokens. `tensors`: [E, ..] each, all experts in one; or, for each expert,
    the names of its own.
    """

    name: str
    module: str
    num_experts: int
    tensors: tuple[str, ...] = ()
    members: tuple[tuple[str, ...], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names of all their tensors."""
        return frozenset((*self.tensors, *(name for member in self.members for name in member)))


def parts_of_experts(model: nn.Module) -> tuple[str, ...]:
    """The names of the modules of a model that hold some of the experts, and serve the tokens of all ranks."""
    return tuple(name for name, module in model.named_modules() if PARTS in vars(module))


@dataclass(frozen=True, slots=True)
class ExpertTrace:
    """The trace of one rank; the divided experts; and the rank's messages for them."""

    trace: Trace
    degree: int
    experts: tuple[Experts, ...]
    collectives: tuple[InsertedCollective, ...]

    @property
    def parameters(self) -> frozenset[str]:
        """The canonical names of the parameters and buffers of experts."""
        own = frozenset[str]().union(*(found.names for found in self.experts))
        return frozenset(state.name for state in self.trace.state if not own.isdisjoint(state.names))

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in one forward and backward."""
        return sum(item.forward_bytes + item.backward_bytes for item in self.collectives)


def divide_experts(trace: Trace, experts: Sequence[Experts], degree: int) -> ExpertTrace:
    """The trace that the first of `degree` ranks runs. PartitionError for experts that are not called whole in it."""
    state = {name: spec for spec in trace.state for name in spec.names}
    local: dict[str, StateSpec | None] = {}
    collectives: list[InsertedCollective] = []
    less: dict[str, int] = {}  # bytes of parameters that a call does not read any more
    for found in experts:
        most = -(-found.num_experts // degree)
        held = [name for member in found.members[:most] for name in member]
        absent = [name for member in found.members[most:] for name in member]
        local.update({state[name].name: _fewer_experts(state[name], most) for name in found.tensors})
        local.update({state[name].name: None for name in absent if name in state})
        own = [*found.tensors, *held]
        elements = sum(state[name].spec.num_elements for name in own if state[name].is_parameter)
        per_expert = elements // (found.num_experts if found.tensors else most)
        gone = sum(state[name].spec.num_bytes for name in absent if name in state and state[name].is_parameter)
        for name in found.tensors:
            gone += state[name].spec.num_bytes - _fewer_experts(state[name], most).spec.num_bytes
        for node in _calls_of_experts(trace, found):
            collectives.append(_traffic_of_call(trace, node, found, per_expert, degree))
            less[node.name] = less.get(node.name, 0) + gone
    divided = tuple(new for spec in trace.state if (new := local.get(spec.name, spec)) is not None)
    nodes = tuple(
        dataclasses.replace(node, bytes_moved=max(0, node.bytes_moved - less[node.name])) if node.name in less else node
        for node in trace.nodes
    )
    own_trace = dataclasses.replace(trace, state=divided, nodes=nodes)
    return ExpertTrace(own_trace, degree, tuple(experts), tuple(collectives))


def shares_of(found: ExpertTrace, trace: Trace) -> tuple[InsertedCollective, ...]:
    """The messages of a rank that has slices of the sequences; it runs `trace`."""
    shares = []
    for item in found.collectives:
        before, after = (
            _result_of_experts(found.trace, found.trace.node(item.node)),
            _result_of_experts(trace, trace.node(item.node)),
        )
        whole = 0 if before is None or after is None else before.num_elements
        own = whole if after is None else after.num_elements
        sent = [num_bytes * own // max(1, whole) for num_bytes in (item.forward_bytes, item.backward_bytes)]
        shares.append(dataclasses.replace(item, forward_bytes=sent[0], backward_bytes=sent[1]))
    return tuple(shares)


def recorded_inside(trace: Trace, experts: Sequence[Experts]) -> tuple[str, ...]:
    """The modules with experts that are not called whole."""
    return tuple(found.module for found in experts if not _nodes_of_experts(trace, found))


def _nodes_of_experts(trace: Trace, found: Experts) -> list[Node]:
    """The nodes in which the experts are called: themselves, or a module around them."""
    return [
        node
        for node in trace.nodes
        if node.kind is NodeKind.CALL_MODULE and f"{found.module}.".startswith(f"{node.target}.")
    ]


def _calls_of_experts(trace: Trace, found: Experts) -> list[Node]:
    """The calls of the experts; PartitionError if there are none."""
    calls = _nodes_of_experts(trace, found)
    if not calls:
        raise PartitionError(
            f"{found.name}: expected experts that are called whole, so that their tokens can travel, found recorded operations inside; "
            "mark them (smpc.mark_leaf, or leaf_modules)"
        )
    return calls


def _traffic_of_call(trace: Trace, node: Node, found: Experts, per_expert: int, degree: int) -> InsertedCollective:
    """The messages of a rank for a call: each row goes to its expert and back, and so do the gradients."""
    spec = _result_of_experts(trace, node)
    rows = _rows_of_tokens(trace, node, found, per_expert)
    row = 0 if spec is None else _width_of_rows(trace, spec, found) * spec.torch_dtype.itemsize
    sent = 2 * rows * row * (degree - 1) // degree
    backward = sent if spec is not None and spec.requires_grad else 0
    return InsertedCollective(node.name, _FUNCTION, node.name, REPLICATED, REPLICATED, found.module, sent, backward)


def _result_of_experts(trace: Trace, node: Node) -> TensorSpec | None:
    """The result for the tokens: the node's tensor, or its first floating-point tensor."""
    if node.spec is not None:
        return node.spec
    specs = (user.spec for user in trace.nodes if node.name in user.inputs and user.target == GETITEM)
    return next(
        (spec for spec in specs if spec is not None and spec.torch_dtype.is_floating_point and spec.shape), None
    )


def _width_of_rows(trace: Trace, spec: TensorSpec, found: Experts) -> int:
    """The elements of a row: of the result for the tokens, or, where that is the loss of a whole model, of an expert's first matrix."""
    if spec.shape:
        return spec.shape[-1]
    own = (state.spec.shape for state in trace.state if not found.names.isdisjoint(state.names))
    return next((shape[-1] for shape in own if len(shape) > 1), 1)


def _rows_of_tokens(trace: Trace, node: Node, found: Experts, per_expert: int) -> int:
    """The rows that a rank's tokens make: one for each chosen expert. Where these are not told, each row uses each element once."""
    specs = [trace.node(name).spec for name in node.inputs]
    chosen = [spec for spec in specs if spec is not None and spec.dtype in ("int64", "int32")]
    if found.tensors and node.target == found.module and len(chosen) == 1:
        return chosen[0].num_elements
    return round(node.flops / (2 * per_expert)) if per_expert else 0


def _fewer_experts(state: StateSpec, count: int) -> StateSpec:
    """A parameter with fewer experts."""
    shape = (count, *state.spec.shape[1:])
    spec = TensorSpec(shape, state.spec.dtype, contiguous_stride(shape), state.spec.requires_grad)
    return dataclasses.replace(state, spec=spec)


def describe_experts(found: ExpertTrace) -> str:
    """For people: the experts of every layer, and the bytes that a rank sends for them; equal ones once."""
    by_module: dict[str, tuple[int, int]] = {}
    for item in found.collectives:
        forward, backward = by_module.get(item.module, (0, 0))
        by_module[item.module] = (forward + item.forward_bytes, backward + item.backward_bytes)
    lines = [
        f"expert parallel: {found.degree} ranks, {format_bytes(found.sent_bytes)} sent by each in a forward and backward"
    ]
    alike: dict[tuple[int, int, int], list[str]] = {}
    for experts in found.experts:
        alike.setdefault((experts.num_experts, *by_module[experts.module]), []).append(experts.name)
    for (count, forward, backward), names in alike.items():
        sent = f"{format_bytes(forward)} forward, {format_bytes(backward)} backward"
        lines.append(f"    {first_of_alike(names)}: {count} experts, {sent}")
    return "\n".join(lines)
