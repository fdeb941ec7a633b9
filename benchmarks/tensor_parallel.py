"""What tensor parallelism adds to an MLP block: smpc's layers and compiled programs, torch's DTensor and the plain module.

    python benchmarks/tensor_parallel.py [--steps 200] [--worlds 1 2] [--sizes launch-bound ...]

The block is Linear(H, 4H), GELU, Linear(4H, H), on the sum of an [N, H] input and a parameter, which represents the layers before it; a
step is a forward and a backward. All variants start from the same weights; outputs and the parameter's gradient are compared. Gloo on
one host, one thread a process.

    plain      the whole block on every rank
    layers     `smpc.nn`: a column-parallel layer and a row-parallel one, whole inputs and outputs
    compiled   `smpc.tensor_parallel.shard` of the plain block, with the plan that the others have
    dtensor    `parallelize_module` of torch, with ColwiseParallel and RowwiseParallel
    wire       nothing but the two all-reduces that every one of them needs, one forward and one backward, as our layers do them: through
               shared memory
    gloo       the same over gloo, as torch's do them; and ours, with SMPC_SHARED_MEMORY=0

Steps alternate, so that whatever else the machine does hits all; a ratio is the median over rounds of the ratio within a round. Ranks
start a step together, to a few microseconds: they meet in shared memory, as gloo's barrier wakes them one after another, and a rank
that has to wait for another's start would count that as its own step. The columns "less wire" are the time of our layers less that of
the all-reduces in the same round, as a part of the plain block's: the overhead of our code, whatever the wires cost.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from smpc.executor.collectives import TensorGroup, sum_over
from smpc.nn.layers.linear import ColumnLinear, RowLinear
from smpc.nn.parallel import TensorParallel
from smpc.tensor_parallel import shard

SIZES = {"launch-bound": (8, 64, 1), "small": (64, 128, 2), "balanced": (128, 256, 4), "compute-bound": (256, 512, 10)}
# N, H, and how many times fewer steps
WARM_UP = 5
Step = Callable[[], tuple[Tensor, ...]]


class Mlp(nn.Module):
    """The plain block."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros(rows, width))
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x + self.before)))


class Layers(nn.Module):
    """The same of distributed layers."""

    def __init__(self, plain: Mlp, width: int, group: TensorGroup) -> None:
        super().__init__()
        self.parallel = TensorParallel(group, "speed", prescaled_batch=True)
        rules = {"initializer_range": 0.02, "use_normal_initialization": True, "parallel": self.parallel}
        self.up, self.act = ColumnLinear(width, 4 * width, **rules), nn.GELU()
        self.down = RowLinear(4 * width, width, **rules)
        self.before = nn.Parameter(plain.before.detach().clone())
        with torch.no_grad():
            for ours, theirs in ((self.up, plain.up), (self.down, plain.down)):
                for name, value in theirs.named_parameters():
                    ours.get_parameter(name).copy_(ours.slice_of(name, value))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.parallel.before_columns(x + self.before))))


def variants(rows: int, width: int, group: TensorGroup) -> tuple[dict[str, nn.Module], Tensor]:
    torch.manual_seed(0)
    plain, x = Mlp(rows, width), torch.randn(rows, width)
    mesh = init_device_mesh("cpu", (group.size,))
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    modules = {
        "plain": plain,
        "layers": Layers(plain, width, group),
        "compiled": shard(copy.deepcopy(plain), x, group, {"up": "colwise", "down": "rowwise"}),
        "dtensor": parallelize_module(copy.deepcopy(plain), mesh, styles),
    }
    return modules, x


def stepper(module: nn.Module, x: Tensor) -> Step:
    parameters = dict(module.named_parameters())
    before = next(parameter for name, parameter in parameters.items() if name.endswith("before"))

    def step() -> tuple[Tensor, ...]:
        for parameter in parameters.values():
            parameter.grad = None
        output = module(x)
        output.sum().backward()
        before.grad[0, 0].item()  # torch's tensor may still be on its way
        return output.detach(), before.grad

    return step


def wire(x: Tensor, group: TensorGroup, all_reduce: Callable[[Tensor], object]) -> Step:
    buffer = torch.zeros_like(x)

    def step() -> tuple[Tensor, ...]:
        for _ in range(2 if group.size > 1 else 0):
            all_reduce(buffer)
        return (buffer,)

    return step


def measure(size: str, world: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every step, by variant."""
    rows, width, fewer = SIZES[size]
    group = TensorGroup.of(dist.group.WORLD) if world > 1 else TensorGroup()
    modules, x = variants(rows, width, group)
    runs: dict[str, Step] = {name: stepper(module, x) for name, module in modules.items()}
    expected = runs["plain"]()
    for name, run in runs.items():
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    runs["wire"] = wire(x, group, lambda buffer: sum_over(buffer, group))
    runs["gloo"] = wire(x, group, dist.all_reduce)
    times: dict[str, list[float]] = {name: [] for name in runs}
    meeting = torch.zeros(1)
    for step in range(steps // fewer + WARM_UP):
        for name, run in runs.items():
            sum_over(meeting, group)
            start = time.perf_counter()
            run()
            if step >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], ours: str, theirs: str, less: str | None = None) -> float:
    """The median over rounds of ours by theirs; `less` is taken off ours."""
    off = times[less] if less else [0.0] * len(times[ours])
    return statistics.median((a - b) / c for a, b, c in zip(times[ours], off, times[theirs], strict=True))


def worker(rank: int, world: int, folder: str, steps: int, sizes: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{world}", world), rank=rank, world_size=world)
    for size in sizes:
        times = measure(size, world, steps)
        if rank == 0:
            us = {name: f"{1e6 * statistics.median(values):8.0f}" for name, values in times.items()}
            ours = [ratio(times, name, other) for name in ("layers", "compiled") for other in ("plain", "dtensor")]
            print(
                f"{world:5} {size:14} {us['plain']} {us['layers']} {us['compiled']} {us['dtensor']} {us['wire']} {us['gloo']}"
                f"   {ours[0]:5.2f} {ours[1]:7.2f}     {ours[2]:5.2f} {ours[3]:7.2f}"
                f"   {ratio(times, 'layers', 'plain', 'wire'):5.2f} {ratio(times, 'compiled', 'plain', 'wire'):8.2f}",
                flush=True,
            )
    gc.collect()  # modules in cycles hold the group, whose threads should end before the interpreter does
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    args = parser.parse_args()
    print(
        f"{'':20} {'median time of a step, us':^53}   {'layers /':^13}     {'compiled /':^13}   {'less wire / plain':^14}"
    )
    print(
        f"{'world':5} {'size':14} {'plain':>8} {'layers':>8} {'compiled':>8} {'dtensor':>8} {'wire':>8} {'gloo':>8}   "
        f"{'plain':>5} {'dtensor':>7}     {'plain':>5} {'dtensor':>7}   {'layers':>5} {'compiled':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for world in args.worlds:
            mp.spawn(worker, (world, str(Path(folder)), args.steps, args.sizes), nprocs=world)


if __name__ == "__main__":
    main()
