"""Sizes of slices, which know that they belong to one where a script reads them (`slice_numbers`, beside). Empty slices have the whole
parameter's sizes, so that `torch.randn(weight.shape)` draws as much as on the rank that has its rows.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from smpc.nn.init.nn_init_on_slices import whole_shape
from smpc.nn.script_writes.callers import is_own, is_script
from smpc.nn.script_writes.slice_numbers import number_of
from smpc.nn.script_writes.slice_provenance import OfSlice, dims_of, known

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
        """Elements; of an empty slice the whole parameter's, but for torch's own scripts, which count what they have put into a vector."""
        with torch._C.DisableTorchFunctionSubclass():
            found: torch.Size = super().size()
        if found.numel() or is_own(sys._getframe(1)):
            return found.numel()
        of = self._sized_as()
        return (found if of is None else self._whole_size(of, found) or found).numel()

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
