"""The nodes of a replacement, with everything that a recorded node has: spec, storages, FLOPs, bytes, what autograd saves.

The calls run on fake tensors under the tracer's own meter, so the planner's numbers for them are comparable with recorded
ones. The last node takes the name and the storage of the replaced result, and must have its memory layout, since views of it
follow: `.contiguous()` is called if that gives the layout. Other nodes that are read later are replaced in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from smpc.codegen.rewrite.kernels.graph import Call, Replacement
from smpc.tracer import targets
from smpc.tracer.constants import Ref, map_references, references
from smpc.tracer.effects.torch_calls import same_memory
from smpc.tracer.ir import Node, NodeKind, TensorSpec, Trace
from smpc.tracer.operations.meter import Meter, touched_bytes
from smpc.tracer.replay import context, resolved


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

    def nodes(self, replacement: Replacement) -> tuple[Node, ...] | str:
        """The nodes that take the place of `replacement.replaced`, or why none can."""
        old = self._trace.node(replacement.result)
        made = self._run(replacement.calls, old)
        if made[-1].spec is not None and self._objection(made[-1], old.name):
            contiguous = Call("torch.Tensor.contiguous", (Ref(made[-1].name),))
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

    def _run(self, calls: tuple[Call, ...], old: Node) -> list[Node]:
        """Nodes called "#0", "#1", ..., with storages of their own numbered from -2 down."""
        values: dict[str, Any] = {}
        owners: dict[int, int] = {}  # a fake's storage -> the storage in the trace, or a new one
        new: list[int] = []
        made: list[Node] = []
        with (
            torch.device("cpu"),
            self._mode,
            torch.inference_mode(False),
            torch.set_grad_enabled(old.grad_enabled),
            context(old.grad_enabled, old.autocast),
        ):
            for name in dict.fromkeys(name for call in calls for name in references((call.args, dict(call.kwargs)))):
                if not name.startswith("#"):
                    values[name] = self._fake(self._trace.node(name))
                    owners[_storage(values[name])] = self._trace.node(name).storage
            for index, call in enumerate(calls):
                out, node = self._call(f"#{index}", call, values, owners, new, old)
                values[node.name] = out
                made.append(node)
        self._new, self._alive = new, []
        return made

    def _call(
        self, name: str, call: Call, values: Mapping[str, Any], owners: dict[int, int], new: list[int], old: Node
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
            tuple(dict.fromkeys(storage for storage in saved if storage not in self._state)),
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
