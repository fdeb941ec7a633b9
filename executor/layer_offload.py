"""Activations of a forward pass that wait in CPU memory for the backward pass, except the last layers'.

    with LayerOffload(horizon=2):
        output = model(x)                 layers are checkpointed: what autograd saves is their inputs
    output.sum().backward()

    forward     saves h0 h1 h2 h3         on the device at the end: h2 h3      in CPU memory: h0 h1
    backward    needs h3, loads h1        h2 h1
                needs h2, loads h0        h1 h0                                ...

At most `horizon` saved tensors that need offloading are on the device for backward at a time. Copies run on a stream of their own between
pinned memory and the device. Tensors on the CPU are copied at once; parameters, tensors that need no gradient, and views of either stay.
Values are those that were saved, bit for bit.
"""

from __future__ import annotations

import weakref
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _OffloadedTensor:
    """A saved tensor: on the device, in CPU memory, or both; the event says when it is loaded back. Autograd's graph holds it."""

    __slots__ = ("__weakref__", "arrived", "device", "host", "place", "value")

    def __init__(self, value: Tensor, place: int) -> None:
        self.value: Tensor | None = value
        self.host: Tensor | None = None
        self.device = value.device
        self.place = place
        self.arrived: torch.cuda.Event | None = None


class LayerOffload:
    """Hooks over what autograd saves; see the module's docstring. One forward pass each."""

    def __init__(self, horizon: int) -> None:
        assert horizon >= 1, f"a horizon of {horizon} layers"
        self._horizon = horizon
        self._saved: list[weakref.ref[_OffloadedTensor]] = []
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> LayerOffload:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
        base = tensor._base if tensor._is_view() else tensor
        if type(tensor) is not Tensor or not tensor.requires_grad or base is None or base.is_leaf:
            return tensor
        saved = _OffloadedTensor(tensor.detach(), len(self._saved))
        self._saved.append(weakref.ref(saved))
        earlier = self._at(saved.place - self._horizon)
        if earlier is not None:
            self._leave(earlier)
        return saved

    def _at(self, place: int) -> _OffloadedTensor | None:
        """The value saved at a place; None if there is none, or it is no longer needed."""
        return self._saved[place]() if place >= 0 else None

    def _unpack(self, saved: Tensor | _OffloadedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._load(saved)
        ahead = self._at(saved.place - self._horizon + 1)
        if ahead is not None:
            self._load(ahead)
        if saved.arrived is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.arrived)
        assert saved.value is not None, "loaded"
        value, saved.value = saved.value, None if saved.host is not None else saved.value
        return value

    def _leave(self, saved: _OffloadedTensor) -> None:
        """Copy to CPU memory, and free the device's."""
        if saved.value is None or saved.host is not None:
            return
        if saved.device.type != "cuda":
            saved.host, saved.value = saved.value.clone(), None
            return
        stream = self._copies(saved.device)
        saved.host = torch.empty_like(saved.value, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(saved.device))
        with torch.cuda.stream(stream):
            saved.host.copy_(saved.value, non_blocking=True)
        saved.value.record_stream(stream)
        saved.value = None

    def _load(self, saved: _OffloadedTensor) -> None:
        """Copy back to the device."""
        if saved.value is not None or saved.host is None:
            return
        if saved.device.type != "cuda":
            saved.value = saved.host
            return
        stream = self._copies(saved.device)
        with torch.cuda.stream(stream):
            saved.value = saved.host.to(saved.device, non_blocking=True)
        saved.value.record_stream(torch.cuda.current_stream(saved.device))
        saved.arrived = stream.record_event()

    def _copies(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream
