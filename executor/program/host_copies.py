"""Moves what checkpointed regions keep to CPU memory, and back before the backward needs it.

A value is moved by its storage, so that autograd, which holds the tensor, need not know: OFFLOAD copies the bytes out, RELEASE frees the
memory, RELOAD allocates it again and copies them in. On CUDA the copies run on two streams of their own, one for each direction, between
pinned memory and the device. The stream that computes waits there: in RELEASE for the copy out, in B for the copy in. So memory is freed
where that stream is, and what comes next may have it at once, however far the host is ahead. On a CPU copies are done at once.

    F s0 m0          checkpoints keep h_0, h_1      device: h_0 h_1     host:
    OFFLOAD s0 m0                                   device: h_0 h_1     host: h_0 h_1
    the next task
    RELEASE s0 m0                                   device:             host: h_0 h_1
    ...
    RELOAD s0 m0                                    device: h_0 h_1     host:
    B s0 m0

Moved is only what needs a gradient (so no masks or tables, which microbatches may share), is no parameter, and does not leave the stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Away:
    """A storage, its bytes, and on CUDA when they are there."""

    storage: torch.UntypedStorage
    host: Tensor
    copied: torch.cuda.Event | None = None


class HostCopyMover:
    """Moves values of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def leave(self, values: Iterable[Tensor], stay: frozenset[int]) -> list[Away]:
        """Copies the bytes of the values' storages, but for those at the addresses `stay`; `release` frees their memory."""
        found: dict[int, torch.UntypedStorage] = {}
        for value in values:
            storage = value.untyped_storage()
            if value.requires_grad and storage.nbytes() and storage.resizable() and storage.data_ptr() not in stay:
                found.setdefault(storage.data_ptr(), storage)
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._device))
        return [self._leave(storage) for storage in found.values()]

    def _leave(self, storage: torch.UntypedStorage) -> Away:
        value = _bytes_of_host_copy(storage)
        if self._out is None:
            return Away(storage, value.clone())
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        with torch.cuda.stream(self._out):
            host.copy_(value, non_blocking=True)
        return Away(storage, host, self._out.record_event())

    def release(self, away: Iterable[Away]) -> None:
        """Frees the memory, once the bytes have been copied."""
        for item in away:
            self.wait(item.copied)
            item.storage.resize_(0)

    def load(self, away: list[Away]) -> torch.cuda.Event | None:
        """Gives the storages their memory and their bytes back; empties the list. The event, if any, is when they are there."""
        for item in away:
            item.storage.resize_(item.host.nbytes)
        if self._in is not None:
            self._in.wait_stream(torch.cuda.current_stream(self._device))
        for item in away:
            value = _bytes_of_host_copy(item.storage)
            if self._in is None:
                value.copy_(item.host)
            else:
                with torch.cuda.stream(self._in):
                    value.copy_(item.host, non_blocking=True)
        away.clear()
        return None if self._in is None else self._in.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Have what comes next wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def restore_sizes(away: list[Away]) -> None:
    """After a failure: the storages belong to buffers that are used again, so they get memory, whatever is in it."""
    for item in away:
        if item.copied is not None:
            item.copied.synchronize()
        item.storage.resize_(item.host.nbytes)
    away.clear()


def addresses(values: Iterable[Tensor]) -> frozenset[int]:
    """The addresses of the values' storages."""
    return frozenset(value.untyped_storage().data_ptr() for value in values)


def _bytes_of_host_copy(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
