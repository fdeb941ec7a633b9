"""Every way the attention kernels are compiled, for the compile gate.

Each candidate of each table with causal attention and with a bias; the first candidate, which is what runs, also without a mask, and in
fp16 with a head size that is not a power of two. Table 0 is for cards with little shared memory; their
code is A100's, so it compiles for that target, within their limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smpc.kernels.attention.backward_triton import (
    BIASED_KEY_VALUE_BLOCKS,
    KEY_VALUE_BLOCKS,
    QUERY_BLOCKS,
    attention_delta_kernel,
    attention_key_value_kernel,
    attention_query_kernel,
)
from smpc.kernels.attention.forward_triton import BLOCKS, attention_forward_kernel
from smpc.kernels.attention.tiles_triton import LENGTHS, SMALL_SHARED_MEMORY, Blocks, Table
from smpc.kernels.launch.variants import TARGETS, KernelVariant, variant

# The tensors that a kernel reads and writes in the type of q; the others are fp32.
_FORWARD = (attention_forward_kernel, BLOCKS, "attention forward", ("q", "k", "v", "out"), ("lse",))
_QUERY = (attention_query_kernel, QUERY_BLOCKS, "attention dq", ("q", "k", "v", "grad", "dq"), ("lse", "delta"))
_KEY_VALUE = (
    attention_key_value_kernel, KEY_VALUE_BLOCKS, "attention dk dv", ("q", "k", "v", "grad", "dk", "dv"), ("lse", "delta"),
)  # fmt: skip
_KERNELS: tuple[tuple[Any, Table, str, tuple[str, ...], tuple[str, ...]], ...] = (_FORWARD, _QUERY, _KEY_VALUE)
# Targets of the tables' kinds of cards.
_TARGETS = {0: (80,), 80: (80,), 90: tuple(target for target in TARGETS if target >= 90)}


def _signature(kernel: Any, tensors: tuple[str, ...], others: tuple[str, ...], kind: str, bias: bool) -> dict[str, str]:
    types = dict.fromkeys(tensors, f"*{kind}:16") | dict.fromkeys(others, "*fp32:16")
    types |= {"scale": "fp32", "log2_scale": "fp32", "num_heads": "i32", "causal_offset": "i32"}
    types |= {"group": "i32" if bias else "i32:1"} | dict.fromkeys(LENGTHS, "i32")
    if bias:
        types |= {"bias": "*fp32:16", "shift": "*fp32:16"}
    arguments = [name for name in kernel.arg_names if not name.isupper() and (bias or name not in ("bias", "shift"))]
    return {name: types.get(name, "i32:16") for name in arguments}  # strides are multiples of 16


def _compiled(
    entry: tuple[Any, Table, str, tuple[str, ...], tuple[str, ...]],
    kind: str,
    head: int,
    padded: int,
    blocks: Blocks,
    mask: str,
    card: int,
) -> KernelVariant:
    kernel, _, title, tensors, others = entry
    constants: dict[str, object] = {
        "CAUSAL": mask != "full",
        "HAS_BIAS": mask == "alibi",
        "HEAD": head,
        "BLOCK_D": padded,
        "BLOCK_M": blocks.queries,
        "BLOCK_N": blocks.keys,
    }
    if "EVEN" in kernel.arg_names:
        constants["EVEN"] = mask != "alibi"
    if mask != "alibi":
        constants |= {"bias": None, "shift": None}
    size = f"table {card} {blocks.queries}x{blocks.keys} w{blocks.warps} s{blocks.stages}"
    return variant(
        f"{title} {kind} d{head} {mask} {size}",
        kernel,
        _signature(kernel, tensors, others, kind, mask == "alibi"),
        constants,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        targets=_TARGETS[card],
        shared_limit=SMALL_SHARED_MEMORY if card == 0 else None,
    )


def _table_variants(entry: tuple[Any, Table, str, tuple[str, ...], tuple[str, ...]]) -> Iterator[KernelVariant]:
    for (card, padded), candidates in entry[1].items():
        for blocks in candidates:
            yield _compiled(entry, "bf16", padded, padded, blocks, "causal", card)
        biased = BIASED_KEY_VALUE_BLOCKS[card, padded] if entry is _KEY_VALUE else candidates
        for blocks in biased:
            yield _compiled(entry, "bf16", padded, padded, blocks, "alibi", card)
        first = candidates[0]
        yield _compiled(entry, "bf16", padded, padded, first, "full", card)
        yield _compiled(entry, "fp16", padded // 4 * 3, padded, first, "causal", card)


def _delta_variants() -> Iterator[KernelVariant]:
    for head in (32, 64, 128, 256):
        signature = _signature(attention_delta_kernel, ("out", "grad"), ("grad_lse", "delta"), "bf16", bias=False)
        constants = {"HEAD": head, "BLOCK_D": head, "BLOCK_M": 32}
        yield variant(f"attention delta bf16 d{head}", attention_delta_kernel, signature, constants, num_stages=3)


VARIANTS: tuple[KernelVariant, ...] = (
    *(variant for entry in _KERNELS for variant in _table_variants(entry)),
    *_delta_variants(),
)
