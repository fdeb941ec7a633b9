"""How kernels are timed, and what a measurement says.

A family's `rows(bench)` yields `Row`s: the time of one pass of one kernel, its rate, and for each peer the peer's time divided by
ours, above 1 where the kernel is faster. All times are taken in one process, one after the other, by Triton's `do_bench`: it
clears the L2 cache before each call, which also lets the host run ahead, and takes the median.

    kernel     shape    pass       time        rate            peers, with the goals of the reference
    rms_norm   n4096    forward    0.221 ms    0.93 of copy_   (goal 0.90)   eager 2.10   compiled 1.02   Liger 1.11
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], object]
Function = Callable[..., Any]
TFLOPS, OF_COPY = "TFLOP/s", "of copy_"


def milliseconds(run: Run) -> float:
    """The median time of a call on the GPU."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=50, rep=200, return_mode="median"))


@dataclass(frozen=True, slots=True)
class Bench:
    """Where to measure and by which clock; `match` is a part of the names of the kernels wanted."""

    device: str = "cuda"
    match: str = ""
    small: bool = False  # shapes that a test on the CPU can run
    clock: Callable[[Run], float] = milliseconds
    compiler: Function = field(default=functools.partial(torch.compile, dynamic=False))

    def wants(self, kernel: str) -> bool:
        """Whether a kernel is to be measured."""
        return self.match in kernel

    def leaf(self, *shape: int) -> Tensor:
        """Random bf16 numbers that want a gradient."""
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16).requires_grad_()

    def copy_rate(self, number_of_bytes: int) -> float:
        """Bytes that `copy_` moves in a millisecond, read and written, for tensors of that size."""
        source = torch.empty(number_of_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * number_of_bytes / self.clock(lambda: target.copy_(source))


@dataclass(frozen=True, slots=True)
class Row:
    """One pass of one kernel. `ratios`: the peer's time divided by ours, or why the peer was not measured."""

    family: str
    kernel: str
    shape: str
    part: str  # forward, backward, both, step
    milliseconds: float
    rate: float
    unit: str
    ratios: Mapping[str, float | str]
    goals: Mapping[str, float]  # the least rate, by unit, and the least ratio, by peer

    def reached(self) -> tuple[tuple[str, float, float], ...]:
        """What was found for each goal that could be measured: (name, goal, found)."""
        found = {self.unit: self.rate, **self.ratios}
        return tuple(
            (name, goal, value) for name, goal in self.goals.items() if isinstance(value := found.get(name), float)
        )

    def __str__(self) -> str:
        goals = {name: f" (goal {goal:.2f})" for name, goal in self.goals.items()}
        rate = f"{self.rate:.0f}" if self.unit == TFLOPS else f"{self.rate:.2f}"
        ratios = [
            f"{name} {ratio:.2f}{goals.get(name, '')}" if isinstance(ratio, float) else f"{name}: {ratio}"
            for name, ratio in self.ratios.items()
        ]
        head = f"{self.kernel:22} {self.shape:34} {self.part:8} {self.milliseconds:9.3f} ms"
        return f"{head}   {rate} {self.unit}{goals.get(self.unit, '')}   {'   '.join(ratios)}"


@dataclass(frozen=True, slots=True)
class Case:
    """One op with its inputs and peers. The passes move `moved[part]` times the bytes of the first input."""

    kernel: str
    shape: str
    ours: Function
    peers: Mapping[str, Function | str]
    inputs: tuple[Tensor, ...]
    moved: Mapping[str, float]  # the parts to measure: forward and backward, or both where the backward pass runs once
    goals: Mapping[str, float]  # the least share of copy_, by part

    def rows(self, bench: Bench, family: str) -> Iterator[Row]:
        """Our passes beside the peers'."""
        ours = times(self.ours, self.inputs, bench, tuple(self.moved))
        peers = {name: _attempt(peer, self.inputs, bench, tuple(self.moved)) for name, peer in self.peers.items()}
        size = self.inputs[0].numel() * self.inputs[0].element_size()
        rate = bench.copy_rate(size)
        for part, moved in self.moved.items():
            ratios = {
                name: found if isinstance(found, str) else found[part] / ours[part] for name, found in peers.items()
            }
            yield Row(
                family, self.kernel, self.shape, part, ours[part], moved * size / rate / ours[part], OF_COPY, ratios,
                {OF_COPY: self.goals[part]},
            )  # fmt: skip


def times(function: Function, inputs: tuple[Tensor, ...], bench: Bench, parts: tuple[str, ...]) -> dict[str, float]:
    """Milliseconds of the parts of `function(*inputs)`."""

    def outputs() -> tuple[Tensor, ...]:
        found = function(*inputs)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    kept = outputs()
    grads = [torch.randn_like(output) for output in kept]
    if parts == ("both",):
        del kept
        return {"both": bench.clock(lambda: torch.autograd.grad(outputs(), inputs, grads))}
    return {
        "forward": bench.clock(outputs),
        "backward": bench.clock(lambda: torch.autograd.grad(kept, inputs, grads, retain_graph=True)),
    }


def _attempt(
    peer: Function | str, inputs: tuple[Tensor, ...], bench: Bench, parts: tuple[str, ...]
) -> dict[str, float] | str:
    """A peer's times, or why there are none."""
    if isinstance(peer, str):
        return peer
    try:
        return times(peer, inputs, bench, parts)
    except Exception as error:  # whatever another library raises for a shape it does not take
        return reason_of(error)


def reason_of(error: Exception) -> str:
    """The first line of an error, to be printed beside a peer."""
    return f"cannot run this, {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def liger(name: str) -> Any:
    """A function of Liger-Kernel, or why there is none."""
    try:
        import liger_kernel.ops
    except ImportError:
        return "not installed"
    return getattr(liger_kernel.ops, name, "not in this version")
