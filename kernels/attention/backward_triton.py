"""The backward kernels of attention; the formula and its letters are in `smpc.kernels.attention.op`.

    attention_delta_kernel       delta = sum over the head of (do * o), less the gradient of lse     a number a query
    attention_query_kernel       dq: one tile of queries walks over the keys that it sees
    attention_key_value_kernel   dk, dv: one tile of keys walks over the queries that see it, for every query head that
                                 shares it, so that grouped queries need neither copies of keys nor atomic additions

Weights are computed again from lse: p = exp2(scale * q k + bias - shift - lse), everything in powers of two. As in the forward
kernel, only tiles on the edge of the visible area apply a mask:

    queries ->  0           first           full                     the end
    keys        |  none sees |  some see     |  every query sees all keys
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from smpc.kernels.attention.forward_triton import bias_strides, biased
from smpc.kernels.attention.tiles_triton import (
    LENGTHS,
    LOG2_E,
    Blocks,
    Table,
    as_rows,
    choose,
    empty_heads,
    load_tile,
    padded_head,
    store_tile,
)
from smpc.kernels.launch.backend import LAUNCH_OPTIONS, launching_on

QUERY_BLOCKS: Table = {
    (0, 32): (Blocks(64, 32, 4, 2),),
    (0, 64): (Blocks(64, 32, 4, 2),),
    (0, 128): (Blocks(32, 32, 4, 2),),
    (0, 256): (Blocks(16, 16, 4, 1),),
    (80, 32): (Blocks(128, 64, 8, 2),),
    (80, 64): (Blocks(128, 64, 8, 2),),
    (80, 128): (Blocks(64, 64, 8, 2),),
    (80, 256): (Blocks(64, 32, 8, 2),),
    (90, 32): (Blocks(128, 64, 8, 2),),
    (90, 64): (Blocks(128, 64, 8, 3),),
    (90, 128): (Blocks(128, 64, 8, 2),),
    (90, 256): (Blocks(64, 16, 8, 2),),
}

KEY_VALUE_BLOCKS: Table = {
    (0, 32): (Blocks(32, 64, 4, 2),),
    (0, 64): (Blocks(32, 64, 4, 2),),
    (0, 128): (Blocks(32, 32, 4, 2),),
    (0, 256): (Blocks(16, 16, 4, 1),),
    (80, 32): (Blocks(32, 64, 8, 2),),
    (80, 64): (Blocks(32, 64, 8, 2),),
    (80, 128): (Blocks(32, 64, 8, 2),),
    (80, 256): (Blocks(32, 32, 8, 1),),
    (90, 32): (Blocks(64, 64, 8, 2),),
    (90, 64): (Blocks(64, 64, 8, 2),),
    (90, 128): (Blocks(32, 32, 8, 1),),
    (90, 256): (Blocks(32, 32, 8, 1),),
}

# With a bias, whose shift takes registers, where the blocks above would not keep them all.
BIASED_KEY_VALUE_BLOCKS: Table = {
    **KEY_VALUE_BLOCKS,
    (80, 128): (Blocks(32, 32, 8, 2),),
    (90, 64): (Blocks(32, 64, 8, 2),),
}


@triton.jit(do_not_specialize=["num_queries"])
def attention_delta_kernel(
    out,
    grad,
    grad_lse,
    delta,
    out_batch,
    out_head,
    out_row,
    grad_batch,
    grad_head,
    grad_row,
    num_heads,
    num_queries,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta of one tile of queries."""
    tiles = tl.cdiv(num_queries, BLOCK_M)
    program = tl.program_id(0)
    batch = (program // tiles // num_heads).to(tl.int64)
    head = (program // tiles % num_heads).to(tl.int64)
    first = program % tiles * BLOCK_M
    within = tl.arange(0, BLOCK_M)
    rows = first + within
    columns = tl.arange(0, BLOCK_D)
    start = first.to(tl.int64)
    out_pointers = out + batch * out_batch + head * out_head + start * out_row
    grad_pointers = grad + batch * grad_batch + head * grad_head + start * grad_row
    out_pointers += within[:, None] * out_row + columns[None, :]
    grad_pointers += within[:, None] * grad_row + columns[None, :]
    result = load_tile(out_pointers, rows, num_queries, columns, HEAD, BLOCK_D, True).to(tl.float32)
    incoming = load_tile(grad_pointers, rows, num_queries, columns, HEAD, BLOCK_D, True).to(tl.float32)
    at = (batch * num_heads + head) * num_queries + rows
    valid = rows < num_queries
    change = tl.sum(result * incoming, 1) - tl.load(grad_lse + at, mask=valid, other=0.0)
    tl.store(delta + at, change, mask=valid)


@triton.jit
def attend_backward_query(
    dq,
    query,
    grad,
    lse,
    delta,
    key_pointers,
    value_pointers,
    bias_pointers,
    shift,
    k_row,
    v_row,
    start,
    stop,
    rows,
    columns,
    scale,
    log2_scale,
    num_keys,
    causal_offset,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the keys from `start` to `stop` to dq of one tile of queries."""
    within = tl.arange(0, BLOCK_N)
    key_pointers += start.to(tl.int64) * k_row
    value_pointers += start.to(tl.int64) * v_row
    for first in range(start, stop, BLOCK_N):
        keys = first + within
        key = load_tile(key_pointers, keys, num_keys, columns, HEAD, BLOCK_D, MASKED)
        value = load_tile(value_pointers, keys, num_keys, columns, HEAD, BLOCK_D, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if HAS_BIAS:
            if MASKED:
                bias = tl.load(bias_pointers + keys, mask=keys < num_keys, other=0.0)
            else:
                bias = tl.load(bias_pointers + keys)
            scores = biased(scores, scale, bias[None, :], shift[:, None])
        else:
            scores = scores * log2_scale
        if MASKED:
            visible = keys[None, :] < num_keys
            if CAUSAL:
                visible = visible & (keys[None, :] <= rows[:, None] + causal_offset)
            scores = tl.where(visible, scores, float("-inf"))
        weights = tl.exp2(scores - lse[:, None])
        grad_weights = tl.dot(grad, tl.trans(value), input_precision="ieee")
        grad_scores = weights * (grad_weights - delta[:, None])
        dq = tl.dot(grad_scores.to(key.dtype), key, dq, input_precision="ieee")
        key_pointers += BLOCK_N * k_row
        value_pointers += BLOCK_N * v_row
    return dq


@triton.jit(do_not_specialize=LENGTHS)
def attention_query_kernel(
    q,
    k,
    v,
    bias,
    shift,
    grad,
    lse,
    delta,
    dq,
    scale,
    log2_scale,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    bias_batch,
    bias_head,
    grad_batch,
    grad_head,
    grad_row,
    dq_batch,
    dq_head,
    dq_row,
    num_heads,
    group,
    num_queries,
    num_keys,
    causal_offset,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq of one tile of queries of one head."""
    tiles = tl.cdiv(num_queries, BLOCK_M)
    program = tl.program_id(0)
    tile = program % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    batch = (program // tiles // num_heads).to(tl.int64)
    head = (program // tiles % num_heads).to(tl.int64)
    first = tile * BLOCK_M
    within = tl.arange(0, BLOCK_M)
    rows = first + within
    start = first.to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    query_pointers = q + batch * q_batch + head * q_head + start * q_row + within[:, None] * q_row + columns[None, :]
    grad_pointers = grad + batch * grad_batch + head * grad_head + start * grad_row
    grad_pointers += within[:, None] * grad_row + columns[None, :]
    key_pointers = k + batch * k_batch + head // group * k_head + keys[:, None] * k_row + columns[None, :]
    value_pointers = v + batch * v_batch + head // group * v_head + keys[:, None] * v_row + columns[None, :]
    bias_pointers = bias
    at = (batch * num_heads + head) * num_queries + rows
    subtracted = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_BIAS:
        bias_pointers += batch * bias_batch + head * bias_head
        subtracted = tl.load(shift + at, mask=rows < num_queries, other=0.0)

    stop = num_keys
    full = num_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        stop = tl.minimum(stop, tl.maximum(first + BLOCK_M + causal_offset, 0))
        full = tl.minimum(full, tl.maximum(first + 1 + causal_offset, 0) // BLOCK_N * BLOCK_N)
    query = load_tile(query_pointers, rows, num_queries, columns, HEAD, BLOCK_D, True)
    incoming = load_tile(grad_pointers, rows, num_queries, columns, HEAD, BLOCK_D, True)
    logarithm = load_log2(lse, at, rows < num_queries)
    change = tl.load(delta + at, mask=rows < num_queries, other=0.0)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = attend_backward_query(
        total, query, incoming, logarithm, change, key_pointers, value_pointers, bias_pointers, subtracted,
        k_row, v_row,
        full * 0, full, rows, columns, scale, log2_scale, num_keys, causal_offset,
        CAUSAL, HAS_BIAS, False, HEAD, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    total = attend_backward_query(
        total, query, incoming, logarithm, change, key_pointers, value_pointers, bias_pointers, subtracted,
        k_row, v_row,
        full, stop, rows, columns, scale, log2_scale, num_keys, causal_offset,
        CAUSAL, HAS_BIAS, True, HEAD, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    dq_pointers = dq + batch * dq_batch + head * dq_head + start * dq_row
    dq_pointers += within[:, None] * dq_row + columns[None, :]
    store_tile(dq_pointers, total * scale, rows, num_queries, columns, HEAD)


@triton.jit
def load_log2(lse, at, valid):
    """lse in powers of two; +inf for a query that sees nothing, so that exp2(score - lse) is 0 and not inf - inf."""
    logarithm = tl.load(lse + at, mask=valid, other=float("inf")) * LOG2_E
    return tl.where(logarithm == float("-inf"), float("inf"), logarithm)


@triton.jit
def attend_backward_key_value(
    dk,
    dv,
    key,
    value,
    bias,
    shift,
    query_pointers,
    grad_pointers,
    lse,
    delta,
    q_row,
    grad_row,
    start,
    stop,
    keys,
    columns,
    scale,
    log2_scale,
    num_queries,
    causal_offset,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Adds the queries from `start` to `stop` of one head to dk and dv of one tile of keys; scores are laid out keys by queries."""
    within = tl.arange(0, BLOCK_M)
    query_pointers += start.to(tl.int64) * q_row
    grad_pointers += start.to(tl.int64) * grad_row
    for first in range(start, stop, BLOCK_M):
        rows = first + within
        query = load_tile(query_pointers, rows, num_queries, columns, HEAD, BLOCK_D, not EVEN)
        grad = load_tile(grad_pointers, rows, num_queries, columns, HEAD, BLOCK_D, not EVEN)
        logarithm = load_log2(lse, rows, rows < num_queries)
        change = tl.load(delta + rows, mask=rows < num_queries, other=0.0)
        scores = tl.dot(key, tl.trans(query), input_precision="ieee")
        if HAS_BIAS:
            subtracted = tl.load(shift + rows, mask=rows < num_queries, other=0.0)
            scores = biased(scores, scale, bias[:, None], subtracted[None, :])
        else:
            scores = scores * log2_scale
        if MASKED:
            scores = tl.where(keys[:, None] <= rows[None, :] + causal_offset, scores, float("-inf"))
        weights = tl.exp2(scores - logarithm[None, :])
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        grad_weights = tl.dot(value, tl.trans(grad), input_precision="ieee")
        grad_scores = weights * (grad_weights - change[None, :])
        dk = tl.dot(grad_scores.to(query.dtype), query, dk, input_precision="ieee")
        query_pointers += BLOCK_M * q_row
        grad_pointers += BLOCK_M * grad_row
    return dk, dv


@triton.jit(do_not_specialize=LENGTHS)
def attention_key_value_kernel(
    q,
    k,
    v,
    bias,
    shift,
    grad,
    lse,
    delta,
    dk,
    dv,
    scale,
    log2_scale,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    bias_batch,
    bias_head,
    grad_batch,
    grad_head,
    grad_row,
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    num_heads,
    group,
    num_queries,
    num_keys,
    causal_offset,
    CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dk and dv of one tile of keys of one key head; EVEN says that queries fill their tiles."""
    tiles = tl.cdiv(num_keys, BLOCK_N)
    program = tl.program_id(0)
    num_key_heads = num_heads // group
    batch = (program // tiles // num_key_heads).to(tl.int64)
    key_head = (program // tiles % num_key_heads).to(tl.int64)
    first = program % tiles * BLOCK_N
    start = first.to(tl.int64)
    within = tl.arange(0, BLOCK_N)
    keys = first + within
    columns = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    key_pointers = k + batch * k_batch + key_head * k_head + start * k_row + within[:, None] * k_row + columns[None, :]
    value_pointers = v + batch * v_batch + key_head * v_head + start * v_row
    value_pointers += within[:, None] * v_row + columns[None, :]
    key = load_tile(key_pointers, keys, num_keys, columns, HEAD, BLOCK_D, True)
    value = load_tile(value_pointers, keys, num_keys, columns, HEAD, BLOCK_D, True)

    seen_from = first * 0
    full = first * 0
    if CAUSAL:
        seen_from = tl.maximum(first - causal_offset, 0) // BLOCK_M * BLOCK_M
        full = tl.cdiv(tl.maximum(first + BLOCK_N - 1 - causal_offset, 0), BLOCK_M) * BLOCK_M
    grad_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    grad_value = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(group):
        head = key_head * group + member
        query_pointers = q + batch * q_batch + head * q_head + rows[:, None] * q_row + columns[None, :]
        grad_pointers = grad + batch * grad_batch + head * grad_head + rows[:, None] * grad_row + columns[None, :]
        lse_pointers = lse + (batch * num_heads + head) * num_queries
        delta_pointers = delta + (batch * num_heads + head) * num_queries
        added = grad_key
        shift_pointers = lse_pointers
        if HAS_BIAS:
            at = bias + batch * bias_batch + head * bias_head + keys
            added = tl.load(at, mask=keys < num_keys, other=float("-inf"))
            shift_pointers = shift + (batch * num_heads + head) * num_queries
        if CAUSAL:
            grad_key, grad_value = attend_backward_key_value(
                grad_key, grad_value, key, value, added, shift_pointers, query_pointers, grad_pointers, lse_pointers, delta_pointers,
                q_row, grad_row, seen_from, tl.minimum(full, num_queries), keys, columns, scale, log2_scale, num_queries,
                causal_offset, True, HAS_BIAS, EVEN, HEAD, BLOCK_D, BLOCK_M,
            )  # fmt: skip
        grad_key, grad_value = attend_backward_key_value(
            grad_key, grad_value, key, value, added, shift_pointers, query_pointers, grad_pointers, lse_pointers, delta_pointers,
            q_row, grad_row, full, num_queries, keys, columns, scale, log2_scale, num_queries,
            causal_offset, False, HAS_BIAS, EVEN, HEAD, BLOCK_D, BLOCK_M,
        )  # fmt: skip
    dk_pointers = dk + batch * dk_batch + key_head * dk_head + start * dk_row
    dv_pointers = dv + batch * dv_batch + key_head * dv_head + start * dv_row
    dk_pointers += within[:, None] * dk_row + columns[None, :]
    dv_pointers += within[:, None] * dv_row + columns[None, :]
    store_tile(dk_pointers, grad_key * scale, keys, num_keys, columns, HEAD)
    store_tile(dv_pointers, grad_value, keys, num_keys, columns, HEAD)


def launch_backward(
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
    query_blocks: Blocks | None = None,
    key_value_blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    q, k, v, grad, out = as_rows(q), as_rows(k), as_rows(v), as_rows(grad), as_rows(out)
    dq, dk, dv = empty_heads(q), empty_heads(k), empty_heads(v)
    if k.numel() == 0:
        return dq.zero_(), dk, dv
    query_blocks = query_blocks or choose(QUERY_BLOCKS, q)
    key_value_blocks = key_value_blocks or choose(KEY_VALUE_BLOCKS if bias is None else BIASED_KEY_VALUE_BLOCKS, q)
    batch, num_heads, num_queries, head = q.shape
    num_key_heads, num_keys = k.shape[1:3]
    delta = lse.new_empty(lse.shape)
    inputs = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *bias_strides(bias), *grad.stride()[:3])
    sizes = (num_heads, num_heads // num_key_heads, num_queries, num_keys, causal_offset)
    shape = {"HEAD": head, "BLOCK_D": padded_head(head)}
    with launching_on(q.device):
        if num_queries > 0:
            attention_delta_kernel[(triton.cdiv(num_queries, 32) * batch * num_heads,)](
                out, grad, grad_lse.contiguous(), delta, *out.stride()[:3], *grad.stride()[:3], num_heads, num_queries,
                BLOCK_M=32, num_warps=4, **shape, **LAUNCH_OPTIONS,
            )  # fmt: skip
            attention_query_kernel[(triton.cdiv(num_queries, query_blocks.queries) * batch * num_heads,)](
                q, k, v, bias, shift, grad, lse, delta, dq, scale, scale * LOG2_E.value, *inputs, *dq.stride()[:3], *sizes,
                CAUSAL=causal, HAS_BIAS=bias is not None, **shape,
                BLOCK_M=query_blocks.queries, BLOCK_N=query_blocks.keys,
                num_warps=query_blocks.warps, num_stages=query_blocks.stages, **LAUNCH_OPTIONS,
            )  # fmt: skip
        attention_key_value_kernel[(triton.cdiv(num_keys, key_value_blocks.keys) * batch * num_key_heads,)](
            q, k, v, bias, shift, grad, lse, delta, dk, dv, scale, scale * LOG2_E.value,
            *inputs, *dk.stride()[:3], *dv.stride()[:3], *sizes,
            CAUSAL=causal, HAS_BIAS=bias is not None, EVEN=num_queries % key_value_blocks.queries == 0, **shape,
            BLOCK_M=key_value_blocks.queries, BLOCK_N=key_value_blocks.keys,
            num_warps=key_value_blocks.warps, num_stages=key_value_blocks.stages, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return dq, dk, dv
