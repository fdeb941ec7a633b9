"""Receive buffers that are used again.

Fresh memory costs the operating system a page fault for every 4 KiB: on a CPU, filling a new 4 MiB buffer
takes twice as long as filling an old one. A buffer is used again when nothing else refers to its storage: not
autograd (which may keep a received activation, or a view of a received gradient), not the user (who may keep
a model output that is a received value). CUDA has a caching allocator of its own, so there the pool only
allocates.

Inputs of ever new shapes bring ever new formats: the buffers of one that has not been asked for in so many steps
are given back.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from smpc.executor.transport.layout import WireFormat

_MAX_BUFFERS = 64  # of one format
_TRIES = 4  # buffers are taken and given back in nearly the same order, so a free one is near the head
_SMALL = 64 * 1024  # bytes; below, allocating is faster than looking
_IDLE_STEPS = 64


class BufferPool:
    """Buffers by format."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[tuple[object, ...], deque[torch.UntypedStorage]] = {}
        self._last_step: dict[tuple[object, ...], int] = {}
        self._step = 0

    def take(self, form: WireFormat) -> Tensor:
        """A tensor in the planned layout that shares memory with no other living tensor."""
        if self._device.type != "cpu" or form.gaps:  # what has gaps on arrival leaves its buffer at once
            return form.empty(self._device)
        key = (form.shape, form.stride, form.dtype)
        storages = self._storages.get(key)
        if storages is None:
            storages = self._storages[key] = deque()
        self._last_step[key] = self._step
        for _ in range(min(_TRIES, len(storages))):
            storage = storages[0]
            storages.rotate(-1)
            if _num_references(storage) == 1:
                return torch.empty(0, dtype=form.dtype).set_(storage, 0, form.shape, form.stride)
        buffer = form.empty(self._device)
        if buffer.nbytes >= _SMALL and len(storages) < _MAX_BUFFERS:
            storages.append(buffer.untyped_storage())
        return buffer

    def end_step(self) -> None:
        """Give the buffers of formats back that have been idle for long."""
        self._step += 1
        idle = [key for key, step in self._last_step.items() if self._step - step > _IDLE_STEPS]
        for key in idle:
            del self._storages[key], self._last_step[key]


def _num_references(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))
