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
from smpc.nn.script_writes.slice_numbers import number_of

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
        """A number that knows it; of an empty one that of the whole parameter. Torch's own scripts get what they put into a vector."""
        with torch._C.DisableTorchFunctionSubclass():
            found: torch.Size = super().size()
        of = None if is_own(sys._getframe(1)) else self._sized_as()
        if of is None:
            return found.numel()
        if not found.numel():
            return (self._whole_size(of, found) or found).numel()
        count: int = number_of(found.numel(), of) if dims_of(self, of) else found.numel()
        return count

    nelement = numel

    def _whole_size(self, of: OfSlice, sizes: torch.Size) -> torch.Size | None:
        return whole_shape(of.drawn_as(self)) if of.is_held and sizes == of.size else None

    def _known_sizes(self, sizes: torch.Size) -> torch.Size:
        of = self._sized_as()
        whole = None if of is None else self._whole_size(of, sizes)
        if whole is not None:
            return whole
        dims = () if of is None else dims_of(self, of)
        return torch.Size([number_of(each, of) if dim in dims else each for dim, each in enumerate(sizes)])

    def _sized_as(self) -> OfSlice | None:
        return known(self)
