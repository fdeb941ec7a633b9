"""Common functions of the attention kernels: tile loads, and the choice of block sizes.

A tile is `[rows, head size]`. Head sizes are padded to a power of two, 32 at least.

`Blocks` says how a kernel cuts its work: tiles of `queries` by `keys` scores, `warps` warps a program, loads `stages`
ahead. A table holds candidates by padded head size, the best first. The first is what runs, always: another block size
adds in another order, and a kernel that tuned itself would not repeat its results from run to run. To choose
anew for a card, `benchmarks/kernels.py --tune` times every candidate; the compile gate compiles every one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

# Lengths change from call to call: nothing is compiled anew when one is 1, or a multiple of 16.
LENGTHS = ("num_queries", "num_keys")

# Consumer cards from Ampere on give a program this much shared memory; data centre cards give 160 KiB and more.
SMALL_SHARED_MEMORY = 99 * 1024
LARGE_SHARED_MEMORY = 160 * 1024


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a kernel cuts its work; see the module's docstring."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kind of card and padded head size. Kinds: 80 (A100), 90 (Hopper and later), 0 (little shared memory).
Table = Mapping[tuple[int, int], tuple[Blocks, ...]]


@triton.jit
def load_tile(pointers, rows, num_rows, columns, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, MASK_ROWS: tl.constexpr):
    """A `[rows, head size]` tile, zero where it reaches beyond the tensor."""
    if MASK_ROWS:
        if HEAD == BLOCK_D:
            tile = tl.load(pointers, mask=rows[:, None] < num_rows, other=0.0)
        else:
            tile = tl.load(pointers, mask=(rows[:, None] < num_rows) & (columns[None, :] < HEAD), other=0.0)
    else:
        if HEAD == BLOCK_D:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=columns[None, :] < HEAD, other=0.0)
    return tile


@triton.jit
def store_tile(pointers, tile, rows, num_rows, columns, HEAD: tl.constexpr):
    """Writes the part of a tile that is inside the tensor."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < HEAD)
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=inside)


def padded_head(head: int) -> int:
    """The head size that tiles have."""
    return 1 << max(5, (head - 1).bit_length())


def choose(table: Table, x: torch.Tensor) -> Blocks:
    """The block sizes for the head size of `x`, on the card that `x` is on."""
    head = padded_head(x.shape[-1])
    if x.device.type != "cuda":
        return Blocks(16, 16, 4, 1)  # the interpreter: small tiles, so that small tensors have several
    device = x.device.index if x.device.index is not None else torch.cuda.current_device()
    shared = triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]
    if shared < LARGE_SHARED_MEMORY:
        return table[0, head][0]
    return table[90 if torch.cuda.get_device_capability(device) >= (9, 0) else 80, head][0]


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with a contiguous last dimension, as the kernels need it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_heads(like: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, sequence, head size]` in the order batch, sequence, heads: what merges the heads next needs no copy."""
    batch, heads, sequence, head = like.shape
    return like.new_empty((batch, sequence, heads, head)).transpose(1, 2)
