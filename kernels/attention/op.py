"""Attention with log-sum-exp, forward and backward, as ops that torch knows: `smpc::flash_attention`.

    s_ij = scale * q_i k_j + bias_j - shift_i  -inf where causal hides key j:  j > i + causal_offset
    lse_i = log sum_j exp(s_ij)
    p_ij = exp(s_ij - lse_i)                   0 for a query that sees no key
    o_i  = sum_j p_ij v_j

    dv_j = sum_i p_ij do_i                     d x: gradient of the loss with respect to x
    ds_ij = p_ij (do_i v_j - delta_i)          delta_i = o_i do_i - dlse_i
    dq_i = scale * sum_j ds_ij k_j             dk_j = scale * sum_i ds_ij q_i

    q [batch, heads, queries, head size]       k, v [batch, key heads, keys, head size]; heads are a multiple of key heads
    bias [batch or 1, heads or 1, 1, keys]     added to the scores: ALiBi, padding as -inf; it gets no gradient
    shift [batch, heads, queries]              the largest bias that query i sees; without a bias there is none

The shift changes no result, but what fp32 keeps: with a bias of -10,000, or of -3e38, for all keys of a sample (padding) the scores
would leave no digits in lse. Finite biases beyond 1e38 count as 1e38.

Head sizes are 1 to 256 (those between powers of two cost as much as the next power). Types are fp16, bf16 and fp32, summed
in fp32, and fp64; q, k and v may have any strides. On CUDA devices from Ampere on Triton's kernels run for fp16 and bf16; everything
else is the formula in torch (`reference.py`), which holds the whole matrix of scores. Results have q's type; lse is
fp32 (fp64 for fp64). Results and gradients repeat bit by bit: sums have one order, without atomic additions.

`causal_offset` is 0 for the standard lower triangle, which starts at the first key whatever the lengths are;
`keys - queries` aligns the last query with the last key, as decoding with cached keys needs. `lse` lets context
parallelism merge partial results: lse = logaddexp(lse_1, lse_2), o = sum_i exp(lse_i - lse) o_i; gradients flow through it.

    out = flash_attention(q, k, v, causal=True)                 # scale is 1 / sqrt(head size)
    out, lse = flash_attention_with_lse(q, k, v, bias=alibi)    # this lse has the shift in it

Checks the arguments of attention; all violations of a call are reported in one ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from smpc.errors import UsageError
from smpc.kernels.attention.reference import reference_backward, reference_forward
from smpc.kernels.launch.backend import Backend, backend

MAX_HEAD = 256
_LARGEST_BIAS = 1e38  # a difference of two, times log2(e), is an fp32 number
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


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
) -> Tensor:
    """Attention's result, `[batch, heads, queries, head size]`; see the module docstring for the arguments."""
    out, _ = flash_attention_with_lse(q, k, v, bias, scale=scale, causal=causal, causal_offset=causal_offset)
    return out


def flash_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention's result and lse, `[batch, heads, queries]`."""
    check_attention(q, k, v, bias, scale)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    shift: Tensor | None = None
    if bias is not None:
        bias = wide_bias(bias, q)
        shift = bias_shift(bias, q, causal, causal_offset)
    out, lse = attention_op(q, k, v, bias, shift, scale, causal, causal_offset)
    return out, lse if shift is None else lse + shift


def wide_bias(bias: Tensor, q: Tensor) -> Tensor:
    """As the kernels add it: in the type of sums, finite numbers so far from the type's limits that scores and factors fit beside them."""
    wide = bias.to(torch.promote_types(q.dtype, torch.float32))
    return torch.where(wide.isinf(), wide, wide.clamp(-_LARGEST_BIAS, _LARGEST_BIAS)).contiguous()


def bias_shift(bias: Tensor, q: Tensor, causal: bool, causal_offset: int) -> Tensor:
    """The largest bias that each query sees, `[batch, heads, queries]`, contiguous; 0 for one that sees no key."""
    visible = causal_offset + torch.arange(q.shape[2], device=q.device)  # the last key of each query, if causal
    if bias.shape[3] == 0:
        return bias.new_zeros(q.shape[:3])
    if causal:
        largest = bias.cummax(-1).values[:, :, 0, visible.clamp(0, bias.shape[3] - 1)]
        largest = largest.masked_fill(visible < 0, 0.0)
    else:
        largest = bias.amax(-1)
    return largest.masked_fill(largest == float("-inf"), 0.0).expand(q.shape[:3]).contiguous()


@torch.library.custom_op("smpc::flash_attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    shift: Tensor | None,
    scale: float,
    causal: bool,
    causal_offset: int,
) -> tuple[Tensor, Tensor]:
    """The op; arguments are taken as checked."""
    if _by_formula(q):
        return reference_forward(q, k, v, bias, shift, scale, causal, causal_offset)
    from smpc.kernels.attention.forward_triton import launch_forward

    return launch_forward(q, k, v, bias, shift, scale, causal, causal_offset)


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    shift: Tensor | None,
    scale: float,
    causal: bool,
    causal_offset: int,
) -> tuple[Tensor, Tensor]:
    return _empty(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("smpc::flash_attention_backward", mutates_args=())
def attention_backward_op(
    grad: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    shift: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    causal_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    if _by_formula(q):
        return reference_backward(grad, grad_lse, q, k, v, bias, shift, out, lse, scale, causal, causal_offset)
    from smpc.kernels.attention.backward_triton import launch_backward

    return launch_backward(grad, grad_lse, q, k, v, bias, shift, out, lse, scale, causal, causal_offset)


@attention_backward_op.register_fake
def _(
    grad: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    shift: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    causal_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q), _empty(k), _empty(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, shift, ctx.scale, ctx.causal, ctx.causal_offset = inputs
    ctx.save_for_backward(q, k, v, bias, shift, *output)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    gradients = attention_backward_op(grad, grad_lse, *ctx.saved_tensors, ctx.scale, ctx.causal, ctx.causal_offset)
    return *gradients, None, None, None, None, None


attention_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.smpc.flash_attention)
def _flops(q: torch.Size, k: torch.Size, *rest: Any, **_: Any) -> int:
    return 2 * 2 * q[0] * q[1] * q[2] * k[2] * q[3]


@register_flop_formula(torch.ops.smpc.flash_attention_backward)
def _backward_flops(grad: torch.Size, grad_lse: torch.Size, q: torch.Size, k: torch.Size, *rest: Any, **_: Any) -> int:
    return 5 * 2 * q[0] * q[1] * q[2] * k[2] * q[3]  # scores again, dp, dq, dk, dv


def _by_formula(q: Tensor) -> bool:
    # On a GPU fp32 products would be slow or inexact; in the interpreter products of bf16 are wrong.
    types = {
        Backend.TRITON: (torch.float16, torch.bfloat16),
        Backend.INTERPRETER: (torch.float16, torch.float32),
        Backend.TORCH: (),
    }
    return q.dtype not in types[backend(q.device)]


def _empty(like: Tensor) -> Tensor:
    batch, heads, sequence, head = like.shape
    return like.new_empty((batch, sequence, heads, head)).transpose(1, 2)
