"""Optimizer steps, gradient norms and clipping: shares of a `copy_`, and ratios to torch's fused and foreach ones.

The parameters have the sizes of a transformer's layers, many of them small. "fused Adam, per byte" is the time that torch's fused
AdamW would take for the bytes that our step moves; the goal is to be within 5% of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from kernel_families.measure import OF_COPY, Bench, Row
from smpc.optimizers import FusedAdamW, FusedLamb, FusedNovoGrad, clip_grad_norm_

PER_BYTE = "fused Adam, per byte"
GOALS = {OF_COPY: 0.85, PER_BYTE: 1 / 1.05}

# Name, class, options, the peer of kernel=False, bytes moved for each parameter beside those of itself and its gradient: moments and
# masters, read and written. LAMB reads moments and parameters twice; see kernels/programs/optimizers_triton.py.
CASES: tuple[tuple[str, Any, dict[str, Any], str, int], ...] = (
    ("adamw", FusedAdamW, {}, "torch fused", 16),
    ("adamw masters", FusedAdamW, {"master_weights": True}, "torch foreach", 24),
    ("lamb", FusedLamb, {"max_grad_norm": None}, "torch foreach", 24),
    ("lamb masters", FusedLamb, {"max_grad_norm": None, "master_weights": True}, "torch foreach", 36),
    ("novograd", FusedNovoGrad, {}, "torch foreach", 8),
)


def optimizers(bench: Bench) -> Iterator[Row]:
    """Steps in fp32 and bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from _of_dtype(bench, dtype)


def _of_dtype(bench: Bench, dtype: torch.dtype) -> Iterator[Row]:
    layers, width = (1, 8) if bench.small else (8, 4096)
    params = _parameters(bench, layers, width, dtype)
    count, size = sum(p.numel() for p in params), dtype.itemsize
    rate = bench.copy_rate(2**12 if bench.small else 2**30)
    shape = f"{str(dtype).removeprefix('torch.')}, {count / 1e6:.0f}M in {len(params)}"
    adam = bench.clock(torch.optim.AdamW(params, fused=True).step) / (count * (7 * size))  # p g m v read, p m v written
    for name, kind, options, peer, states in CASES:
        if not bench.wants(name) or ("masters" in name and dtype == torch.float32):
            continue
        ours, other = (bench.clock(kind(params, **options, kernel=kernel).step) for kernel in (True, False))
        # The gradient is read once, and once more for NovoGrad's norm; without masters LAMB reads the parameter twice.
        reads = 2 if "novograd" in name else 1
        touches = 1 if "masters" in name else 3 if "lamb" in name else 2
        moved = count * (size * (reads + touches) + states)
        yield Row(
            "optimizers", name, shape, "step", ours, moved / rate / ours, OF_COPY,
            {peer: other / ours, PER_BYTE: adam * moved / ours}, GOALS,
        )  # fmt: skip
    if bench.wants("clip_grad_norm_"):
        ours, other = (
            bench.clock(functools.partial(clip_grad_norm_, params, 1.0, kernel=kernel)) for kernel in (True, False)
        )
        yield Row(
            "optimizers", "clip_grad_norm_", shape, "step", ours, 3 * count * size / rate / ours, OF_COPY,
            {"torch foreach": other / ours}, {OF_COPY: GOALS[OF_COPY]},
        )  # fmt: skip


def _parameters(bench: Bench, layers: int, width: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Those of transformer layers, with gradients."""
    shapes = [(width,)] * 8 + [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    found = [
        torch.nn.Parameter(torch.randn(s, device=bench.device, dtype=dtype)) for _ in range(layers) for s in shapes
    ]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found
