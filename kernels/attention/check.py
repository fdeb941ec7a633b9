"""Checks the arguments of attention; all violations of a call are reported in one ValueError."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from smpc.errors import UsageError

MAX_HEAD = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> None:
    """Raises UsageError, a ValueError, unless the arguments fit `smpc.kernels.attention.op`."""
    faults = list(_faults(q, k, v, bias, scale))
    if faults:
        raise UsageError("\n".join(["attention cannot take these arguments:", *(f"- {fault}" for fault in faults)]))


def _faults(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Iterator[str]:
    tensors = {"q": q, "k": k, "v": v}
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        found = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        yield f"expected q, k and v of one of the types float16, bfloat16, float32, float64; found {found}"
    if bias is not None:
        tensors["the mask"] = bias
    if len({tensor.device for tensor in tensors.values()}) > 1:
        found = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        yield f"expected all tensors on one device; found {found}"
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        yield f"expected a scale above 0; found {scale}"
    shapes = list(_shape_faults(q, k, v))
    yield from shapes
    if bias is not None:
        yield from _bias_faults(q, k, bias, shapes_agree=not shapes)


def _shape_faults(q: Tensor, k: Tensor, v: Tensor) -> Iterator[str]:
    found = f"found q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if any(tensor.dim() != 4 for tensor in (q, k, v)):
        yield f"expected q, k and v as [batch, heads, sequence, head size]; {found}"
        return
    if not 1 <= q.shape[3] <= MAX_HEAD:
        yield f"expected a head size of 1 to {MAX_HEAD}; found {q.shape[3]}"
    if k.shape != v.shape:
        yield f"expected k and v of one shape; {found}"
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        yield f"expected q and k with one batch size and one head size; {found}"
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        yield f"expected q's heads to be a multiple of k's heads; {found}"


def _bias_faults(q: Tensor, k: Tensor, bias: Tensor, shapes_agree: bool) -> Iterator[str]:
    if not bias.is_floating_point():
        yield (
            f"expected a mask of floating point numbers that are added to the scores (-inf hides a key); found {bias.dtype}"
        )
    if bias.requires_grad:
        yield "expected a mask that needs no gradient: attention computes none for it; found one with requires_grad"
    if not shapes_agree:
        return
    batch, heads, keys = q.shape[0], q.shape[1], k.shape[2]
    if (
        bias.dim() != 4
        or bias.shape[0] not in (1, batch)
        or bias.shape[1] not in (1, heads)
        or bias.shape[2:] != (1, keys)
    ):
        yield f"expected a mask [{batch} or 1, {heads} or 1, 1, {keys}]; found {list(bias.shape)}"
