"""What the interpreter itself costs, in microseconds for each microbatch and stage.

Four stages on four ranks in loopback, 1F1B, stages that return at once. `messages` has no autograd work: F, B,
the bookkeeping of the messages and the queues. `autograd` adds a trivial backward for each microbatch and stage,
and says what the same torch.autograd calls cost alone. Run: python benchmarks/interpreter.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from smpc.codegen.program import Channel, Instruction, RankProgram, StageCode
from smpc.executor import Interpreter, run_loopback
from smpc.executor.transport import loopback_transports
from smpc.tracer.ir import TensorSpec

STAGES = 4
MICROBATCHES = 64
ROUNDS = 30


class Pass(nn.Module):
    """Returns a tensor made beforehand."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.value,)


class Identity(nn.Module):
    """One autograd node."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.view(8),)


def program(rank: int, requires_grad: bool) -> RankProgram:
    spec = TensorSpec((8,), "float32", (1,), requires_grad)
    source = TensorSpec((8,), "float32", (1,))
    channels = (
        Channel(0, -1, 0, 0, 0, ("v0",), (source,)),
        *(Channel(i, i - 1, i, i - 1, i, (f"v{i}",), (spec,)) for i in range(1, STAGES)),
    )
    code = StageCode(rank, "Stage", (f"v{rank}",), (f"v{rank + 1}",), "", (), ())
    warmup = min(STAGES - rank, MICROBATCHES)
    lines: list[str] = []
    for slot in range(MICROBATCHES + warmup):
        forward, backward = slot, slot - warmup
        if forward < MICROBATCHES:
            lines.append(f"RECV e{rank} m{forward} r{rank - 1}" if rank else f"MOVE e0 m{forward}")
            lines.append(f"F s{rank} m{forward}")
            lines += [f"SEND e{rank + 1} m{forward} r{rank + 1}"] if rank < STAGES - 1 else []
        if backward >= 0:
            if requires_grad and rank < STAGES - 1:
                lines.append(f"RECV_GRAD e{rank + 1} m{backward} r{rank + 1}")
            lines.append(f"B s{rank} m{backward}")
            lines += [f"SEND_GRAD e{rank} m{backward} r{rank - 1}"] if requires_grad and rank else []
    instructions = tuple(Instruction.parse(line) for line in lines)
    return RankProgram(rank, STAGES, MICROBATCHES, True, instructions, channels, (code,), (), "1f1b", "")


def best(run: Callable[[], object], count: int) -> float:
    """Microseconds for each of `count`, in the fastest round."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) / count * 1e6


def measure(make_stage: Callable[[], nn.Module], requires_grad: bool) -> float:
    transports = loopback_transports(STAGES)
    ranks = [Interpreter(program(r, requires_grad), {r: make_stage()}, transports[r]) for r in range(STAGES)]
    inputs = [{"v0": torch.ones(8)} for _ in range(MICROBATCHES)]
    grad = torch.ones(8)

    def on_output(m: int, outputs: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor | None]] | None:
        return [(outputs[0], grad)] if outputs[0].requires_grad else None

    run_loopback(ranks, inputs, on_output)
    return best(lambda: run_loopback(ranks, inputs, on_output), STAGES * MICROBATCHES)


def autograd_alone() -> float:
    """A leaf, a view, a gradient edge and a backward: torch's part of `autograd`."""
    value, grad = torch.ones(8), torch.ones(8)

    def run() -> None:
        for _ in range(MICROBATCHES):
            leaf = value.detach().requires_grad_()
            edge = torch.autograd.graph.get_gradient_edge(leaf.view(8))
            torch.autograd.backward([edge], [grad])

    return best(run, MICROBATCHES)


def main() -> None:
    torch.set_num_threads(1)
    value = torch.ones(8)
    print(f"messages  {measure(lambda: Pass(value), False):6.1f} us per microbatch and stage")
    whole, alone = measure(Identity, True), autograd_alone()
    print(f"autograd  {whole:6.1f} us, of which torch.autograd {alone:.1f} us, leaves {whole - alone:.1f} us")


if __name__ == "__main__":
    main()
