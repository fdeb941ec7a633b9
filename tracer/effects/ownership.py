"""What of a module belongs to others: the tensors that it reads, and the attributes that others write.

Whose tensors a module reads while it runs: its own, under their own names, or others'.

Calling a module again gives what it gave only if it reads then what it has read while it was recorded. These are told by identity:

    torch.func.functional_call(self.block, weights, x)      other tensors stand in the block's tables when it is called
    self.block.weight = other; self.block(x)                the same
    F.linear(x, self.list[0].weight)                        in `forward` of a module that the weight does not belong to

A call for which this holds is not made again by a stage; its nodes are, with the tensors that they have read.

`OpenCall` is a module call that has not returned yet, as the recorder keeps it.

`AttributeWrites`: plain attributes of modules that other modules write while the model runs.

    class Block(nn.Module):
        def forward(self, x):
            self.unit.state = None          # a write from outside of `unit`
            return self.unit(x)             # reads the state, and leaves another one behind

Called on its own by a stage, `unit` would start from the state that its last call has left. So such a module, and every module around
it that does not contain the writer, is not called intact: its nodes are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smpc.tracer.ir import Autocast, ModuleCall
from smpc.tracer.state.fakes import FakeState
from smpc.tracer.structure import Structure

_Table = dict[str, Tensor | None]


class Ownership:
    """The tensors that every module of a model holds when a recording starts, with fakes in place."""

    def __init__(self, model: nn.Module, state: FakeState) -> None:
        self._state = state
        modules = tables_in(model)
        self._parameters: dict[int, _Table] = {id(module): dict(module._parameters) for module in modules}
        self.buffers: dict[int, _Table] = {id(module): dict(module._buffers) for module in modules}  # as last seen
        self._owned: dict[int, frozenset[int]] = {}
        self._names = {id(module): name for name, module in model.named_modules()}

    def owned(self, module: nn.Module) -> frozenset[int]:
        """Ids of the parameters, buffers and tensor attributes of a module and of those in it."""
        found = self._owned.get(id(module))
        if found is None:
            found = frozenset(id(tensor) for inner in module.modules() for tensor in self._tensors(inner))
            self._owned[id(module)] = found
        return found

    def swapped(self, module: nn.Module) -> str:
        """The first parameter or buffer in a module in whose place another tensor stands now; "" if there is none."""
        return next(filter(None, map(self._swapped, module.modules())), "")

    def _swapped(self, module: nn.Module) -> str:
        if id(module) not in self._parameters:
            return ""
        for table, known in (
            (module._parameters, self._parameters[id(module)]),
            (module._buffers, self.buffers[id(module)]),
        ):
            for key in dict.fromkeys((*known, *table)):
                if table.get(key) is not known.get(key):
                    name = self._names.get(id(module), "")
                    return f"{name}.{key}" if name else key
        return ""

    def rebound(self, opened: OpenCall) -> Iterator[tuple[str, Tensor]]:
        """Buffers that a call which ends has rebound, by name: its module's own or, when the model's ends, those that are left.

        Where other tensors stand in their places for the time of the call, whoever has put them there takes them away.
        """
        is_model = opened.index == 0
        for module in tables_in(opened.module) if is_model else () if opened.is_swapped else (opened.module,):
            if id(module) not in self.buffers:
                continue  # made by a module that is called whole
            before = self.buffers[id(module)] if is_model else opened.buffers
            for key, value in module._buffers.items():
                if value is not None and value is not before.get(key):
                    self.buffers[id(module)][key] = value
                    name = self._names[id(module)]
                    yield (f"{name}.{key}" if name else key), value

    def replaced_parameter(self, outer: nn.Module) -> str:
        """The first parameter in a module that is another one now, or is new or gone."""
        for module in tables_in(outer):
            known: Mapping[str, Any] = self._parameters.get(id(module), {})
            for key in dict.fromkeys((*known, *module._parameters)):
                if known.get(key) is not module._parameters.get(key):
                    name = self._names.get(id(module), type(module).__name__)
                    return f"{name}.{key}" if name else key
        return ""

    def _tensors(self, module: nn.Module) -> Iterator[Tensor]:
        if isinstance(module, torch.jit.ScriptModule):
            yield from (*module.parameters(), *module.buffers())  # no fakes: it runs over its own tensors
        tables = (self._parameters.get(id(module), {}), self.buffers.get(id(module), {}))
        yield from (tensor for table in tables for tensor in table.values() if tensor is not None)
        for value in vars(module).values():
            items = (
                value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,)
            )
            yield from (item for item in items if isinstance(item, Tensor) and id(item) in self._state.names)


def tables_in(model: nn.Module) -> list[nn.Module]:
    """The modules in a model whose tables of parameters and buffers are Python's; TorchScript's are not."""
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


class OpenCall:
    """What is known of the call so far; `index` is that of the `ModuleCall` it becomes, `first` its first node."""

    __slots__ = (
        "arguments",
        "autocast",
        "bare",
        "buffers",
        "first",
        "fqn",
        "given",
        "grad_enabled",
        "index",
        "is_swapped",
        "leaves",
        "modes",
        "module",
        "parent",
        "sequence",
        "whole",
    )

    def __init__(self, index: int, fqn: str, module: nn.Module, parent: int, first: int) -> None:
        self.index, self.fqn, self.module, self.parent, self.first = index, fqn, module, parent, first
        self.leaves: tuple[Any, ...] = ()
        self.arguments = Structure()
        self.grad_enabled = True
        self.autocast: Autocast | None = None
        self.bare = False
        self.sequence = -1  # number of the sequence that its children are the layers of
        self.given: frozenset[int] = frozenset()  # ids of the tensors among its arguments
        self.modes = (True, False)  # grad mode and inference mode when it began
        self.buffers: dict[str, Tensor | None] = {}  # of the module itself, when it began
        self.is_swapped = False  # whether other tensors stood in the places of its own
        self.whole = True  # whether it may be made again


class AttributeWrites:
    """The writes of one recording, as (owner, writer) FQNs."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], None] = {}

    def note(self, owner: str, writer: str) -> None:
        """Takes down a write into an attribute of `owner` by the code of `writer`."""
        if owner != writer:
            self._found[owner, writer] = None

    def marked(self, calls: tuple[ModuleCall, ...]) -> tuple[ModuleCall, ...]:
        """The calls, those that depend on such a write marked as not to be made again."""
        if not self._found:
            return calls
        return tuple(dataclasses.replace(call, whole=False) if self._needs_writer(call.fqn) else call for call in calls)

    def _needs_writer(self, fqn: str) -> bool:
        return any(_contains(fqn, owner) and not _contains(fqn, writer) for owner, writer in self._found)


def _contains(outer: str, inner: str) -> bool:
    return not outer or outer == inner or inner.startswith(f"{outer}.")
