"""How a tensor of a planned shape, dtype and layout travels between two ranks.

Terms
    dense       non-overlapping and without gaps: the strides are a permutation of contiguous ones
    wire view   the same memory seen as a contiguous tensor: what a transport reads and writes

A dense tensor keeps its strides: its dimensions, sorted by falling stride, are a contiguous tensor. Anything
else (expanded, overlapping, with gaps) travels contiguous, and so it arrives. Both ends know the format from
the plan, so nothing but the elements is sent, and a tensor without elements is not sent at all. Only gradients
may come in another dense layout than planned: see `smpc.executor.inbox`.

Example: float32[2,3] with strides (1, 2) is dense; its wire view is `tensor.permute(1, 0)`, contiguous [3,
2].
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from smpc.errors import TransportError
from smpc.tracer.ir import TensorSpec


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The format of one value. `stride` is the layout in which it arrives; `order` makes that layout contiguous."""

    value: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    order: tuple[int, ...] | None  # None: contiguous as it is
    requires_grad: bool
    is_empty: bool

    @classmethod
    def of(cls, value: str, spec: TensorSpec) -> WireFormat:
        """The format of the value with that spec."""
        order = _dense_order(spec.shape, spec.stride)
        stride = spec.stride if order is not None else _contiguous_stride(spec.shape)
        if order == tuple(range(len(spec.shape))):
            order = None
        empty = spec.num_elements == 0
        return cls(value, spec.shape, spec.torch_dtype, stride, order, spec.requires_grad, empty)

    def in_order(self, order: tuple[int, ...]) -> WireFormat:
        """The same value in another dense layout: `order` lists the dimensions by falling stride."""
        stride, step = [0] * len(self.shape), 1
        for dim in reversed(order):
            stride[dim] = step
            step *= max(self.shape[dim], 1)
        kept = None if order == tuple(range(len(order))) else order
        return dataclasses.replace(self, stride=tuple(stride), order=kept)

    def laid_out_like(self, tensor: Tensor) -> WireFormat:
        """This format in the layout of a tensor of that shape, if that is dense; otherwise this format."""
        if tensor.stride() == self.stride or self._same_layout(tensor.stride()):
            return self
        order = _dense_order(self.shape, tensor.stride())
        return self if order is None else self.in_order(order)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions by falling stride."""
        return tuple(range(len(self.shape))) if self.order is None else self.order

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
        """The tensor, detached and in the planned layout; shares memory where that holds its values in this layout already."""
        tensor = tensor.detach().resolve_conj().resolve_neg()  # `z.conj()` has the memory of z, and a bit
        if tensor.stride() == self.stride or self._same_layout(tensor.stride()):
            return tensor
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)

    def _same_layout(self, stride: tuple[int, ...]) -> bool:
        return all(n == 1 or a == b for n, a, b in zip(self.shape, stride, self.stride, strict=True))

    def wire(self, tensor: Tensor) -> Tensor:
        """The wire view of a tensor in the planned layout."""
        return tensor if self.order is None else tensor.permute(self.order)

    def empty(self, device: torch.device) -> Tensor:
        """A new tensor in the planned layout, contents undefined."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _dense_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dimensions by falling stride if the layout is dense, else None. Dimensions of size 1 stay where they are."""
    if 0 in shape or stride == _contiguous_stride(shape):
        return tuple(range(len(shape)))
    real = [dim for dim, size in enumerate(shape) if size != 1]
    falling = sorted(real, key=lambda dim: -stride[dim])
    step = 1
    for dim in reversed(falling):
        if stride[dim] != step:
            return None
        step *= shape[dim]
    remaining = iter(falling)
    return tuple(dim if size == 1 else next(remaining) for dim, size in enumerate(shape))
