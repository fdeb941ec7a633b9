"""Bias, dropout and residual add in one op: `smpc::bias_dropout_add`.

    y = residual + mask * (x + bias) / (1 - p)            mask: 1 with probability 1 - p, else 0

The mask is not kept but computed again in the backward pass, from a seed by the counter-based generator Philox 4x32-10. It is a
function of the seed and the place alone, the same on CPU and CUDA, whatever the launch:

    place (row, column) of the matrix [rows, features] that the tensor is: every leading dimension is a row
    counter (row // 4 * features + column mod 2^32, 0, 0, 0), key = seed        -> four words; word row % 4 is the place's
    kept iff word >> 8 >= round(p * 2^24)

The gradient of the bias is the sum over rows of mask * dy / (1 - p) in fp32, before dx is rounded.

The seed is a tensor on x's device, drawn from torch's generator there: `torch.manual_seed` and activation checkpointing govern it, the
device is not waited for, and a recorded graph draws a new one each time it runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.kernels.shared.tensor_checks import (
    accumulation_dtype,
    as_rows,
    kernels_compute,
    require_floating,
    require_like,
)

WORDS = 4
_LEVELS = 2**24
_LARGEST = 2**33  # counters have 32 bits, and signed arithmetic one less
_WIDEST = 2**31


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    *,
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """`residual + dropout(x + bias, p)` of `x`, `residual` [..., features] and `bias` [features]; no dropout unless `training`.

    `seed` is an int64 tensor of no dimension on x's device; by default it is drawn. Equal seeds drop the same places. Raises
    UsageError (a ValueError) for shapes, dtypes, devices or a probability that do not fit.
    """
    op = "bias_dropout_add"
    require_floating(op, x=x, bias=bias, residual=residual)
    require_like(op, "x", x, residual=residual)
    faults = []
    if x.dim() == 0 or x.numel() >= _LARGEST or x.shape[-1] >= _WIDEST:
        expected = f"a dimension, fewer than {_LARGEST} elements and fewer than {_WIDEST} features"
        faults.append(f"expected x with {expected}, found shape {tuple(x.shape)}")
    elif bias is not None and tuple(bias.shape) != (x.shape[-1],):
        faults.append(f"expected bias of shape ({x.shape[-1]},), found {tuple(bias.shape)}")
    if not 0 <= p <= 1:
        faults.append(f"expected a probability from 0 to 1, found {p}")
    if seed is not None and (seed.dtype != torch.int64 or seed.dim() or seed.device != x.device):
        found = f"{seed.dtype} of shape {tuple(seed.shape)} on {seed.device}"
        faults.append(f"expected seed to be a torch.int64 tensor of no dimension on {x.device}, found {found}")
    if faults:
        raise UsageError(f"{op}: " + "; ".join(faults))
    if seed is None:
        drawn = training and p > 0
        seed = (
            torch.randint(2**62, (), device=x.device) if drawn else torch.zeros((), dtype=torch.int64, device=x.device)
        )
    out: Tensor = _bias_dropout_add(x, bias, residual, p if training else 0.0, seed)
    return out


@torch.library.custom_op("smpc::bias_dropout_add", mutates_args=())
def _bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor) -> Tensor:
    if kernels_compute(x):
        from smpc.kernels.programs.bias_dropout_add_triton import launch_forward

        return launch_forward(as_rows(x), bias, as_rows(residual), threshold(p), scale(p), seed).view(x.shape)
    wide = accumulation_dtype(x.dtype)
    values = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    out = residual.to(wide) + torch.where(kept(x.shape, p, seed), values * scale(p), 0.0)
    return out.to(x.dtype).contiguous()


@torch.library.custom_op("smpc::bias_dropout_add_backward", mutates_args=())
def _bias_dropout_add_backward(grad: Tensor, p: float, seed: Tensor, of_bias: bool) -> tuple[Tensor, Tensor]:
    """The gradients of x, mask * grad / (1 - p), and of the bias, in fp32; that is empty unless wanted."""
    if kernels_compute(grad):
        from smpc.kernels.programs.bias_dropout_add_triton import launch_backward

        grad_x, grad_bias = launch_backward(as_rows(grad), threshold(p), scale(p), seed, of_bias)
        return grad_x.view(grad.shape), grad_bias
    wide = grad.to(accumulation_dtype(grad.dtype))
    dropped = torch.where(kept(grad.shape, p, seed), wide * scale(p), 0.0)
    grad_bias = dropped.reshape(-1, grad.shape[-1]).sum(0) if of_bias else wide.new_empty(0)
    return dropped.to(grad.dtype, copy=True).contiguous(), grad_bias


def threshold(p: float) -> int:
    """The least of 2^24 levels that is kept."""
    return round(p * _LEVELS)


def scale(p: float) -> float:
    """The factor of kept elements; 0 if none is kept."""
    return 1 / (1 - p) if p < 1 else 0.0


def kept(shape: torch.Size, p: float, seed: Tensor) -> Tensor:
    """The mask, as the module's docstring defines it."""
    if threshold(p) == 0:
        return torch.ones(shape, dtype=torch.bool, device=seed.device)
    rows, features = math.prod(shape[:-1]), shape[-1]
    groups = -(-rows // WORDS)
    words = torch.stack(philox(torch.arange(groups * features, device=seed.device), seed), 0)
    by_row = words.view(WORDS, groups, features).transpose(0, 1).reshape(groups * WORDS, features)[:rows]
    return (by_row >> 8 >= threshold(p)).view(shape)


def philox(counters: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 of (counter, 0, 0, 0) with the 64-bit key `seed`: four words each, 32 bits in int64.

    From Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = counters & low, *(torch.zeros_like(counters) for _ in range(3))
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def _product(values: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of 32-bit numbers; no step exceeds 63 bits."""
    lower = values * (factor & 0xFFFF)
    upper = values * (factor >> 16) + (lower >> 16)
    return upper >> 16, (upper & 0xFFFF) << 16 | lower & 0xFFFF


@_bias_dropout_add.register_fake
def _(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_bias_dropout_add_backward.register_fake
def _(grad: Tensor, p: float, seed: Tensor, of_bias: bool) -> tuple[Tensor, Tensor]:
    grad_bias = grad.new_empty(grad.shape[-1] if of_bias else 0, dtype=accumulation_dtype(grad.dtype))
    return grad.new_empty(grad.shape), grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, ctx.p, seed = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(seed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    of_bias = ctx.bias_dtype is not None
    if threshold(ctx.p):
        grad_x, grad_bias = _bias_dropout_add_backward(grad, ctx.p, seed, of_bias)
    else:  # nothing is dropped
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x, grad_bias = grad, rows.sum(0, dtype=accumulation_dtype(grad.dtype)) if of_bias else grad.new_empty(0)
    return grad_x, grad_bias.to(ctx.bias_dtype) if of_bias else None, grad, None, None


_bias_dropout_add.register_autograd(_differentiate, setup_context=_save)
