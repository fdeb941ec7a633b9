"""Rotary position embedding as an op: `smpc::rotary`.

Features are rotated in pairs by an angle that depends on the position; `cos` and `sin` hold one column for each pair.

    (a, b) -> (a cos - b sin, b cos + a sin)

    half-rotated   (Llama, GPT-NeoX)    pairs (i, i + R/2)         x = [ a0 a1 a2 | b0 b1 b2 | rest ]
    interleaved    (GPT-J, RoFormer)    pairs (2i, 2i + 1)         x = [ a0 b0 a1 b1 a2 b2   | rest ]

R = 2 * columns of `cos` features are rotated, the rest pass. Computed in fp32 whatever the dtypes, rounded once. The gradient is the
rotation by the opposite angle: only `cos` and `sin` are kept for it.

    q = rotary(q, cos, sin)                      q [batch, heads, seq, head size], cos and sin [seq, R/2] or [batch, seq, R/2]
    q = rotary(q, cos, sin, seq_dim=1)           q [batch, seq, heads, head size]

Hugging Face's tables hold every column twice: `rotary(q, cos, sin, doubled=True)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.kernels.shared.tensor_checks import accumulation_dtype, kernels_compute, require_floating


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, seq_dim: int = -2, doubled: bool = False
) -> Tensor:
    """`x` with its first 2 * cos.shape[-1] features rotated; the layout of `x` in memory is kept.

    x: four dimensions, features last, positions in `seq_dim`. cos, sin: [seq, pairs], or [batch or 1, seq, pairs] with x's
    first dimension the batch. With `doubled` they have a column for each feature, like Hugging Face's: the columns of a
    pair are equal. Raises UsageError (a ValueError) for shapes, dtypes or devices that do not fit, and for tables that
    require a gradient, which is not computed.
    """
    require_floating("rotary", x=x, cos=cos, sin=sin)
    if doubled:
        columns = slice(None, None, 2) if interleaved else slice(None, cos.shape[-1] // 2 if cos.dim() else None)
        cos, sin = cos[..., columns], sin[..., columns]
    if cos.dim() == 3 and cos.shape[0] == 1 and sin.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    faults = []
    positions = seq_dim + 4 if seq_dim < 0 else seq_dim
    if x.dim() != 4 or positions not in (0, 1, 2):
        faults.append(f"expected x with 4 dimensions and seq_dim 0, 1 or 2, found {tuple(x.shape)} and {seq_dim}")
    else:
        batched = (x.shape[0], x.shape[positions])
        leading = [batched[1:]] if positions == 0 else [batched[1:], batched]
        if tuple(cos.shape[:-1]) not in leading or not 1 <= cos.shape[-1] <= x.shape[-1] // 2:
            expected = " or ".join(str((*shape, "pairs")) for shape in leading)
            faults.append(
                f"expected cos of shape {expected} with 1 to {x.shape[-1] // 2} pairs, found {tuple(cos.shape)}"
            )
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        faults.append(f"expected sin like cos, {tuple(cos.shape)} {cos.dtype}, found {tuple(sin.shape)} {sin.dtype}")
    if cos.requires_grad or sin.requires_grad:
        faults.append("expected cos and sin without gradients, found requires_grad=True: detach them")
    if faults:
        raise UsageError("rotary: " + "; ".join(faults))
    out: Tensor = _rotary(x, cos, sin, interleaved, positions, False)
    return out


@torch.library.custom_op("smpc::rotary", mutates_args=())
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: int, inverse: bool) -> Tensor:
    out = torch.empty_like(x)
    # [batch, heads, seq, features], views of the same memory.
    values, result = x.movedim(positions, 2), out.movedim(positions, 2)
    if kernels_compute(x):
        from smpc.kernels.programs.rotary_triton import launch_rotary

        launch_rotary(values, cos, sin, result, interleaved, inverse)
    else:
        result.copy_(reference_rotary(values, cos, sin, interleaved, inverse))
    return out


def reference_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """The formula for x [batch, heads, seq, features], in the width it is computed in."""
    wide = accumulation_dtype(x.dtype)
    half = cos.shape[-1]
    c, s = cos.to(wide).unsqueeze(-3), sin.to(wide).unsqueeze(-3)
    if inverse:
        s = -s
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :].to(wide)
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        rotated = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        rotated = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((rotated, rest), -1)


@_rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: int, inverse: bool) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.positions, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return _rotary(grad, cos, sin, ctx.interleaved, ctx.positions, not ctx.inverse), None, None, None, None, None


_rotary.register_autograd(_differentiate, setup_context=_save)
