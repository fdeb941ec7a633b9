"""Whether two traces are recordings of one model whose Python went through a set in two orders.

Every process orders the strings in a set differently. Hugging Face's models compute their masks and positions "for each of the set of
layer types", so the ranks of a job record the same operations in different orders, under different names. Only the inputs of each
operation count:

    of a node      its target, constants, spec and modes, and what its inputs are computed from; for a read of memory that nodes write, the
                   writes before it
    of effects     the order of random numbers, of modules called whole, and of writes into one memory

Parameters must have one order, because optimizers number them; buffers need not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from smpc.tracer.constants import Ref, encode, map_references
from smpc.tracer.ir import Node, NodeKind, Trace


def same_model(first: Trace, second: Trace) -> bool:
    """Whether the traces differ in nothing but the order of operations that do not depend on each other, in names, and in source lines."""
    return _Meaning(first).digest() == _Meaning(second).digest()


class _Meaning:
    """The content of a trace, without order and names."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._of: dict[str, str] = {}  # node -> what it is computed from
        self._memory: dict[int, str] = {}  # storage -> the node that made it, and the writes since
        self._chance = ""  # what has drawn random numbers so far
        for node in trace.nodes:
            self._add(node)

    def digest(self) -> str:
        """Equal for equal meanings."""
        trace = self._trace
        parameters = [state for state in trace.state if state.is_parameter]
        buffers = sorted((state for state in trace.state if not state.is_parameter), key=lambda state: state.name)
        calls = [
            (
                call.fqn,
                call.class_name,
                self._tree(call.argument_leaves),
                self._tree(call.output_leaves),
                call.grad_enabled,
            )
            for call in trace.calls
        ]
        guards = [(guard.target, self._tree(guard.args), guard.expected, guard.dtypes) for guard in trace.guards]
        return _hash(
            trace.model_class,
            trace.training,
            sorted(self._of[node.name] for node in trace.nodes),
            trace.inputs,
            self._tree(trace.input_leaves),
            trace.output,
            self._tree(trace.output_leaves),
            trace.left,
            self._tree(trace.left_leaves),
            [(state.names, state.spec, state.is_persistent) for state in (*parameters, *buffers)],
            sorted(map(_hash, calls)),
            sorted(map(_hash, guards)),
            sorted(
                _hash(region.name, region.preserve_rng_state, region.strategy, region.own) for region in trace.regions
            ),
            sorted(self._memory.values()),
            self._chance,
        )

    def _add(self, node: Node) -> None:
        reads = [*node.inputs, *node.mutates]
        storages = [storage for storage in self._storages(reads) if storage in self._memory]
        chance = node.random or node.kind is NodeKind.CALL_MODULE
        found = _hash(
            node.kind,
            node.target,
            self._tree(node.args),
            self._tree(node.kwargs),
            node.spec,
            node.grad_enabled,
            node.autocast,
            self._trace.calls[node.call].fqn,
            [self._memory[storage] for storage in storages],
            self._chance if chance else "",
        )
        self._of[node.name] = found
        if chance:
            self._chance = found
        if node.kind is NodeKind.SET_ATTR:
            self._chance = _hash(self._chance, found)
        for storage in self._storages(node.mutates):
            self._memory[storage] = _hash(self._memory.get(storage, ""), found)
        if node.storage >= 0 and node.storage not in self._memory:
            self._memory[node.storage] = found

    def _storages(self, names: Sequence[str]) -> list[int]:
        return [storage for storage in dict.fromkeys(self._trace.node(name).storage for name in names) if storage >= 0]

    def _tree(self, tree: Any) -> Any:
        return map_references(tree, lambda name: Ref(self._of[name]))


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([encode(part) for part in parts]).encode()).hexdigest()
