"""The forward kernel of attention; the formula and its letters are in `smpc.kernels.attention.op`.

A program owns one tile of queries of one head and walks over the keys that it may see, keeping for each query the
running maximum m, the running sum l and the weighted values a (fp32). Exponentials are powers of two: log2(e) is part of the scale.
The walk has two loops, so that the bulk pays for no mask:

    keys ->     0                        full           stop
    queries     |  every key is visible   |  some are    |  none is
                   attend(MASKED=False)      attend(MASKED=True)

`full` and `stop` come from the end of the keys and, for causal attention, from the diagonal. Causal programs start with the
longest walk, so that the short ones fill the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smpc.kernels.attention.tiles_triton import (
    LENGTHS,
    LN_2,
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

BLOCKS: Table = {
    (0, 32): (Blocks(64, 32, 4, 2),),
    (0, 64): (Blocks(64, 32, 4, 2),),
    (0, 128): (Blocks(32, 32, 4, 2),),
    (0, 256): (Blocks(32, 16, 4, 2),),
    (80, 32): (Blocks(128, 64, 8, 3),),
    (80, 64): (Blocks(128, 64, 8, 3),),
    (80, 128): (Blocks(128, 32, 8, 3),),
    (80, 256): (Blocks(64, 32, 8, 2),),
    (90, 32): (Blocks(128, 64, 8, 3),),
    (90, 64): (Blocks(128, 64, 8, 3),),
    (90, 128): (Blocks(128, 64, 8, 3),),
    (90, 256): (Blocks(64, 32, 8, 2),),
}


@triton.jit
def biased(scores, scale, bias, shift):
    """Scores in powers of two. The sum with the bias is rounded as in eager attention, before the shift takes its size away."""
    return (scores * scale + bias - shift) * LOG2_E


@triton.jit
def attend(
    accumulated,
    largest,
    total,
    query,
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
    """Takes the keys from `start` to `stop` into (a, m, l) of one tile of queries."""
    within = tl.arange(0, BLOCK_N)
    key_pointers += start.to(tl.int64) * k_row
    value_pointers += start.to(tl.int64) * v_row
    for first in range(start, stop, BLOCK_N):
        keys = first + within
        key = load_tile(key_pointers, keys, num_keys, columns, HEAD, BLOCK_D, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if HAS_BIAS:
            if MASKED:
                bias = tl.load(bias_pointers + keys, mask=keys < num_keys, other=0.0)
            else:
                bias = tl.load(bias_pointers + keys)
            scores = biased(scores, scale, bias[None, :], shift[:, None])
        if MASKED:
            visible = keys[None, :] < num_keys
            if CAUSAL:
                visible = visible & (keys[None, :] <= rows[:, None] + causal_offset)
            scores = tl.where(visible, scores, float("-inf"))
        if HAS_BIAS:
            new_largest = tl.maximum(largest, tl.max(scores, 1))
        else:
            new_largest = tl.maximum(largest, tl.max(scores, 1) * log2_scale)
        subtracted = new_largest
        if MASKED or HAS_BIAS:  # a query that has seen no key yet has the maximum -inf, and inf - inf is not a number
            subtracted = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        if HAS_BIAS:
            weights = tl.exp2(scores - subtracted[:, None])
        else:
            weights = tl.exp2(scores * log2_scale - subtracted[:, None])
        kept = tl.exp2(largest - subtracted)
        total = total * kept + tl.sum(weights, 1)
        value = load_tile(value_pointers, keys, num_keys, columns, HEAD, BLOCK_D, MASKED)
        accumulated = tl.dot(weights.to(value.dtype), value, accumulated * kept[:, None], input_precision="ieee")
        largest = new_largest
        key_pointers += BLOCK_N * k_row
        value_pointers += BLOCK_N * v_row
    return accumulated, largest, total


@triton.jit(do_not_specialize=LENGTHS)
def attention_forward_kernel(
    q,
    k,
    v,
    bias,
    shift,
    out,
    lse,
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
    out_batch,
    out_head,
    out_row,
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
    """One tile of queries of one head."""
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
    columns = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)

    query_pointers = q + batch * q_batch + head * q_head + first.to(tl.int64) * q_row
    query_pointers += within[:, None] * q_row + columns[None, :]
    key_pointers = k + batch * k_batch + head // group * k_head + keys[:, None] * k_row + columns[None, :]
    value_pointers = v + batch * v_batch + head // group * v_head + keys[:, None] * v_row + columns[None, :]
    bias_pointers = bias
    subtracted = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_BIAS:
        bias_pointers += batch * bias_batch + head * bias_head
        at = shift + (batch * num_heads + head) * num_queries + rows
        subtracted = tl.load(at, mask=rows < num_queries, other=0.0)

    stop = num_keys
    full = num_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        stop = tl.minimum(stop, tl.maximum(first + BLOCK_M + causal_offset, 0))
        full = tl.minimum(full, tl.maximum(first + 1 + causal_offset, 0) // BLOCK_N * BLOCK_N)

    query = load_tile(query_pointers, rows, num_queries, columns, HEAD, BLOCK_D, True)
    accumulated = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    accumulated, largest, total = attend(
        accumulated, largest, total, query, key_pointers, value_pointers, bias_pointers, subtracted, k_row, v_row,
        full * 0, full, rows, columns, scale, log2_scale, num_keys, causal_offset,
        CAUSAL, HAS_BIAS, False, HEAD, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    accumulated, largest, total = attend(
        accumulated, largest, total, query, key_pointers, value_pointers, bias_pointers, subtracted, k_row, v_row,
        full, stop, rows, columns, scale, log2_scale, num_keys, causal_offset,
        CAUSAL, HAS_BIAS, True, HEAD, BLOCK_D, BLOCK_N,
    )  # fmt: skip

    seen = total > 0.0  # a query that sees no key has the result 0 and the logarithm -inf
    accumulated = accumulated / tl.where(seen, total, 1.0)[:, None]
    logarithm = tl.where(seen, (largest + tl.log2(tl.where(seen, total, 1.0))) * LN_2, float("-inf"))
    tl.store(lse + (batch * num_heads + head) * num_queries + rows, logarithm, mask=rows < num_queries)
    out_pointers = out + batch * out_batch + head * out_head + first.to(tl.int64) * out_row
    out_pointers += within[:, None] * out_row + columns[None, :]
    store_tile(out_pointers, accumulated, rows, num_queries, columns, HEAD)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    shift: Tensor | None,
    scale: float,
    causal: bool,
    causal_offset: int,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor]:
    """The result, and lse `[batch, heads, queries]` in fp32."""
    q, k, v = as_rows(q), as_rows(k), as_rows(v)
    batch, num_heads, num_queries, head = q.shape
    out = empty_heads(q)
    lse = q.new_empty((batch, num_heads, num_queries), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    blocks = blocks or choose(BLOCKS, q)
    grid = (triton.cdiv(num_queries, blocks.queries) * batch * num_heads,)
    with launching_on(q.device):
        attention_forward_kernel[grid](
            q, k, v, bias, shift, out, lse, scale, scale * LOG2_E.value,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *bias_strides(bias), *out.stride()[:3],
            num_heads, num_heads // k.shape[1], num_queries, k.shape[2], causal_offset,
            CAUSAL=causal, HAS_BIAS=bias is not None, HEAD=head, BLOCK_D=padded_head(head),
            BLOCK_M=blocks.queries, BLOCK_N=blocks.keys,
            num_warps=blocks.warps, num_stages=blocks.stages, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return out, lse


def bias_strides(bias: Tensor | None) -> tuple[int, int]:
    """Steps from batch to batch and from head to head of a bias `[batch or 1, heads or 1, 1, keys]`."""
    if bias is None:
        return 0, 0
    return (bias.stride(0) if bias.shape[0] > 1 else 0), (bias.stride(1) if bias.shape[1] > 1 else 0)
