"""Attention, forward and backward, against torch's FlashAttention and cuDNN backends and compiled flex_attention.

TFLOP/s count the products of the attention matrix alone (4 * batch * heads * queries * keys * head size forward, 2.5 times
that backward), halved for causal attention. Grouped heads and ALiBi are also compared with our own plain kernel: "own plain".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernel_families.measure import TFLOPS, Bench, Row, Run, reason_of, times
from smpc.kernels.attention import flash_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
FLASH, CUDNN, FLEX, PLAIN = "SDPA flash", "SDPA cuDNN", "flex", "own plain"
PARTS = ("forward", "backward")


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    key_heads: int
    sequence: int
    head: int
    causal: bool
    alibi: bool = False

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        alibi = " alibi" if self.alibi else ""
        return f"b{self.batch} h{self.heads}/{self.key_heads} s{self.sequence} d{self.head} {mask}{alibi}"

    def plain(self) -> Shape:
        """The same without grouped heads and ALiBi."""
        return dataclasses.replace(self, key_heads=self.heads, alibi=False)

    def flops(self, part: str) -> float:
        forward = 4.0 * self.batch * self.heads * self.sequence**2 * self.head / (2 if self.causal else 1)
        return forward * (1.0 if part == "forward" else 2.5)

    def goals(self, part: str) -> dict[str, float]:
        """The least ratios to peers, of the reference."""
        found = {FLEX: 1.0} if self.causal or self.alibi else {}
        if self != self.plain():
            return {**found, PLAIN: 1 / 1.1}
        if self.head == 64:
            return {**found, CUDNN: 0.95} if part == "forward" else found
        if self.head == 128:
            return {**found, FLASH: 1.2, CUDNN: 0.8} if part == "forward" else {**found, FLASH: 1.1}
        return found


SHAPES = (
    Shape(4, 16, 16, 4096, 128, causal=True),
    Shape(4, 16, 16, 4096, 128, causal=False),
    Shape(1, 16, 16, 16384, 128, causal=True),
    Shape(4, 32, 32, 4096, 64, causal=True),
    Shape(4, 32, 32, 4096, 64, causal=False),
    Shape(4, 32, 8, 4096, 128, causal=True),
    Shape(4, 16, 16, 4096, 128, causal=True, alibi=True),
    Shape(2, 8, 8, 4096, 256, causal=True),
)
SMALL = (Shape(1, 2, 1, 16, 8, causal=True), Shape(1, 2, 2, 16, 8, causal=True, alibi=True))


def attention(bench: Bench) -> Iterator[Row]:
    """Every shape, forward and backward."""
    for shape in SMALL if bench.small else SHAPES:
        if bench.wants(f"attention {shape}"):
            yield from _rows(bench, shape)


def _rows(bench: Bench, shape: Shape) -> Iterator[Row]:
    ours = times(_ours(bench, shape), inputs(bench, shape), bench, PARTS)
    peers: dict[str, dict[str, float] | str] = {}
    for name, attend, peer_shape in _peers(bench, shape):
        try:
            peers[name] = times(attend(), inputs(bench, peer_shape), bench, PARTS)
        except Exception as error:  # whatever a library raises for a shape that it does not take
            peers[name] = reason_of(error)
    for part in PARTS:
        ratios = {name: found if isinstance(found, str) else found[part] / ours[part] for name, found in peers.items()}
        rate = shape.flops(part) / ours[part] / 1e9
        yield Row("attention", "attention", str(shape), part, ours[part], rate, TFLOPS, ratios, shape.goals(part))


def _peers(bench: Bench, shape: Shape) -> Iterator[tuple[str, Callable[[], Attention], Shape]]:
    if not shape.alibi:
        yield FLASH, functools.partial(_library, shape, SDPBackend.FLASH_ATTENTION), shape
        yield CUDNN, functools.partial(_library, shape, SDPBackend.CUDNN_ATTENTION), shape
    yield FLEX, functools.partial(_flex, bench, shape), shape
    if shape != shape.plain():
        yield PLAIN, functools.partial(_ours, bench, shape.plain()), shape.plain()


def inputs(bench: Bench, shape: Shape) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    heads = (shape.heads, shape.key_heads, shape.key_heads)
    return tuple(bench.leaf(shape.batch, count, shape.sequence, shape.head) for count in heads)


def _slopes(bench: Bench, heads: int) -> Tensor:
    return 2.0 ** -(torch.arange(1, heads + 1, device=bench.device) * 8 / heads)


def _ours(bench: Bench, shape: Shape) -> Attention:
    bias = None
    if shape.alibi:
        distance = torch.arange(1 - shape.sequence, 1, device=bench.device)
        bias = distance * _slopes(bench, shape.heads).view(1, -1, 1, 1)
    return lambda q, k, v: flash_attention(q, k, v, bias, causal=shape.causal)


def _library(shape: Shape, backend: SDPBackend) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.key_heads
            )

    return run


def _flex(bench: Bench, shape: Shape) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = bench.compiler(flex_attention)
    slope = _slopes(bench, shape.heads)
    block_mask = None
    if shape.causal:
        length = shape.sequence
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=bench.device)

    def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (j - shape.sequence + 1) * slope[h]

    score_mod = bias if shape.alibi else None
    grouped = shape.heads != shape.key_heads
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)


def tune(bench: Bench) -> Iterator[str]:
    """Times every candidate of the tables of block sizes for this card, a line for each."""
    for shape in SHAPES:
        if bench.wants(f"attention {shape}"):
            yield from _candidates(bench, shape)


def _candidates(bench: Bench, shape: Shape) -> Iterator[str]:
    from smpc.kernels.attention.backward_triton import KEY_VALUE_BLOCKS, QUERY_BLOCKS, launch_backward
    from smpc.kernels.attention.forward_triton import BLOCKS, launch_forward
    from smpc.kernels.attention.tiles_triton import Blocks, padded_head

    key = (90 if torch.cuda.get_device_capability() >= (9, 0) else 80, padded_head(shape.head))
    q, k, v = (tensor.detach() for tensor in inputs(bench, shape))
    fixed = (None, None, shape.head**-0.5, shape.causal, 0)
    out, lse = launch_forward(q, k, v, *fixed)
    arguments = (torch.randn_like(out), torch.zeros_like(lse), q, k, v, None, None, out, lse, *fixed[2:])

    def line(title: str, blocks: Blocks, run: Run) -> str:
        return f"{shape!s:36} {title:24} {blocks}  {bench.clock(run):.3f} ms"

    for blocks in BLOCKS[key]:
        yield line("forward", blocks, functools.partial(launch_forward, q, k, v, *fixed, blocks))
    for blocks in QUERY_BLOCKS[key]:
        yield line("backward, blocks of dq", blocks, functools.partial(launch_backward, *arguments, blocks, None))
    for blocks in KEY_VALUE_BLOCKS[key]:
        yield line("backward, of dk and dv", blocks, functools.partial(launch_backward, *arguments, None, blocks))
