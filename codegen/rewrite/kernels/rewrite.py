"""Replaces what a model computes by ops of `smpc.kernels`, trace to trace.

    rewritten = rewrite_kernels(trace, select_rewrites("rms_norm,swiglu", on_gpu=True))
    rewritten.trace       the same trace, with some nodes replaced; the very same if none is
    rewritten.uses        what was replaced, and what was not and why

Each rewrite (`REWRITES`) proposes replacements by how nodes are connected, never by the name of a module. A proposal is made when

    - nothing else reads what it replaces inside, and nothing writes in place meanwhile
    - all of it runs under one grad mode, without autocast of its own, and within the same checkpointed regions
    - both sides compute the same on random numbers, with the same gradients (`prove_replacement`)
    - the result has the spec of what it replaces, and its layout (`measure`)

and otherwise refused, with the reason. The new nodes carry measured FLOPs, bytes and saved storages.

`select_rewrites` chooses among the rewrites by a setting (`smpc.kernels.setting`).

`splice` makes the trace with nodes replaced: the same Python, the same inputs and outputs, other calls. The new nodes are where the
last replaced one stood, under the module call that it was in: other replaced nodes that are read on (`Replacement.also`) move there. A
module call that lost nodes cannot be made any more, since the module would compute what was replaced: its arguments become `Opaque`, which
has the splitter write it out node by node.

The nodes of a replacement, with everything that a recorded node has: spec, storages, FLOPs, bytes, what autograd saves.

The calls run on fake tensors under the tracer's own meter, so the planner's numbers for them are comparable with recorded
ones. The last node takes the name and the storage of the replaced result, and must have its memory layout, since views of it
follow: `.contiguous()` is called if that gives the layout. Other nodes that are read later are replaced in the same way.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from smpc.codegen.rewrite.kernels.pattern_graph import (
    GUARD,
    OUTPUT,
    KernelCall,
    NodeUsers,
    Refusal,
    Replacement,
    Rewrite,
)
from smpc.codegen.rewrite.kernels.patterns import bias_dropout_add, flash_attention, rotary
from smpc.codegen.rewrite.kernels.patterns.activations import BIAS_GELU, SWIGLU
from smpc.codegen.rewrite.kernels.patterns.cross_entropy import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY
from smpc.codegen.rewrite.kernels.patterns.norms import ADD_NORM, LAYER_NORM, RMS_NORM
from smpc.codegen.rewrite.kernels.prove_replacement import Checker
from smpc.errors import ConfigError
from smpc.kernels.setting import OPERATIONS, KernelUse, faults_of, wanted
from smpc.tracer import targets
from smpc.tracer.constants import Opaque, Ref, map_references, references
from smpc.tracer.effects.torch_calls import same_memory
from smpc.tracer.ir import Autocast, ModuleCall, Node, NodeKind, TensorSpec, Trace
from smpc.tracer.operations.meter import Meter, touched_bytes
from smpc.tracer.replay import context, resolved
from smpc.tracer.structure import Structure

_Run = tuple[str, tuple[TensorSpec | None, ...], bool, Autocast | None]  # what a run of calls depends on


class Measurer:
    """Makes nodes for a trace; `storages` is the trace's list with what they add."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.storages = list(trace.storages)
        self._mode = FakeTensorMode()
        self._names = {node.name: None for node in trace.nodes}
        self._state = frozenset(state.storage for state in trace.state)
        self._new: list[int] = []  # bytes of the storages that the last run made
        self._alive: list[Any] = []  # so that no two storages of one run have one address
        self._known: dict[_Run, tuple[list[Node], list[int]]] = {}

    def nodes(self, replacement: Replacement) -> tuple[Node, ...] | str:
        """The nodes that take the place of `replacement.replaced`, or why none can."""
        old = self._trace.node(replacement.result)
        made = self._run(replacement.calls, old)
        if made[-1].spec is not None and self._objection(made[-1], old.name):
            contiguous = KernelCall("torch.Tensor.contiguous", (Ref(made[-1].name),))
            made = self._run((*replacement.calls, contiguous), old)
        taken = {call: name for name, call in replacement.also} | {made[-1].name: old.name}
        for node in made:
            objection = self._objection(node, taken[node.name]) if node.name in taken else ""
            if objection:
                return objection
        return self._named(made, taken)

    def _objection(self, made: Node, name: str) -> str:
        """Why a new node cannot take the place of a recorded one; "" if it can."""
        found, expected = made.spec, self._trace.node(name).spec
        assert expected is not None, name
        if found is None or _kind(found) != _kind(expected):
            return f"the op gives {_described(found)}, expected {_described(expected)}"
        if not _lies_like(found, expected):
            return f"the op's result has another memory layout: strides {found.stride}, expected {expected.stride}"
        return ""

    def _run(self, calls: tuple[KernelCall, ...], old: Node) -> list[Node]:
        """Nodes called "#0", "#1", ..., with storages of their own numbered from -2 down.

        Calls that are equal but for the names of their tensors, with the same specs, are run once: as a rule, once for all blocks.
        """
        names = [*dict.fromkeys(name for call in calls for name in references((call.args, dict(call.kwargs))))]
        names = [name for name in names if not name.startswith("#")]
        place = {name: Ref(f"${i}") for i, name in enumerate(names)}
        trees = [
            (
                call.target,
                *(map_references(tree, lambda name: place.get(name, Ref(name))) for tree in (call.args, call.kwargs)),
            )
            for call in calls
        ]
        specs = tuple(self._trace.node(name).spec for name in names)
        key = repr(trees), specs, old.grad_enabled, old.autocast
        if key not in self._known:
            self._known[key] = self._run_once(calls, names, old)
        made, self._new = self._known[key]
        owners = [self._trace.node(name).storage for name in names]
        return [self._of_run(node, call, owners, old) for node, call in zip(made, calls, strict=True)]

    def _of_run(self, made: Node, call: KernelCall, owners: Sequence[int], old: Node) -> Node:
        """A node of a run, with these arguments, and the storages of inputs in place of their positions."""

        def storage(number: int) -> int:
            return owners[number] if number >= 0 else number

        saved = dict.fromkeys(map(storage, made.saved))
        return dataclasses.replace(
            made,
            args=call.args,
            kwargs=call.kwargs,
            storage=storage(made.storage),
            call=old.call,
            saved=tuple(number for number in saved if number not in self._state),
            source=old.source,
        )

    def _run_once(self, calls: tuple[KernelCall, ...], names: Sequence[str], old: Node) -> tuple[list[Node], list[int]]:
        """The nodes, whose storages are positions among `names` or new ones, and the bytes of these."""
        values: dict[str, Any] = {}
        owners: dict[int, int] = {}  # a fake's storage -> the position of its input, or a new one
        new: list[int] = []
        made: list[Node] = []
        with (
            torch.device("cpu"),
            self._mode,
            torch.inference_mode(False),
            torch.set_grad_enabled(old.grad_enabled),
            context(old.grad_enabled, old.autocast),
        ):
            for position, name in enumerate(names):
                values[name] = self._fake(self._trace.node(name))
                owners[_storage(values[name])] = position
            for index, call in enumerate(calls):
                out, node = self._call(f"#{index}", call, values, owners, new, old)
                values[node.name] = out
                made.append(node)
        self._alive = []
        return made, new

    def _call(
        self, name: str, call: KernelCall, values: Mapping[str, Any], owners: dict[int, int], new: list[int], old: Node
    ) -> tuple[Any, Node]:
        meter, saved = Meter(), list[int]()

        def owner(tensor: torch.Tensor) -> int:
            key = _storage(tensor)
            if key not in owners:
                new.append(tensor.untyped_storage().nbytes())
                owners[key] = -1 - len(new)
            return owners[key]

        def note(tensor: torch.Tensor) -> torch.Tensor:
            self._alive.append(tensor)
            saved.append(owner(tensor))
            return tensor

        device = torch.device("cpu")
        args = resolved(call.args, values, device)
        kwargs = {key: resolved(value, values, device) for key, value in call.kwargs}
        function = targets.function(call.target)
        with saved_tensors_hooks(note, lambda tensor: tensor):
            out = function(*args, **kwargs)
        with (
            torch.no_grad(),
            meter,
        ):  # some ops do the work of their backward pass ahead; the planner adds that by itself
            function(*args, **kwargs)
        outputs = _tensors(out)
        inputs = [tensor for ref in references((call.args, dict(call.kwargs))) for tensor in _tensors(values[ref])]
        is_view = any(same_memory(output, tensor) for output in outputs for tensor in inputs)
        moved = 0 if is_view else sum(touched_bytes(tensor) for tensor in (*inputs, *outputs))
        single = isinstance(out, FakeTensor)
        node = Node(
            name,
            NodeKind.CALL_FUNCTION,
            call.target,
            call.args,
            call.kwargs,
            TensorSpec.of(out) if single else None,
            owner(out) if single else -1,
            old.call,
            meter.flops,
            moved,
            tuple(dict.fromkeys(saved)),
            random=meter.random,
            grad_enabled=old.grad_enabled,
            autocast=old.autocast,
            source=old.source,
        )
        return out, node

    def _fake(self, node: Node) -> torch.Tensor:
        assert node.spec is not None, node.name
        spec = node.spec
        fake = torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype)
        return fake.requires_grad_(spec.requires_grad)

    def _named(self, made: list[Node], taken: Mapping[str, str]) -> tuple[Node, ...]:
        """The nodes with names and storages of the trace; those in `taken` have the names of what they replace."""
        names = {node.name: taken.get(node.name) or self._unique(node) for node in made}
        storages: dict[int, int] = {}
        for node in made:
            if node.name in taken and node.storage < -1:
                storages[node.storage] = self._trace.node(taken[node.name]).storage

        def storage(number: int) -> int:
            if number >= -1:
                return number
            if number not in storages:
                self.storages.append(self._new[-2 - number])
                storages[number] = len(self.storages) - 1
            return storages[number]

        def renamed(tree: Any) -> Any:
            return map_references(tree, lambda name: Ref(names.get(name, name)))

        return tuple(
            dataclasses.replace(
                node,
                name=names[node.name],
                args=renamed(node.args),
                kwargs=tuple((key, renamed(value)) for key, value in node.kwargs),
                storage=storage(node.storage),
                saved=tuple(storage(number) for number in node.saved),
            )
            for node in made
        )

    def _unique(self, node: Node) -> str:
        base = node.target.rpartition(".")[2].strip("_")
        base = base if base.isidentifier() and base != "and" else f"_{base}"
        name, count = base, 0
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names[name] = None
        return name


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that a call gives: one, or a tuple of them."""
    found = value if isinstance(value, tuple) else (value,)
    assert all(isinstance(tensor, FakeTensor) for tensor in found), value
    return found


def _kind(spec: TensorSpec) -> tuple[object, ...]:
    return spec.shape, spec.dtype, spec.requires_grad


def _described(spec: TensorSpec | None) -> str:
    return "a tuple" if spec is None else f"{spec} {'with' if spec.requires_grad else 'without'} a gradient"


def _lies_like(spec: TensorSpec, other: TensorSpec) -> bool:
    """Whether two tensors of one shape have the same strides, wherever that matters."""
    return (
        all(a == b or size <= 1 for size, a, b in zip(spec.shape, spec.stride, other.stride, strict=True))
        or spec.num_elements == 0
    )


# Where two could take the same nodes the earlier one does.
REWRITES: tuple[Rewrite, ...] = (
    LINEAR_CROSS_ENTROPY,
    CROSS_ENTROPY,
    flash_attention.REWRITE,
    bias_dropout_add.REWRITE,
    *ADD_NORM,
    RMS_NORM,
    LAYER_NORM,
    rotary.REWRITE,
    SWIGLU,
    BIAS_GELU,
)
assert tuple(rewrite.op for rewrite in REWRITES) == OPERATIONS, "smpc.kernels.setting names the rewrites in this order"


def select_rewrites(kernels: str | Sequence[str], *, on_gpu: bool) -> tuple[Rewrite, ...]:
    """The rewrites that a setting asks for, for targets that are GPUs or not. ConfigError for anything but a setting."""
    faults = faults_of(kernels)
    if faults:
        raise ConfigError("\n".join(faults))
    names = wanted(kernels, on_gpu=on_gpu)
    return tuple(rewrite for rewrite in REWRITES if rewrite.op in names)


# One draws otherwise by design; attention without dropout draws nothing, but torch marks it.
_RANDOM = ("bias_dropout_add", "flash_attention")
_NOTHING = "nothing in the model computes it"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A rewritten trace, and the outcome for each op."""

    trace: Trace
    uses: tuple[KernelUse, ...]


def rewrite_kernels(trace: Trace, rewrites: Sequence[Rewrite]) -> Rewritten:
    """The trace with the rewrites' matches replaced."""
    if not rewrites:
        return Rewritten(trace, ())
    graph = NodeUsers(trace)
    checker, measurer = Checker(graph), Measurer(trace)
    chosen: list[tuple[Replacement, tuple[Node, ...]]] = []
    claimed: dict[str, None] = {}
    places: dict[tuple[str, str], list[str]] = {}  # (op, reason) -> nodes
    for rewrite in rewrites:
        found = False
        for proposal in rewrite.find(graph):
            if isinstance(proposal, Replacement) and any(name in claimed for name in proposal.replaced):
                continue
            found = True
            reason = _objection_to_kernel(graph, proposal, checker)
            nodes = "" if reason or isinstance(proposal, Refusal) else measurer.nodes(proposal)
            if isinstance(nodes, tuple) and isinstance(proposal, Replacement):
                chosen.append((proposal, nodes))
                claimed.update(dict.fromkeys(proposal.replaced))
            else:
                reason = reason or str(nodes)
            node = proposal.result if isinstance(proposal, Replacement) else proposal.node
            places.setdefault((rewrite.op, reason), []).append(node)
            _log.info("%s at %s: %s", rewrite.op, _place_of_kernel(trace, node), reason or "replaced")
        if not found:
            places[rewrite.op, _NOTHING] = []
    uses = tuple(
        KernelUse(op, len(nodes), _place_of_kernel(trace, nodes[0]) if nodes else "", reason)
        for (op, reason), nodes in places.items()
    )
    if not chosen:
        return Rewritten(trace, uses)
    return Rewritten(splice(trace, chosen, measurer.storages), uses)


def _place_of_kernel(trace: Trace, name: str) -> str:
    """The module whose code a node is, or its source line where that is the model itself."""
    node = trace.node(name)
    return trace.calls[node.call].fqn or node.source or name


def _objection_to_kernel(graph: NodeUsers, proposal: Replacement | Refusal, checker: Checker) -> str:
    """Why a proposal cannot be; "" if it can."""
    if isinstance(proposal, Refusal):
        return proposal.reason
    return _nodes_shared_beside_kernel(graph, proposal) or _why_not_here(graph, proposal) or checker.objection(proposal)


def _nodes_shared_beside_kernel(graph: NodeUsers, proposal: Replacement) -> str:
    """Other readers and writers of the nodes to be replaced."""
    inside, results = dict.fromkeys(proposal.replaced), dict(proposal.results)
    end = graph.trace.position(proposal.result)
    for name in proposal.replaced[:-1]:
        for user in graph.users(name):
            if name in results and (user == OUTPUT or (user != GUARD and graph.trace.position(user) > end)):
                continue  # it comes after the calls
            if user not in inside:
                reader = {OUTPUT: "the model returns", GUARD: "the model's Python asks for"}.get(
                    user, "something else reads"
                )
                return f"{reader} a value inside it ({graph.op(name)})"
    trace = graph.trace
    known = (*proposal.given, *proposal.replaced)  # the check takes their values for what these calls give
    read = [*known, *(name for inner in known for name in graph.node(inner).inputs)]
    storages = {graph.node(name).storage for name in read} - {-1}
    first, last = min(map(trace.position, known)), trace.position(proposal.result)
    for node in trace.nodes[first : last + 1]:
        if any(graph.node(name).storage in storages for name in node.mutates):
            return "something writes in place to what it reads"
    return ""


def _why_not_here(graph: NodeUsers, proposal: Replacement) -> str:
    """The reason in the surroundings of the nodes why the op cannot be used."""
    trace = graph.trace
    nodes = [graph.node(name) for name in proposal.replaced]
    if any(node.kind is NodeKind.CALL_MODULE for node in nodes):
        return "part of it is a module that is called whole"
    made = dict.fromkeys(proposal.replaced)
    read = (name for node in nodes for name in node.inputs if name not in made)
    if nodes[-1].spec is None or any(graph.node(name).spec is None for name in read):
        return "it reads or gives what is no single tensor"
    if any(node.random for node in nodes) and proposal.op not in _RANDOM:
        return "it draws random numbers"
    if any(node.autocast is not None for node in nodes):
        return "it runs under autocast, which ops take no part in"
    if len(dict.fromkeys(node.grad_enabled for node in nodes)) > 1:
        return "part of it runs without gradients"
    around = [
        tuple(region.first <= trace.position(node.name) < region.last for region in trace.regions) for node in nodes
    ]
    return "" if len(dict.fromkeys(around)) == 1 else "part of it is checkpointed and part is not"


_REWRITTEN = Opaque("rewritten")


def splice(
    trace: Trace, replacements: Sequence[tuple[Replacement, tuple[Node, ...]]], storages: Sequence[int]
) -> Trace:
    """The trace with every replacement made; `storages` is its list of storages, with the new nodes' added."""
    new = {replacement.result: nodes for replacement, nodes in replacements}
    gone = {name: None for replacement, _ in replacements for name in replacement.replaced if name not in new}
    moved = {name: None for replacement, _ in replacements for name, _ in replacement.also}
    lacking = {name: None for name in gone if name not in moved}
    nodes: list[Node] = []
    positions: list[int] = []
    lost: list[int] = []  # replaced nodes before each position
    count = 0
    for node in trace.nodes:
        positions.append(len(nodes))
        lost.append(count)
        count += node.name in new or node.name in gone
        nodes.extend(new.get(node.name, () if node.name in gone else (node,)))
    positions.append(len(nodes))
    lost.append(count)
    regions = tuple(
        dataclasses.replace(region, first=positions[region.first], last=positions[region.last])
        for region in trace.regions
    )
    calls = tuple(_respliced_call(call, index, positions, lost, lacking) for index, call in enumerate(trace.calls))
    return dataclasses.replace(trace, nodes=tuple(nodes), calls=calls, regions=regions, storages=tuple(storages))


def _respliced_call(
    call: ModuleCall, index: int, positions: Sequence[int], lost: Sequence[int], lacking: Mapping[str, None]
) -> ModuleCall:
    """The call over the new nodes."""

    def kept(leaf: object) -> object:
        return Opaque("tensor") if isinstance(leaf, Ref) and leaf.name in lacking else leaf

    rewritten = index > 0 and lost[call.first] < lost[call.last]
    return dataclasses.replace(
        call,
        first=positions[call.first],
        last=positions[call.last],
        arguments=Structure() if rewritten else call.arguments,
        argument_leaves=(_REWRITTEN,) if rewritten else tuple(map(kept, call.argument_leaves)),
        output_leaves=tuple(map(kept, call.output_leaves)),
    )
