"""Which node's value a tensor is, and which storage of the trace it lies in.

Tensors and storages are known by identity. They are kept alive until the recording ends, for identities are unique only among living
objects.
"""

from __future__ import annotations

import torch


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
