"""Norms, activations, rotary embedding and losses on one GPU: shares of a `copy_`, and ratios to torch and torch.compile.

    python benchmarks/kernels_fused.py [--match norm]

`of copy_` is the time that `copy_` takes to move the bytes that the op has to move, divided by the op's time; goals are those
of the reference. `eager` and `compiled` are the peer's time divided by ours: above 1 the kernel is faster. The fused linear
cross-entropy is compared with its three GEMMs instead. Everything is timed in this process, one after the other, and the median
printed. Without a CUDA device there is nothing to measure: the program says so and ends.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smpc.kernels.activations import bias_gelu, swiglu
from smpc.kernels.bias_dropout_add import bias_dropout_add
from smpc.kernels.cross_entropy import cross_entropy
from smpc.kernels.layer_norm import add_layer_norm, layer_norm
from smpc.kernels.linear_cross_entropy import linear_cross_entropy
from smpc.kernels.rms_norm import add_rms_norm, rms_norm
from smpc.kernels.rotary import rotary

ROWS, VOCABULARY = 8192, 128256
REPEATS = 20


@dataclass(frozen=True)
class Case:
    """One op with its inputs; the passes move `forward` and `backward` times the bytes of the first input."""

    name: str
    ours: Callable[..., Any]
    peer: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    forward: float
    backward: float
    goals: tuple[float, float]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def cases() -> Iterator[Case]:
    for columns in (2048, 4096, 8192, 16384):
        x, r, w, b = leaf(ROWS, columns), leaf(ROWS, columns), leaf(columns), leaf(columns)
        size = (columns,)
        yield Case(
            f"layer_norm n{columns}",
            lambda x, w, b, size=size: layer_norm(x, size, w, b),
            lambda x, w, b, size=size: F.layer_norm(x, size, w, b),
            (x, w, b),
            2,
            3,
            (0.9, 0.65),
        )
        yield Case(
            f"rms_norm n{columns}",
            lambda x, w, size=size: rms_norm(x, size, w, 1e-6),
            lambda x, w, size=size: F.rms_norm(x, size, w, 1e-6),
            (x, w),
            2,
            3,
            (0.9, 0.65),
        )
        yield Case(
            f"add_layer_norm n{columns}",
            add_layer_norm,
            lambda x, r, w, b, size=size: (F.layer_norm(x + r, size, w, b), x + r),
            (x, r, w, b),
            4,
            4,
            (0.9, 0.65),
        )
        yield Case(
            f"add_rms_norm n{columns}",
            lambda x, r, w: add_rms_norm(x, r, w, 1e-6),
            lambda x, r, w, size=size: (F.rms_norm(x + r, size, w, 1e-6), x + r),
            (x, r, w),
            4,
            4,
            (0.9, 0.65),
        )
    x, up, b = leaf(ROWS, 14336), leaf(ROWS, 14336), leaf(14336)
    for form in ("none", "tanh"):
        yield Case(
            f"bias_gelu {form}",
            lambda x, b, form=form: bias_gelu(x, b, approximate=form),
            lambda x, b, form=form: F.gelu(x + b, approximate=form),
            (x, b),
            2,
            3,
            (0.9, 0.8),
        )
    yield Case("swiglu", swiglu, lambda g, u: F.silu(g) * u, (x, up), 3, 5, (0.9, 0.8))
    x, r, b = leaf(ROWS, 4096), leaf(ROWS, 4096), leaf(4096)
    yield Case(
        "bias_dropout_add",
        lambda x, r, b: bias_dropout_add(x, b, r, 0.1),
        lambda x, r, b: r + F.dropout(x + b, 0.1),
        (x, r, b),
        3,
        2,
        (0.9, 0.8),
    )
    q = leaf(4, 32, 4096, 128)
    angle = torch.rand(4096, 64, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    yield Case("rotary", lambda q: rotary(q, cos, sin), lambda q: rotated(q, cos, sin), (q,), 2, 2, (0.8, 0.8))
    logits, labels = leaf(ROWS, VOCABULARY), torch.randint(VOCABULARY, (ROWS,), device="cuda")
    for inplace in (False, True):
        yield Case(
            f"cross_entropy{' in place' if inplace else ''}",
            lambda x, inplace=inplace: cross_entropy(x, labels, inplace_backward=inplace),
            lambda x: F.cross_entropy(x.float(), labels),
            (logits,),
            1,
            2,
            (0.85, 0.85),
        )


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


def times(function: Callable[..., Any], case: Case) -> tuple[float, float]:
    """Milliseconds of the forward pass, and of the backward pass."""
    forward = milliseconds(lambda: function(*case.inputs))

    def both() -> None:
        outputs = function(*case.inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        torch.autograd.grad(outputs, case.inputs, [torch.ones_like(output) for output in outputs])

    return forward, milliseconds(both) - forward


def measure(case: Case) -> None:
    source = case.inputs[0].detach()
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source)) / 2  # a copy moves its bytes twice
    ours, eager = times(case.ours, case), times(case.peer, case)
    compiled = times(torch.compile(case.peer, dynamic=False), case)
    for index, (part, moved) in enumerate((("forward", case.forward), ("backward", case.backward))):
        print(
            f"{case.name:24} {part:8} {ours[index]:8.3f} ms   of copy_ {copy * moved / ours[index]:5.2f} "
            f"(goal {case.goals[index]:.2f})   eager {eager[index] / ours[index]:5.2f}   "
            f"compiled {compiled[index] / ours[index]:5.2f}",
            flush=True,
        )


def gemm_time(hidden: Tensor, weight: Tensor) -> float:
    """Milliseconds of the three products that a linear layer with its gradients is."""
    logits = hidden @ weight.t()

    def products() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    return milliseconds(products)


def measure_linear_cross_entropy(features: int = 4096) -> None:
    hidden, weight = leaf(ROWS, features), leaf(VOCABULARY, features)
    labels = torch.randint(VOCABULARY, (ROWS,), device="cuda")

    def run(loss: Callable[[], Tensor]) -> tuple[float, float]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        spent = milliseconds(lambda: torch.autograd.grad(loss(), (hidden, weight)))
        return spent, (torch.cuda.max_memory_allocated() - before) / 2**30

    products = gemm_time(hidden.detach(), weight.detach())
    ours, ours_memory = run(lambda: linear_cross_entropy(hidden, weight, labels))
    plain, plain_memory = run(lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels))
    print(
        f"linear_cross_entropy n{features}: {ours:.2f} ms, {ours / products:.2f} of its GEMMs (goal 1.25), "
        f"torch / ours {plain / ours:.2f}; GiB above the inputs: {ours_memory:.2f}, torch {plain_memory:.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only ops whose name contains this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for case in cases():
        if options.match in case.name:
            measure(case)
    if options.match in "linear_cross_entropy":
        measure_linear_cross_entropy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
