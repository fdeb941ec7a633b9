"""The recorder's tables of tensors, nodes and open calls: which node a tensor comes from, and the node's name.

`NodeNames`: names after what nodes call, unique, and good as Python variables.

`Identities`: which node's value a tensor is, and its storage in the trace. Tensors and storages are identified by id. They are kept
alive until the recording ends, since ids are unique only among living objects.

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
import keyword
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from smpc.tracer import targets
from smpc.tracer.ir import Autocast, ModuleCall
from smpc.tracer.structure import Structure


class NodeNames:
    """The names given so far in one trace."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def unique(self, base: str) -> str:
        """`base`, or with a number where that is taken; what Python would not read as that very name is changed."""
        base = re.sub(r"\W", "_", unicodedata.normalize("NFKC", base))
        if not base.isidentifier() or keyword.iskeyword(base):
            base = f"_{base}"
        count = self._used.get(base)
        if count is None:
            self._used[base] = 0
            return base
        while True:
            count += 1
            self._used[base] = count
            if f"{base}_{count}" not in self._used:
                self._used[f"{base}_{count}"] = 0
                return f"{base}_{count}"


def short_name(target: str, args: tuple[Any, ...]) -> str:
    """A node name from a target: "torch.Tensor.__rsub__" gives rsub, reading an attribute gives the attribute."""
    if target == targets.GETATTR:
        return str(args[1]).strip("_") or "attribute"
    target = target.removesuffix(targets.APPLY)  # of a custom autograd function: called after its class
    return re.sub(r"\W", "_", target.rpartition(".")[2]).strip("_") or "call"


def parts_of(out: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a call's result, by position or key; none if it is not a tuple, list or dict."""
    if isinstance(out, (tuple, list)):
        return enumerate(out)
    return out.items() if isinstance(out, dict) else ()


class Identities:
    """The tensors and storages of one recording. `storage_bytes`: how large each storage is, by its number."""

    def __init__(self) -> None:
        self.storage_bytes: list[int] = []
        self._nodes: dict[int, str] = {}  # id(tensor) -> node
        self._tensors: dict[str, torch.Tensor] = {}  # the inverse
        self._storages: dict[int, int] = {}  # address of a storage -> its number
        self._alive: list[torch.Tensor | torch.UntypedStorage] = []

    def bind(self, tensor: torch.Tensor, node: str) -> None:
        """From now on the tensor is the value of this node, and of no earlier one."""
        self._tensors.pop(self.node_of(tensor), None)
        self._nodes[id(tensor)] = node
        self._tensors[node] = tensor
        self._alive.append(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """From now on the tensor is no node's value."""
        del self._tensors[self._nodes.pop(id(tensor))]

    def node_of(self, tensor: torch.Tensor) -> str:
        """The node whose value the tensor is; "" if there is none."""
        return self._nodes.get(id(tensor), "")

    def tensor_of(self, node: str) -> torch.Tensor | None:
        """The tensor that is a node's value; None if it is another one's by now, or the node returns no tensor."""
        return self._tensors.get(node)

    def fakes(self) -> list[torch.Tensor]:
        """The fake tensors that are or were a node's value."""
        return [item for item in self._alive if isinstance(item, FakeTensor)]

    def storage(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage; -1 if it has none of its own, such as a sparse one."""
        if tensor.layout is not torch.strided:
            return -1
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = self.new_storage(storage.nbytes())
            self._alive.append(storage)
        return self._storages[storage._cdata]

    def new_storage(self, num_bytes: int) -> int:
        """The number of a storage that no tensor of the recording shows."""
        self.storage_bytes.append(num_bytes)
        return len(self.storage_bytes) - 1


class OpenCall:
    """An open call; `index` is the index of its `ModuleCall`, `first` its first node."""

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
        """The calls; those that depend on such a write are marked as not repeatable."""
        if not self._found:
            return calls
        return tuple(dataclasses.replace(call, whole=False) if self._needs_writer(call.fqn) else call for call in calls)

    def _needs_writer(self, fqn: str) -> bool:
        return any(is_within(owner, fqn) and not is_within(writer, fqn) for owner, writer in self._found)


def is_within(inner: str, outer: str) -> bool:
    """Whether the module of name `inner` is the module of name `outer`, or in it."""
    return not outer or outer == inner or inner.startswith(f"{outer}.")
