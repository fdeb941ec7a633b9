"""Moves what checkpointed regions keep to CPU memory, and back before the backward needs it.

A value is moved by its storage, so that autograd, which holds the tensor, need not know: OFFLOAD copies the bytes out and frees the
memory, RELOAD allocates it again and copies them in. On CUDA the copies run on a stream of their own, between pinned memory and the
device; B waits for its RELOAD there. On a CPU they are done at once.

    F s0 m0          checkpoints keep h_0, h_1      device: h_0 h_1     host:
    OFFLOAD s0 m0                                   device:             host: h_0 h_1
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
    """A storage without memory, and its bytes."""

    storage: torch.UntypedStorage
    host: Tensor


class Mover:
    """Moves values of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def leave(self, values: Iterable[Tensor], stay: frozenset[int]) -> list[Away]:
        """Frees the memory of the values' storages, but for those at the addresses `stay`."""
        found: dict[int, torch.UntypedStorage] = {}
        for value in values:
            storage = value.untyped_storage()
            if value.requires_grad and storage.nbytes() and storage.resizable() and storage.data_ptr() not in stay:
                found.setdefault(storage.data_ptr(), storage)
        return [self._leave(storage) for storage in found.values()]

    def _leave(self, storage: torch.UntypedStorage) -> Away:
        value = _bytes(storage)
        if self._stream is None:
            host = value.clone()
        else:
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                host.copy_(value, non_blocking=True)
            value.record_stream(self._stream)
        del value
        storage.resize_(0)
        return Away(storage, host)

    def load(self, away: list[Away]) -> torch.cuda.Event | None:
        """Gives the storages their memory and their bytes back; empties the list. The event, if any, is when they are there."""
        for item in away:
            item.storage.resize_(item.host.nbytes)
            value = _bytes(item.storage)
            if self._stream is None:
                value.copy_(item.host)
            else:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):
                    value.copy_(item.host, non_blocking=True)
                value.record_stream(self._stream)
        away.clear()
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Have what comes next wait for a load."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def restore_sizes(away: list[Away]) -> None:
    """After a failure: the storages belong to buffers that are used again, so they get memory, whatever is in it."""
    for item in away:
        item.storage.resize_(item.host.nbytes)
    away.clear()


def addresses(values: Iterable[Tensor]) -> frozenset[int]:
    """The bytes of the values' storages."""
    return frozenset(value.untyped_storage().data_ptr() for value in values)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
