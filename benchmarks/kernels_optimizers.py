"""Optimizer steps and gradient norms on one GPU: shares of a `copy_`, and ratios to torch's fused and foreach ones.

    python benchmarks/kernels_optimizers.py [--layers 16] [--match lamb]

`of copy_` is the time that `copy_` takes to move the bytes that the step has to move, divided by the step's time; the goal is 0.85,
and for AdamW at most 1.05 times the time of torch's fused one for the same bytes. `torch` is the peer's time divided by ours: torch's fused
AdamW, foreach functions for the rest. The parameters are those of a transformer's layers, many of them small. Without
a CUDA device there is nothing to measure: the program says so and ends.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from smpc.optimizers import FusedAdamW, FusedLamb, FusedNovoGrad, clip_grad_norm_

WIDTH, REPEATS, GOAL = 4096, 20, 0.85

# Name, class, options, bytes moved for each parameter beside those of itself and its gradient: moments and masters, read and written.
# LAMB reads moments and parameters twice; see kernels/optimizers_triton.py.
CASES: tuple[tuple[str, Any, dict[str, Any], int], ...] = (
    ("adamw", FusedAdamW, {}, 16),
    ("adamw masters", FusedAdamW, {"master_weights": True}, 24),
    ("lamb", FusedLamb, {"max_grad_norm": None}, 24),
    ("lamb masters", FusedLamb, {"max_grad_norm": None, "master_weights": True}, 36),
    ("novograd", FusedNovoGrad, {}, 8),
)


def parameters(layers: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Those of `layers` transformer layers, with gradients."""
    shapes = [(WIDTH,)] * 8 + [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    found = [torch.nn.Parameter(torch.randn(s, device="cuda", dtype=dtype)) for _ in range(layers) for s in shapes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def milliseconds(run: Callable[[], Any]) -> float:
    """The median time of `run` on the device."""
    for _ in range(3):
        run()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes that `copy_` moves in a millisecond, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


def report(name: str, moved: int, rate: float, ours: float, peer: float) -> None:
    print(
        f"{name:28} {ours:8.3f} ms   of copy_ {moved / rate / ours:5.2f} (goal {GOAL})   torch {peer / ours:5.2f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--match", default="", help="only those whose name contains this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rate = copy_rate()
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters(options.layers, dtype)
        count, size = sum(p.numel() for p in params), dtype.itemsize
        for name, kind, arguments, moments in CASES:
            if options.match not in name or ("masters" in name and dtype == torch.float32):
                continue
            ours, peer = (milliseconds(kind(params, **arguments, kernel=kernel).step) for kernel in (True, False))
            # The gradient is read once, and once more for NovoGrad's norm; without masters LAMB reads the parameter twice.
            reads = 2 if "novograd" in name else 1
            touches = 1 if "masters" in name else 3 if "lamb" in name else 2
            report(f"{name} {dtype}", count * (size * (reads + touches) + moments), rate, ours, peer)
        if options.match in "clip_grad_norm_":
            ours, peer = (
                milliseconds(functools.partial(clip_grad_norm_, params, 1.0, kernel=kernel)) for kernel in (True, False)
            )
            report(f"clip_grad_norm_ {dtype}", 3 * count * size, rate, ours, peer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
