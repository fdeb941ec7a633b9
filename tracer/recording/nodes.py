"""Which node a tensor comes from, and what the node is called.

`NodeNames`: names after what nodes call, unique, and good as Python variables.

`Identities`: which node's value a tensor is, and which storage of the trace it lies in. Tensors and storages are known by identity. They
are kept alive until the recording ends, for identities are unique only among living objects.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from smpc.tracer import targets


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
    """The items of what a call returned, by position or key; none if it is no tuple, list or dict."""
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
