"""One block of attention at a time, as ring attention needs it: part of the keys forward, and backward with the result over all keys.

    forward      o_b, lse_b                            of the block's keys alone
    merge        lse = logaddexp(lse_a, lse_b)
                 o = o_a + (o_b - o_a) sigmoid(lse_b - lse_a)
    backward     dq, dk, dv of the block               from o, lse over all keys: p_ij = exp(s_ij - lse_i), so blocks are independent

A block is a call of the kernels where they run; on a CPU of torch's own kernel, without a bias; otherwise of the formula. Shapes and
letters are as in `smpc.kernels.attention.op`; the shift is over the keys of all blocks. k and v may have fewer heads. lse is fp32 (fp64
for fp64).

torch's CPU kernel takes keys in runs of 512, masked or not: it computes three quarters of a causal block of 1,024. So such a block is cut
into rectangles without a mask and small triangles, if the length can be halved. Equal parts are one call. Forward merges the results,
backward adds them up. For eight runs of queries (rows) and keys (columns):

    t              t    triangles, eight in one call
    a t            a    the later run of each pair by the earlier: four in one call
    b b t          b    the same for each pair of pairs: two in one call
    b b a t        c    one
    c c c c t
    c c c c a t
    c c c c b b t
    c c c c b b a t
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smpc.kernels.attention.op import attention_backward_op, attention_op

_RUN = 128  # no triangle is smaller: its call would cost more than it saves


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, shift: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """The result of the block's keys, and its lse."""
    if _by_torch(q, bias, causal, k):
        known = q, _repeated(k, q), _repeated(v, q)
        return _causal_forward(*known, scale) if causal else _on_cpu(*known, scale, False)
    found: tuple[Tensor, Tensor] = attention_op(q, k, v, bias, shift, scale, causal, 0)
    return found


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    shift: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's parts of dq, dk and dv. `out`, `lse`: over the keys of all blocks."""
    if _by_torch(q, bias, causal, k):
        known = grad, q, _repeated(k, q), _repeated(v, q), out, lse
        dq, dk, dv = _causal_backward(*known, scale) if causal else _back_on_cpu(*known, scale, causal)
        return dq, _folded(dk, k), _folded(dv, v)
    no_grad_lse = torch.zeros_like(lse)
    found: tuple[Tensor, Tensor, Tensor] = attention_backward_op(
        grad, no_grad_lse, q, k, v, bias, shift, out, lse, scale, causal, 0
    )
    return found


def merge_attention_blocks(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Takes a block into the result over the blocks before, in place; `out` is as wide as `lse`."""
    weight = torch.sigmoid(block_lse - lse).nan_to_num(0.0)  # of a query that has seen no key yet
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _causal_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The causal block in triangles and rectangles."""
    run, halves = _cuts(q)
    if not halves:
        return _on_cpu(q, k, v, scale, True)
    triangles = _on_cpu(*_as_batch(*(_in_runs(x, run) for x in (q, k, v))), scale, True)
    out, lse = (_of_batch(x, q).flatten(2, 3) for x in triangles)
    for half in halves:
        later, earlier_keys, earlier_values = _halves(q, half)[1], _halves(k, half)[0], _halves(v, half)[0]
        part = _on_cpu(*_as_batch(later, earlier_keys, earlier_values), scale, False)
        merge_attention_blocks(
            _halves(out, half)[1], _halves(lse, half)[1], _of_batch(part[0], q), _of_batch(part[1], q)
        )
    return out, lse


def _as_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _batched(q), _batched(k), _batched(v)


def _back_on_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )
    return dq, dk, dv


def _causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The causal block in triangles and rectangles."""
    known = (grad, q, k, v, out, lse)
    run, halves = _cuts(q)
    if not halves:
        return _back_on_cpu(*known, scale, True)
    found = [_of_batch(x, q).flatten(2, 3) for x in _on_runs([_in_runs(x, run) for x in known], scale, causal=True)]
    for half in halves:
        later_by_earlier = [_halves(x, half)[i] for x, i in zip(known, (1, 1, 0, 0, 1, 1), strict=True)]
        parts = _on_runs(later_by_earlier, scale, causal=False)
        for whole, part, i in zip(found, parts, (1, 0, 0), strict=True):
            _halves(whole, half)[i].add_(_of_batch(part, q))
    return found[0], found[1], found[2]


def _on_runs(known: Sequence[Tensor], scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`_back_on_cpu` of runs [B, H, runs, ..], all in one call."""
    grad, q, k, v, out, lse = map(_batched, known)
    return _back_on_cpu(grad, q, k, v, out, lse, scale, causal)


def _cuts(q: Tensor) -> tuple[int, tuple[int, ...]]:
    """The length of the triangles, and the lengths of the rectangles, the shortest first; 0 and none for an empty tensor."""
    run, halves = q.shape[2] if q.numel() else 0, []
    while run % 2 == 0 and run // 2 >= _RUN:
        run //= 2
        halves.append(run)
    return run, tuple(reversed(halves))


def _in_runs(x: Tensor, run: int) -> Tensor:
    """[B, H, N, ..] as [B, H, runs, run, ..]."""
    return x.view(*x.shape[:2], -1, run, *x.shape[3:])


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Of [B, H, N, ..] in pairs of halves the earlier ones, and the later: views [B, H, pairs, half, ..]."""
    both = x.view(*x.shape[:2], -1, 2, half, *x.shape[3:])
    return both.select(3, 0), both.select(3, 1)


def _batched(x: Tensor) -> Tensor:
    """[B, H, runs, ..] as [B * runs, H, ..]."""
    return x.transpose(1, 2).flatten(0, 1)


def _of_batch(x: Tensor, q: Tensor) -> Tensor:
    """[B * runs, H, ..] as [B, H, runs, ..]."""
    return x.view(q.shape[0], -1, *x.shape[1:]).transpose(1, 2)


def _by_torch(q: Tensor, bias: Tensor | None, causal: bool, k: Tensor) -> bool:
    same = not causal or q.shape[2] == k.shape[2]
    return q.device.type == "cpu" and bias is None and same and q.dtype in (torch.float32, torch.float64)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _folded(grad: Tensor, x: Tensor) -> Tensor:
    groups = grad.shape[1] // x.shape[1]
    return grad if groups == 1 else grad.reshape(x.shape[0], x.shape[1], groups, *x.shape[2:]).sum(2)
