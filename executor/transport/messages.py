"""Messages between two ranks: the interface of transports, and how a tensor of a planned shape, dtype and layout travels.

Terms
    dense       non-overlapping and without gaps: the strides are a permutation of contiguous ones
    wire view   the same memory seen as a contiguous tensor: what a transport reads and writes
    gaps        the strides on arrival of a tensor that is not dense, such as a slice: see `smpc.tracer.ir`

A dense tensor keeps its strides: its dimensions, sorted by falling stride, are a contiguous tensor. A tensor with gaps is sent without
them, and gets them back when it is taken out of the inbox. An expanded or overlapping tensor is sent, and arrives, contiguous. Both ends
know the format from the plan, so nothing but the elements is sent, and a tensor without elements is not sent at all. Only gradients may
come in another layout than planned: see `smpc.executor.program.channels`.

Example: float32[2,3] with strides (1, 2) is dense; its wire view is `tensor.permute(1, 0)`, contiguous [3,
2].

`Transport` is the interface that the interpreter uses. Tensors that one rank sends to another arrive in the order sent: first in, first
out, one tensor a message. Both ends know each message's format. A tensor handed to `send` must not be written afterwards; the transport
keeps it alive as long as it needs it. Ranks are pipeline ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from smpc.errors import TransportError
from smpc.tracer.ir import TensorSpec, arrival_stride, dense_order, falling_order


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The format of one value. `stride` is the layout in which it travels; `order` makes that layout contiguous."""

    value: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    order: tuple[int, ...] | None  # None: contiguous as it is
    requires_grad: bool
    is_empty: bool
    gaps: tuple[int, ...] = ()  # the strides on arrival, if others

    @classmethod
    def of(cls, value: str, spec: TensorSpec) -> WireFormat:
        """The format of the value with that spec."""
        empty = spec.num_elements == 0
        form = cls(value, spec.shape, spec.torch_dtype, (), None, spec.requires_grad, empty)
        return form.arriving(arrival_stride(spec.shape, spec.stride, spec.torch_dtype.itemsize))

    def arriving(self, stride: tuple[int, ...]) -> WireFormat:
        """The same value in the layout on arrival of these strides (see `smpc.tracer.ir`)."""
        order = falling_order(self.shape, stride)
        kept = None if order == tuple(range(len(order))) else order
        if dense_order(self.shape, stride) is not None:
            return dataclasses.replace(self, stride=stride, order=kept, gaps=())
        packed, step = [0] * len(self.shape), 1
        for dim in reversed(order):
            packed[dim] = step
            step *= self.shape[dim]
        return dataclasses.replace(self, stride=tuple(packed), order=kept, gaps=stride)

    def laid_out_like(self, tensor: Tensor) -> WireFormat:
        """This format in the layout of a tensor of that shape, unless that is expanded or overlaps; otherwise this format."""
        if not self.gaps and (tensor.stride() == self.stride or self._same_layout(tensor.stride())):
            return self
        stride = arrival_stride(self.shape, tensor.stride(), self.dtype.itemsize)
        is_kept = dense_order(self.shape, tensor.stride()) is not None or dense_order(self.shape, stride) is None
        return self.arriving(stride) if is_kept else self

    @property
    def arrival(self) -> tuple[int, ...]:
        """The strides on arrival."""
        return self.gaps or self.stride

    def unpack(self, tensor: Tensor) -> Tensor:
        """A tensor received in this format, with its gaps restored."""
        if not self.gaps:
            return tensor
        return torch.empty_strided(self.shape, self.gaps, dtype=self.dtype, device=tensor.device).copy_(tensor)

    def check(self, tensor: Tensor, where: str, *, gradients: bool) -> None:
        """Raise TransportError unless the tensor is what was planned; `gradients`: an unplanned need of one counts."""
        if tensor.shape != self.shape or tensor.dtype is not self.dtype:
            self._mismatch(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}", where)
        if gradients and tensor.requires_grad and not self.requires_grad:
            self._mismatch("the same with a gradient, which nothing would carry back", where)

    def _mismatch(self, found: str, where: str) -> None:
        planned = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        raise TransportError(
            f"{where}: value {self.value!r} was planned as {planned}, found {found}; nothing was sent. "
            "Trace the model again with inputs, mode and requires_grad flags like those of this step"
        )

    def conform(self, tensor: Tensor) -> Tensor:
        """The tensor, detached and in the layout in which it travels; shares memory where that holds its values so already."""
        tensor = tensor.detach().resolve_conj().resolve_neg()  # `z.conj()` has the memory of z, and a bit
        if tensor.stride() == self.stride or self._same_layout(tensor.stride()):
            return tensor
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)

    def _same_layout(self, stride: tuple[int, ...]) -> bool:
        return all(n == 1 or a == b for n, a, b in zip(self.shape, stride, self.stride, strict=True))

    def wire(self, tensor: Tensor) -> Tensor:
        """The wire view of a tensor in the layout in which it travels."""
        return tensor if self.order is None else tensor.permute(self.order)

    def empty(self, device: torch.device) -> Tensor:
        """A new tensor in the layout in which it travels, contents undefined."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class Receipt(Protocol):
    """A receive that was posted."""

    def ready(self) -> bool:
        """Whether `wait` would return at once; only a transport of one process (loopback) can tell."""

    def wait(self) -> Tensor:
        """The tensor, once it has arrived: a leaf without history, owned by the caller. To be called once."""


class Transport(Protocol):
    """Moves tensors between this rank and its peers."""

    @property
    def receives_on_device(self) -> bool:
        """Whether a posted receive occupies the device until the message comes (see `smpc.executor.program.message_order`)."""

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Before a program runs first: open the ways of its messages, each from one rank to another. Collective over its ranks."""

    def send(self, peer: int, tensor: Tensor, form: WireFormat) -> None:
        """Start to send a tensor whose shape and dtype have been checked; returns at once."""

    def receive(self, peer: int, form: WireFormat) -> Receipt:
        """Post the receive of the next tensor from `peer`; returns at once."""

    def mark(self, peer: int) -> int:
        """How many tensors have been sent to `peer` in this step."""

    def reap(self, peer: int, mark: int) -> None:
        """Let go of the first `mark` tensors sent to `peer` in this step, which arrive without further ado; waits for them."""

    def flush(self) -> None:
        """End of step: return when everything sent has left, and count from 0 again."""

    def held(self) -> Iterator[Tensor]:
        """Buffers that it keeps from one step to the next."""

    def forget(self) -> None:
        """Between steps: keep none of them, as other messages come next."""

    def close(self) -> None:
        """After a failure: drop what is under way and close the connections, so that peers that wait wake up."""
