"""Kernels against the libraries' on one GPU: ratios of times taken in the same process.

    python benchmarks/kernels.py                 attention: forward and backward, against SDPA and flex_attention
    python benchmarks/kernels.py --tune          every candidate of the tables of block sizes, to choose them anew

TFLOP/s count the products of the attention matrix alone (4 * batch * heads * queries * keys * head size forward, 2.5 times
that backward), halved for causal attention. A peer that cannot run a shape is left out, and the reason printed. Without a CUDA
device there is nothing to measure: the program says so and ends.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from smpc.kernels.attention import flash_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


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

    def flops(self) -> float:
        return 4.0 * self.batch * self.heads * self.sequence**2 * self.head / (2 if self.causal else 1)


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


def slopes(heads: int) -> Tensor:
    return 2.0 ** -(torch.arange(1, heads + 1, device="cuda") * 8 / heads)


def ours(shape: Shape) -> Attention:
    bias = None
    if shape.alibi:
        bias = torch.arange(1 - shape.sequence, 1, device="cuda") * slopes(shape.heads).view(1, -1, 1, 1)
    return lambda q, k, v: flash_attention(q, k, v, bias, causal=shape.causal)


def library(shape: Shape, backend: SDPBackend) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.key_heads
            )

    return run


def flex(shape: Shape) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    slope = slopes(shape.heads)
    block_mask = None
    if shape.causal:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, shape.sequence, shape.sequence)

    def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (j - shape.sequence + 1) * slope[h]

    score_mod = bias if shape.alibi else None
    grouped = shape.heads != shape.key_heads
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)


def peers(shape: Shape) -> Iterator[tuple[str, Attention]]:
    if not shape.alibi:
        yield "SDPA flash", library(shape, SDPBackend.FLASH_ATTENTION)
        yield "SDPA cuDNN", library(shape, SDPBackend.CUDNN_ATTENTION)
    yield "flex", flex(shape)


def inputs(shape: Shape) -> list[Tensor]:
    torch.manual_seed(0)
    heads = (shape.heads, shape.key_heads, shape.key_heads)
    return [
        torch.randn(
            shape.batch, count, shape.sequence, shape.head, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for count in heads
    ]


def milliseconds(run: Callable[[], object]) -> float:
    """The median time of a call."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=50, rep=200, return_mode="median"))


def times(attention: Attention, shape: Shape) -> tuple[float, float]:
    """Milliseconds of forward and of backward."""
    tensors = inputs(shape)
    out = attention(*tensors)
    grad = torch.randn_like(out)
    forward = milliseconds(lambda: attention(*tensors))
    backward = milliseconds(lambda: torch.autograd.grad(out, tensors, grad, retain_graph=True))
    return forward, backward


def compare() -> None:
    print(f"{'shape':36} {'':10} {'forward':>9} {'backward':>9} TFLOP/s   ours is ... times as fast")
    for shape in SHAPES:
        own = times(ours(shape), shape)
        rates = (shape.flops() / own[0] / 1e9, 2.5 * shape.flops() / own[1] / 1e9)
        print(f"{shape!s:36} {'smpc':10} {rates[0]:9.0f} {rates[1]:9.0f}")
        for name, attention in peers(shape):
            try:
                peer = times(attention, shape)
            except RuntimeError as error:
                print(f"{'':36} {name:10} cannot run this: {str(error).splitlines()[0]}")
                continue
            rates = (shape.flops() / peer[0] / 1e9, 2.5 * shape.flops() / peer[1] / 1e9)
            ratios = f"{peer[0] / own[0]:.2f} forward, {peer[1] / own[1]:.2f} backward"
            print(f"{'':36} {name:10} {rates[0]:9.0f} {rates[1]:9.0f}           {ratios}")


def tune(shape: Shape) -> None:
    """Times every candidate of the tables for this card and head size."""
    from smpc.kernels.attention.backward_triton import KEY_VALUE_BLOCKS, QUERY_BLOCKS, launch_backward
    from smpc.kernels.attention.forward_triton import BLOCKS, launch_forward
    from smpc.kernels.attention.tiles_triton import Blocks, padded_head

    key = (90 if torch.cuda.get_device_capability() >= (9, 0) else 80, padded_head(shape.head))
    q, k, v = (tensor.detach() for tensor in inputs(shape))
    fixed = (None, shape.head**-0.5, shape.causal, 0)
    out, lse = launch_forward(q, k, v, *fixed)
    arguments = (torch.randn_like(out), torch.zeros_like(lse), q, k, v, None, out, lse, *fixed[1:])

    def show(title: str, blocks: Blocks, run: Callable[[], object]) -> None:
        print(f"{shape!s:36} {title:24} {blocks}  {milliseconds(run):.3f} ms")

    for blocks in BLOCKS[key]:
        show("forward", blocks, functools.partial(launch_forward, q, k, v, *fixed, blocks))
    for blocks in QUERY_BLOCKS[key]:
        show("backward, blocks of dq", blocks, functools.partial(launch_backward, *arguments, blocks, None))
    for blocks in KEY_VALUE_BLOCKS[key]:
        show("backward, of dk and dv", blocks, functools.partial(launch_backward, *arguments, None, blocks))


def main() -> int:
    parser = argparse.ArgumentParser(description="Kernels against the libraries' on one GPU.")
    parser.add_argument("--tune", action="store_true", help="time every candidate of the tables of block sizes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py needs a CUDA device, and torch finds none: nothing measured")
        return 2
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16, medians")
    if not options.tune:
        compare()
        return 0
    for shape in SHAPES:
        tune(shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())
