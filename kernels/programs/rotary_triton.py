"""The kernel of rotary position embedding; the formula is in `smpc.kernels.rotary`.

A program holds ROWS rows, a row being the features of one head at one position. The tables are read once for each head, from the
cache. Interleaved pairs are read side by side and taken apart in registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from smpc.kernels.launch.backend import LAUNCH_OPTIONS, launching_on, warps_for
from smpc.kernels.launch.variants import KernelVariant, variant

_TILE = 4096  # features of a program


@triton.jit
def rotary_kernel(
    x,
    cos,
    sin,
    out,
    rows,
    heads,
    positions,
    half,
    features,
    x_batch,
    x_head,
    x_position,
    out_batch,
    out_head,
    out_position,
    table_batch,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """The rotation of ROWS rows; HALF >= half and REST >= what passes are powers of two, REST 0 for nothing."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    position = row % positions
    head = row // positions % heads
    batch = row // positions // heads
    x += (batch * x_batch + head * x_head + position * x_position)[:, None]
    out += (batch * out_batch + head * out_head + position * out_position)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    live = (row < rows)[:, None]
    valid = live & (pair < half)
    at = (batch * table_batch + position * half)[:, None] + pair
    c = tl.load(cos + at, mask=valid, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=valid, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = live & (column < 2 * half)
        pairs = tl.load(x + column, mask=both, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (ROWS, HALF, 2)))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (ROWS, 2 * HALF))
        tl.store(out + column, turned.to(out.dtype.element_ty), mask=both)
    else:
        a = tl.load(x + pair, mask=valid, other=0.0).to(tl.float32)
        b = tl.load(x + half + pair, mask=valid, other=0.0).to(tl.float32)
        tl.store(out + pair, (a * c - b * s).to(out.dtype.element_ty), mask=valid)
        tl.store(out + half + pair, (b * c + a * s).to(out.dtype.element_ty), mask=valid)
    if REST:
        column = 2 * half + tl.arange(0, REST)[None, :]
        passing = live & (column < features)
        tl.store(out + column, tl.load(x + column, mask=passing), mask=passing)


def launch_rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, interleaved: bool, inverse: bool) -> None:
    """Rotates x [batch, heads, positions, features] into `out` of that shape, each with strides of its own."""
    if x.numel() == 0:
        return
    if x.stride(-1) != 1:
        x = x.contiguous()
    target = out if out.stride(-1) == 1 else out.new_empty(out.shape)
    batch, heads, positions, features = x.shape
    half = cos.shape[-1]
    block = triton.next_power_of_2(half)
    rest = features - 2 * half
    tile = max(1, _TILE // (2 * block))
    rows = batch * heads * positions
    with launching_on(x.device):
        rotary_kernel[(triton.cdiv(rows, tile),)](
            x,
            cos.contiguous(),
            sin.contiguous(),
            target,
            rows,
            heads,
            positions,
            half,
            features,
            *x.stride()[:3],
            *target.stride()[:3],
            positions * half if cos.dim() == 3 else 0,
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            ROWS=tile,
            HALF=block,
            REST=triton.next_power_of_2(rest) if rest else 0,
            num_warps=warps_for(2 * block * tile),
            **LAUNCH_OPTIONS,
        )
    if target is not out:
        out.copy_(target)


def _variant(kind: str, interleaved: bool, half: int, rest: int) -> KernelVariant:
    strides = ("x_batch", "x_head", "x_position", "out_batch", "out_head", "out_position")
    return variant(
        f"rotary {'interleaved' if interleaved else 'half-rotated'} {kind} d{2 * half + rest} r{2 * half}",
        rotary_kernel,
        {
            **dict.fromkeys(("x", "out"), f"*{kind}:16"),
            **dict.fromkeys(("cos", "sin"), "*fp32:16"),
            **dict.fromkeys(("rows", "heads", "positions", "half", "features", *strides, "table_batch"), "i32:16"),
        },
        {
            "INTERLEAVED": interleaved,
            "INVERSE": True,
            "ROWS": _TILE // (2 * half),
            "HALF": half,
            "REST": rest,
        },
        num_warps=warps_for(_TILE),
    )


VARIANTS = tuple(
    _variant(kind, interleaved, half, rest)
    for kind in ("bf16", "fp16", "fp32")
    for interleaved in (False, True)
    for half, rest in ((64, 0), (16, 32))
)
