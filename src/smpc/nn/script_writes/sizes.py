"""Sizes of slices, which know it where a script reads them (`slice_numbers`, beside). Empty ones have those of the whole parameter, so that
`torch.randn(weight.shape)` draws as much as on the rank that has its rows.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from smpc.nn.init.whole_fills import whole_shape
from smpc.nn.script_writes.callers import is_own, is_script
from smpc.nn.script_writes.rows import OfSlice, dims_of, known
from smpc.nn.script_writes.slice_numbers import SliceInt

_TORCHS_SHAPE: Any = Tensor.shape  # whose reads what looks at all functions of torch's sees


class WithSizes(Tensor):
    """A tensor whose sizes along a slice's rows know it."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """See above."""
        with torch._C.DisableTorchFunctionSubclass():
            found: torch.Size = _TORCHS_SHAPE.__get__(self)
        return self._known_sizes(found) if is_script() else found

    def size(self, dim: Any = None) -> Any:
        """See above."""
        with torch._C.DisableTorchFunctionSubclass():
            found = super().size()
        sizes = self._known_sizes(found) if is_script() else found
        return sizes if dim is None else sizes[dim]

    def numel(self) -> int:
        """That of the whole parameter, of an empty one; that of a slice knows it. torch's own scripts count what they put into a vector."""
        with torch._C.DisableTorchFunctionSubclass():
            found: torch.Size = super().size()
        return found.numel() if is_own(sys._getframe(1)) else self._known_numel(found)

    nelement = numel

    def _known_numel(self, found: torch.Size) -> int:
        of = self._sized_as()
        if of is None:
            return found.numel()
        whole = self._whole_size(of, found)
        if whole is not None:
            return whole.numel()
        if not dims_of(self, of):
            return found.numel()
        own = SliceInt.told(found.numel(), of, of.num_slices)
        own.counts = True
        return own

    def _whole_size(self, of: OfSlice, sizes: torch.Size) -> torch.Size | None:
        return whole_shape(of.drawn_as(self)) if of.is_held and sizes == of.size else None

    def _known_sizes(self, sizes: torch.Size) -> torch.Size:
        of = self._sized_as()
        whole = None if of is None else self._whole_size(of, sizes)
        if whole is not None:
            return whole
        dims = () if of is None else dims_of(self, of)
        if of is None or not dims:
            return sizes
        count = of.num_slices if len(dims) == 1 else 1
        return torch.Size([SliceInt.told(each, of, count) if dim in dims else each for dim, each in enumerate(sizes)])

    def _sized_as(self) -> OfSlice | None:
        return known(self)


def numel_of(tensor: Any) -> int:
    """`numel()` as a script reads it; another tensor's as it is."""
    return tensor._known_numel(tensor.size()) if isinstance(tensor, WithSizes) else tensor.numel()
