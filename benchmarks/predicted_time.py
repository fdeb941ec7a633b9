"""Predicted step time from measured module times, against the measured step: 2 gloo ranks, a GPT-2 and a U-Net, both schedules.

    python benchmarks/predicted_time.py [--steps 20] [--models gpt2 unet] [--report]

The ranks time the nodes of the model, one thread each, and the wire between them; a plan is made of these and run. Where cores are
shared with other work times wander, so nodes and wire are timed again among the steps, one pass before each, in turn by both ranks
at once and by each alone: ranks of one host share its memory, and perhaps its cores, so a node takes longer while another rank works.
With t alone and T together, and s the share of the ranks' work during which both work (of the simulated timeline), it is taken to need
t + s (T - t). The prediction from these medians is compared with the medians of the steps: of the pipeline as recorded, and of the
wall clock of rank 0 around a step, with the error (predicted / measured - 1). The prediction does not know the optimizer nor what
else a script does, so neither is in the measured time. `before` is what the plan said before the first step.
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

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from smpc.codegen.simulate import Timeline
from smpc.compile import Compilation, PipelineOptions, compile_plan, make_plan, predict_timeline
from smpc.executor.transport import GlooTransport
from smpc.executor.wires import measure_wire
from smpc.partitioner.cost import NodeTimes
from smpc.partitioner.device import Wire, find_device
from smpc.partitioner.plan import Plan
from smpc.partitioner.timing import Stopwatch, typical
from smpc.report.measured import Comparison
from smpc.runtime import Runtime
from smpc.sample_inputs import Inputs
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


class Timers:
    """Times the model's nodes on both ranks, at once and one after another, and the wire between them."""

    def __init__(self, trace: Trace, model: nn.Module, inputs: Inputs, transport: GlooTransport, rank: int) -> None:
        self.stopwatch, self.transport, self.rank = Stopwatch(trace, model, *inputs), transport, rank
        self.stopwatch.run()
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self.alone: list[NodeTimes] = []
        self.together: list[NodeTimes] = []
        self.wires: list[Wire] = []

    def measure(self) -> None:
        """One pass alone or together, in turn."""
        self.wires.append(measure_wire(self.transport, self.rank, 2))
        if len(self.together) <= len(self.alone):
            dist.barrier()
            self.together.append(self.stopwatch.run())
            return
        for turn in range(2):
            dist.barrier()
            if turn == self.rank:
                self.alone.append(self.stopwatch.run())
        dist.barrier()

    def found(self) -> tuple[NodeTimes, NodeTimes, Wire]:
        """Alone, together, and the wire: medians, and of the ranks the mean."""
        alone, together = mean(typical(self.alone)), mean(typical(self.together))
        bandwidth = statistics.median(wire.bandwidth for wire in self.wires)
        return alone, together, Wire(bandwidth, statistics.median(wire.latency for wire in self.wires))


def mean(own: NodeTimes) -> NodeTimes:
    """Over the ranks."""
    times = torch.stack([torch.from_numpy(own.forward), torch.from_numpy(own.backward)])
    dist.all_reduce(times)
    forward, backward = (times / dist.get_world_size()).numpy()
    return NodeTimes(forward, backward)


def between(alone: NodeTimes, together: NodeTimes, share: float) -> NodeTimes:
    """Times where ranks work at once for a share of their work."""
    pairs = ((alone.forward, together.forward), (alone.backward, together.backward))
    return NodeTimes(*(a + share * (b - a) for a, b in pairs))


def work_at_once(timeline: Timeline) -> float:
    """The share of the work of two ranks during which both work."""
    spans = [[(event.start, event.end) for event in timeline.events if event.rank == rank] for rank in range(2)]
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans[0] for b in spans[1])
    return 2 * both / sum(timeline.busy)


def predict(
    trace: Trace, options: PipelineOptions, timers: Timers, like: Compilation | None = None
) -> tuple[Plan, float]:
    """The plan from what was measured, and the share of the work that is done at once."""
    alone, together, wire = timers.found()
    options = dataclasses.replace(options, device=dataclasses.replace(find_device("cpu"), inside_host=wire))
    share = 1.0
    for _ in range(5):
        plan = make_plan(trace, options, like=like, times=between(alone, together, share))
        share = work_at_once(predict_timeline(trace, plan))
    return plan, share


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
            trace = record(model, *microbatches[0])
            timers = Timers(trace, model, microbatches[0], transport, rank)
            for _ in range(6):
                timers.measure()
            options = PipelineOptions(2, MICROBATCHES, pipeline, 0.0, device="cpu", optimizer="sgd")
            plan, _ = predict(trace, options, timers)
            runtime = Runtime(model, rank=rank, transport=transport)
            compilation = compile_plan(trace, plan)
            step = steps_of(runtime, runtime.install(compilation), microbatches, rank)
            for _ in range(2):
                step()
            runtime.observe(num_steps)
            step()  # for memory
            walls = []
            timers.clear()
            for _ in range(num_steps):
                timers.measure()
                walls.append(step())
            found = runtime.report(dist.group.WORLD)
            there, share = predict(trace, options, timers, compilation)
            alone, together, wire = timers.found()
            slowdown = float(np.sum([together.forward, together.backward]) / np.sum([alone.forward, alone.backward]))
            if rank == 0:
                before = plan.schedule.step_time
                show(f"{name}, {pipeline}", found, there.schedule.step_time, statistics.median(walls), before)
                if report:
                    print(
                        f"both work for {share:.0%} of their work, and take {slowdown:.2f} times as long then; {wire}"
                    )
                    for stage in there.stages:
                        print(
                            f"  stage {stage.index}: {1e3 * stage.forward_time:.1f} + {1e3 * stage.backward_time:.1f} ms"
                        )
                    print(found, flush=True)
    dist.destroy_process_group()


def show(what: str, found: Comparison, predicted: float, wall: float, before: float) -> None:
    measured = found.line("pipeline").measured
    assert measured is not None
    print(
        f"{what:18} predicted {1e3 * predicted:7.1f} ms   pipeline {1e3 * measured:7.1f} ms ({predicted / measured - 1:+.1%})   "
        f"wall clock {1e3 * wall:7.1f} ms ({predicted / wall - 1:+.1%})   before {1e3 * before:7.1f} ms",
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
