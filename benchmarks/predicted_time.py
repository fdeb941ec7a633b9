"""Predicted step time from measured module times, against the measured step: 2 gloo ranks, a GPT-2 and a U-Net, both schedules.

    python benchmarks/predicted_time.py [--steps 20] [--models gpt2 unet] [--report]

Both ranks time the nodes of the model at once, as they will compute at once, one thread each; the wire between them is measured too.
The plan made of these predicts the step; then it runs. Predicted and measured are printed with the error (predicted / measured - 1): of
the pipeline as recorded (median of the steps), and of the wall clock of rank 0 around the step. The prediction does not know the
optimizer nor what else a script does, so neither is in the measured time.

Where cores are shared with other work, times wander between the measurement and the steps. So the nodes are timed again among the
steps: `drift` is how much longer they took there, and the prediction from those times says how good the model is apart from that.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from smpc.compile import Inputs, PipelineOptions, compile_plan, make_plan
from smpc.executor.transport import GlooTransport
from smpc.executor.wires import measure_wire
from smpc.partitioner.cost import NodeTimes
from smpc.partitioner.device import find_device
from smpc.partitioner.timing import measure_times
from smpc.report.measured import Comparison
from smpc.runtime import Runtime
from smpc.tracer import record
from smpc.tracer.ir import Trace

MICROBATCHES = 4
SCHEDULES = ("simple", "interleaved")


class UNet(nn.Module):
    """Four levels down and up, with BatchNorm and in-place activations."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairs)
        self.up = nn.ModuleList(self._block(a + b, a) for a, b in reversed(pairs[1:]))
        self.out = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for block, skip in zip(self.up, reversed(skips[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return self.out(x).square().mean()


def gpt2() -> tuple[nn.Module, list[Inputs]]:
    sizes = {"n_embd": 192, "n_layer": 6, "n_head": 6, "n_positions": 64, "vocab_size": 1024}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    ids = [torch.randint(0, 1024, (4, 64)) for _ in range(MICROBATCHES)]
    return model, [((), {"input_ids": part, "labels": part}) for part in ids]


def unet() -> tuple[nn.Module, list[Inputs]]:
    return UNet(), [((torch.randn(2, 3, 64, 64),), {}) for _ in range(MICROBATCHES)]


MODELS = {"gpt2": gpt2, "unet": unet}


def loss_of(output: object) -> torch.Tensor:
    loss = output if isinstance(output, torch.Tensor) else output.loss  # type: ignore[attr-defined]
    return loss / MICROBATCHES


def together(trace: Trace, model: nn.Module, inputs: Inputs, runs: int = 5) -> NodeTimes:
    """The mean over the ranks of what they measure at the same time."""
    dist.barrier()
    own = measure_times(trace, model, *inputs, runs=runs)
    times = torch.stack([torch.from_numpy(own.forward), torch.from_numpy(own.backward)])
    dist.all_reduce(times)
    forward, backward = (times / dist.get_world_size()).numpy()
    return NodeTimes(forward, backward)


def steps_of(runtime: Runtime, program: int, microbatches: list[Inputs] | None, rank: int) -> Callable[[], float]:
    """A function that runs a step; the seconds that it took."""
    parameters = [parameter for stage in runtime.stages.values() for parameter in stage.parameters()]

    def step() -> float:
        for parameter in parameters:
            parameter.grad = None
        dist.barrier()
        start = time.perf_counter()
        runtime.run(program, microbatches if rank == 0 else None, lambda _, out: [(loss_of(out), None)], training=True)
        return time.perf_counter() - start

    return step


def worker(rank: int, folder: str, models: list[str], num_steps: int, report: bool) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    for name in models:
        for pipeline in SCHEDULES:
            torch.manual_seed(0)
            model, microbatches = MODELS[name]()
            model.train()
            transport = GlooTransport(dist.group.WORLD)
            wire = measure_wire(transport, rank, 2)
            trace = record(model, *microbatches[0])
            times = together(trace, model, microbatches[0])
            device = dataclasses.replace(find_device("cpu"), inside_host=wire)
            options = PipelineOptions(2, MICROBATCHES, pipeline, 0.0, device=device, optimizer="sgd")
            plan = make_plan(trace, options, times=times)
            runtime = Runtime(model, rank=rank, transport=transport)
            compilation = compile_plan(trace, plan)
            step = steps_of(runtime, runtime.install(compilation), microbatches, rank)
            for _ in range(2):
                step()
            runtime.observe(num_steps)
            step()  # for memory
            walls, among = [], []
            for number in range(num_steps):
                if number % max(num_steps // 4, 1) == 0:
                    among.append(together(trace, model, microbatches[0], runs=2))
                walls.append(step())
            found = runtime.report(dist.group.WORLD)
            forward, backward = (sum(getattr(t, k) for t in among) / len(among) for k in ("forward", "backward"))
            drift = (forward.sum() + backward.sum()) / (times.forward.sum() + times.backward.sum()) - 1
            there = make_plan(trace, options, like=compilation, times=NodeTimes(forward, backward))
            again = there.schedule.step_time
            if rank == 0:
                show(f"{name}, {pipeline}", found, statistics.median(walls), again, float(drift))
                if report:
                    print(found, f"\nwire: {wire}\n", flush=True)
    dist.destroy_process_group()


def show(what: str, found: Comparison, wall: float, again: float, drift: float) -> None:
    pipeline = found.line("pipeline")
    assert pipeline.predicted is not None
    assert pipeline.measured is not None
    print(
        f"{what:18} predicted {1e3 * pipeline.predicted:7.1f} ms   pipeline {1e3 * pipeline.measured:7.1f} ms "
        f"({pipeline.error:+.1%})   wall clock {1e3 * wall:7.1f} ms ({pipeline.predicted / wall - 1:+.1%})   "
        f"drift {drift:+.1%}, predicted there {1e3 * again:7.1f} ms ({again / pipeline.measured - 1:+.1%})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--report", action="store_true", help="print all of each comparison")
    args = parser.parse_args()
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    print(f"{now}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder, args.models, args.steps, args.report), nprocs=2)
    print(f"load afterwards {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
