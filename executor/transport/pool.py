"""Receive buffers that are used again.

Fresh memory costs the operating system a page fault for every 4 KiB: on a CPU, filling a new 4 MiB buffer
takes twice as long as filling an old one. A buffer is used again when nothing else refers to its storage: not
autograd (which may keep a received activation, or a view of a received gradient), not the user (who may keep
a model output that is a received value). CUDA has a caching allocator of its own, so there the pool only
allocates.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from smpc.executor.transport.layout import WireFormat

_MAX_BUFFERS = 64  # of one format
_TRIES = 4  # buffers are taken and given back in nearly the same order, so a free one is near the head
_SMALL = 64 * 1024  # bytes; below, allocating is faster than looking


class BufferPool:
    """Buffers by format."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[tuple[object, ...], deque[torch.UntypedStorage]] = {}

    def take(self, form: WireFormat) -> Tensor:
        """A tensor in the planned layout that shares memory with no other living tensor."""
        if self._device.type != "cpu":
            return form.empty(self._device)
        key = (form.shape, form.stride, form.dtype)
        storages = self._storages.get(key)
        if storages is None:
            storages = self._storages[key] = deque()
        for _ in range(min(_TRIES, len(storages))):
            storage = storages[0]
            storages.rotate(-1)
            if _num_references(storage) == 1:
                return torch.empty(0, dtype=form.dtype).set_(storage, 0, form.shape, form.stride)
        buffer = form.empty(self._device)
        if buffer.nbytes >= _SMALL and len(storages) < _MAX_BUFFERS:
            storages.append(buffer.untyped_storage())
        return buffer


def _num_references(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))
