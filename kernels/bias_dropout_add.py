"""Bias, dropout and residual add in one op: `smpc::bias_dropout_add`.

    y = residual + mask * (x + bias) / (1 - p)            mask: 1 with probability 1 - p, else 0

The mask is not kept but computed again in the backward pass, from a seed by the counter-based generator Philox 4x32-10. It is a
function of the seed and the place alone, the same on CPU and CUDA, whatever the launch:

    place n of the contiguous tensor      tile = n // 4096, rest = n % 4096
    counter (tile * 1024 + rest % 1024, 0, 0, 0), key = seed        -> four words; word rest // 1024 is place n's
    kept iff word >> 8 >= round(p * 2^24)

The seed is a tensor on x's device, drawn from torch's generator there: `torch.manual_seed` and activation checkpointing govern it, the
device is not waited for, and a recorded graph draws a new one each time it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.kernels.elements import accumulation_dtype, kernels_compute, require_floating, require_like

TILE = 4096
WORDS = 4
_LANES = TILE // WORDS
_LEVELS = 2**24
_LARGEST = 2**33  # counters have 32 bits, and signed arithmetic one less


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
    if x.dim() == 0 or x.numel() >= _LARGEST:
        faults.append(f"expected x with a dimension and fewer than {_LARGEST} elements, found shape {tuple(x.shape)}")
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
        from smpc.kernels.bias_dropout_add_triton import launch_forward

        return launch_forward(x, bias, residual, threshold(p), scale(p), seed)
    wide = accumulation_dtype(x.dtype)
    values = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    out = residual.to(wide) + torch.where(kept(x.shape, p, seed), values * scale(p), 0.0)
    return out.to(x.dtype).contiguous()


@torch.library.custom_op("smpc::dropped", mutates_args=())
def _dropped(grad: Tensor, p: float, seed: Tensor) -> Tensor:
    """The gradient of what was dropped from: mask * grad / (1 - p)."""
    if kernels_compute(grad):
        from smpc.kernels.bias_dropout_add_triton import launch_backward

        return launch_backward(grad, threshold(p), scale(p), seed)
    wide = grad.to(accumulation_dtype(grad.dtype))
    return torch.where(kept(grad.shape, p, seed), wide * scale(p), 0.0).to(grad.dtype).contiguous()


def threshold(p: float) -> int:
    """The least of 2^24 levels that is kept."""
    return round(p * _LEVELS)


def scale(p: float) -> float:
    """What is kept is multiplied by this; 0 if nothing is."""
    return 1 / (1 - p) if p < 1 else 0.0


def kept(shape: torch.Size, p: float, seed: Tensor) -> Tensor:
    """The mask, as the module's docstring defines it."""
    size = shape.numel()
    if threshold(p) == 0:
        return torch.ones(shape, dtype=torch.bool, device=seed.device)
    counters = torch.arange(-(-size // TILE) * _LANES, device=seed.device)
    words = torch.stack(philox(counters, seed), 0).view(WORDS, -1, _LANES).transpose(0, 1).reshape(-1)[:size]
    return (words >> 8 >= threshold(p)).view(shape)


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


@_dropped.register_fake
def _(grad: Tensor, p: float, seed: Tensor) -> Tensor:
    return grad.new_empty(grad.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, ctx.p, seed = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(seed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    values = grad if threshold(ctx.p) == 0 else _dropped(grad, ctx.p, seed)
    grad_bias = None
    if ctx.bias_dtype is not None:
        rows = values.reshape(-1, values.shape[-1])
        grad_bias = rows.sum(0, dtype=accumulation_dtype(values.dtype)).to(ctx.bias_dtype)
    return values, grad_bias, grad, None, None


_bias_dropout_add.register_autograd(_differentiate, setup_context=_save)
