"""How far a result may differ from eager's: not at all, or by a multiple of the tensor's largest value.

    bitwise     everything, wherever the programs do the model's operations in the model's order
    order       the gradient of a parameter that several stages use: its summands are added in another order
    arithmetic  everything, where other operations compute the same function: fused kernels (`kernels`), a mask of ones that is written
                out, an operation whose results differ from run to run in eager, too

dtype       order    arithmetic
float64     1e-14    1e-13
float32     1e-6     1e-5
float16     1e-2     1e-2
bfloat16    5e-2     5e-2

Numbers that are no floats are always compared bitwise; NaN is equal to NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BITWISE: Mapping[torch.dtype, float] = {}
ORDER: Mapping[torch.dtype, float] = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
ARITHMETIC: Mapping[torch.dtype, float] = {**ORDER, torch.float64: 1e-13, torch.float32: 1e-5}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The tolerance of one comparison. `reason`: why arithmetic may differ, "" if it may not; `shared`: parameters."""

    reason: str = ""
    shared: frozenset[str] = frozenset()

    def of_gradient(self, name: str) -> Mapping[torch.dtype, float]:
        """By dtype, what the gradient of a parameter may differ by."""
        return ARITHMETIC if self.reason else ORDER if name in self.shared else BITWISE

    @property
    def of_others(self) -> Mapping[torch.dtype, float]:
        """By dtype, what everything else may differ by."""
        return ARITHMETIC if self.reason else BITWISE

    @property
    def text(self) -> str:
        """The expectation, as text."""
        if self.reason:
            return (
                f"within rounding, {ARITHMETIC[torch.float32]:g} of the largest value in float32, because {self.reason}"
            )
        if self.shared:
            return f"bit by bit, and within {ORDER[torch.float32]:g} the gradients that several stages add up"
        return "bit by bit"


def difference(expected: Tensor | None, found: Tensor | None, allowed: Mapping[torch.dtype, float] = BITWISE) -> str:
    """How two tensors differ by more than is allowed, for people; "" if they do not."""
    if expected is None or found is None:
        return "" if expected is found else f"expected {_shown(expected)}, found {_shown(found)}"
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return f"expected {_shown(expected)}, found {_shown(found)}"
    a, b = expected.detach(), found.detach().to(expected.device)
    if a.layout is not torch.strided or a.is_nested:
        a, b = _dense(a), _dense(b)
    if a.is_quantized or torch.equal(a, b):
        return "" if torch.equal(a, b) else "the values differ"
    both = (a == b) | ((a != a) & (b != b))
    wrong = int((~both).sum())
    if not wrong:
        return ""
    size = f"in {wrong} of {a.numel()} elements"
    if not (a.is_floating_point() or a.is_complex()):
        return f"{size}, the first one {_first(a, ~both)} expected, {_first(b, ~both)} found"
    gap, largest = (a - b)[~both].abs().max().item(), _largest_element(a)
    bound = allowed.get(_REAL.get(a.dtype, a.dtype), 0.0)
    if gap <= bound * largest:
        return ""
    return f"{size}, by at most {gap:.3g} where the largest value is {largest:.3g}"


def _largest_element(tensor: Tensor) -> float:
    sizes = tensor.abs()
    finite = sizes[torch.isfinite(sizes)]
    return float(finite.max().item()) if finite.numel() else 0.0


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_padded_tensor(0.0) if tensor.is_nested else tensor.to_dense()


def _first(tensor: Tensor, where: Tensor) -> object:
    return tensor[where].flatten()[0].item()


def _shown(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
