"""Counts the bytes of the tensors that are alive while something runs on a CPU, where no allocator keeps count.

    with LiveBytes(held) as counter:        # `held`: tensors that are there already and count too
        step()
    counter.peak

A storage counts once, however many tensors see it, from the operation that makes it until nobody holds it any more. Memory that
operations use inside (workspaces of libraries) is not seen. Every operation becomes several times slower: measure
memory in one step and times in others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`live` bytes now, and the most that there were."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()
        for tensor in held:
            self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += num_bytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, key, num_bytes)

    def _drop(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self._note(leaf.untyped_storage())
        return out
