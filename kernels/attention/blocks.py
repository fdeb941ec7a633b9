"""One block of attention at a time, as ring attention needs it: part of the keys forward, and backward with the result over all keys.

    forward      o_b, lse_b                            of the block's keys alone
    merge        lse = logaddexp(lse_a, lse_b)
                 o = o_a exp(lse_a - lse) + o_b exp(lse_b - lse)
    backward     dq, dk, dv of the block               from o, lse over all keys: p_ij = exp(s_ij - lse_i), so blocks are independent

A block is a call of the kernels where they run; on a CPU of torch's own kernel, without a bias; otherwise of the formula. Shapes and
letters are as in `smpc.kernels.attention.op`; k and v may have fewer heads. lse is fp32 (fp64 for fp64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from smpc.kernels.attention.op import attention_backward_op, attention_op

_RUN = 256  # torch's CPU kernel takes keys by 512: of a causal block of 1,024 it computes three quarters, in such runs less


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """The result of the block's keys, and its lse."""
    if _by_torch(q, bias, causal, k):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, _repeated(k, q), _repeated(v, q), 0.0, causal, scale=scale
        )
        return out, lse
    found: tuple[Tensor, Tensor] = attention_op(q, k, v, bias, scale, causal, 0)
    return found


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's parts of dq, dk and dv. `out`, `lse`: over the keys of all blocks."""
    if _by_torch(q, bias, causal, k):
        if causal and q.shape[2] > _RUN:
            return _causal_backward(grad, q, k, v, out, lse, scale)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, _repeated(k, q), _repeated(v, q), out, lse, 0.0, causal, scale=scale
        )
        return dq, _folded(dk, k), _folded(dv, v)
    no_grad_lse = torch.zeros_like(lse)
    found: tuple[Tensor, Tensor, Tensor] = attention_backward_op(
        grad, no_grad_lse, q, k, v, bias, out, lse, scale, causal, 0
    )
    return found


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Takes a block into the result over the blocks before, in place; `out` is as wide as `lse`."""
    both = torch.logaddexp(lse, block_lse)
    safe = both.masked_fill(both == float("-inf"), 0.0)  # a query that sees no key yet
    out.mul_((lse - safe).exp().unsqueeze(-1)).add_(block_out.to(out.dtype) * (block_lse - safe).exp().unsqueeze(-1))
    lse.copy_(both)


def _causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The causal block in runs of queries: each against the keys before it, which need no mask, and against its own."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[2], _RUN):
        run = slice(start, start + _RUN)
        for keys in (slice(start), run) if start else (run,):
            on_run = grad[:, :, run], q[:, :, run], k[:, :, keys], v[:, :, keys]
            found = block_backward(*on_run, None, out[:, :, run], lse[:, :, run], scale, keys is run)
            if start and keys is run:
                dq[:, :, run] += found[0]
            else:
                dq[:, :, run] = found[0]
            dk[:, :, keys] += found[1]
            dv[:, :, keys] += found[2]
    return dq, dk, dv


def _by_torch(q: Tensor, bias: Tensor | None, causal: bool, k: Tensor) -> bool:
    same = not causal or q.shape[2] == k.shape[2]
    return q.device.type == "cpu" and bias is None and same and q.dtype in (torch.float32, torch.float64)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _folded(grad: Tensor, x: Tensor) -> Tensor:
    groups = grad.shape[1] // x.shape[1]
    return grad if groups == 1 else grad.reshape(x.shape[0], x.shape[1], groups, *x.shape[2:]).sum(2)
