"""Counts the bytes of the tensors that are alive while something runs on a CPU, where no allocator keeps count.

    with LiveBytes(held) as counter:        # `held`: tensors that are there already and count too
        step()
    counter.peak

A storage counts once, however many tensors share it, from the operation that makes it until it is freed. A storage that is written
before any operation made it existed already, such as the buckets in which DistributedDataParallel sums gradients: it counts from the
start. FSDP fills and empties the storages of whole parameters: they count with their present size.

Memory that operations use inside (workspaces of libraries) is not seen, and memory that torch did not allocate counts only where it is in
`held`: what the ranks of one host share for small messages is the same few MiB for any model, and no rank's own
(`smpc.executor.host_memory.shared_slots`). Every operation becomes several times slower: measure memory in one step and times in others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smpc.sharding.tensors import local


class LiveBytes(TorchDispatchMode):
    """`live` bytes now, and the most that there were."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, int] = {}
        self._gathered: list[torch.UntypedStorage] = []
        for tensor in held:
            self._note(local(tensor).untyped_storage())

    def _note(self, storage: torch.UntypedStorage, *, was_there: bool = False) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = 0
            weakref.finalize(storage, self._drop, key)
            self.peak += num_bytes if was_there else 0
        self.live += num_bytes - self._known[key]
        self._known[key] = num_bytes
        self.peak = max(self.peak, self.live)

    def _drop(self, key: int) -> None:
        self.live -= self._known.pop(key)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operations on its part, which come here
        is_gathering = str(func) == "fsdp.split_with_sizes_copy.default"
        if func._schema.is_mutable and not is_gathering:  # type: ignore[attr-defined]
            for leaf in tree_leaves((args, kwargs)):
                if _is_counted(leaf):
                    self._note(leaf.untyped_storage(), was_there=True)
        out = func(*args, **(kwargs or {}))
        if is_gathering and kwargs:
            self._gathered += [tensor.untyped_storage() for tensor in kwargs["out"]]
        for storage in self._gathered:
            self._note(storage)
        for leaf in tree_leaves(out):
            if _is_counted(leaf):
                self._note(leaf.untyped_storage())
        return out


def _is_counted(leaf: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor on the CPU whose memory torch allocated."""
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.untyped_storage().resizable()
