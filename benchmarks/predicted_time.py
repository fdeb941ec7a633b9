"""Predicted steps of two gloo ranks, for the machine as `smpc calibrate` has just described it, beside measured ones.

    python benchmarks/predicted_time.py [--models gpt2 unet] [--ways 1f1b zb-h1 tp] [--rounds 2] [--steps 15] [--seconds 60]
        [--device FILE.toml]

GPT-2, Llama, T5 and a U-Net train through `smp.step`, in every way that two ranks can share a model: two stages under each schedule,
tensor parallelism (`tp`), replicas that hold parts (`fsdp`) or all (`ddp`) of it. Without --device two ranks calibrate first. Each pair of
a model and a way is a job of its own: in processes that had trained others before, steps took up to 10% longer.

What else a machine does can only make a step longer: the same step took 73.5 ms in one job and 82 in another, some minutes later. So all
pairs are run in rounds, and the faster job of each counts in the summary. `--rounds 1` has one of each.

The model is also cut for that device: for another one it might be cut elsewhere. A step is timed from `zero_grad` to its loss, on rank 0,
without the optimizer; the median of the steps within 15% of the fastest counts, as in the calibration. The prediction is that of `smpc
compile` for the same settings, its optimizer left out. The ratio of the two is printed, and at the end how far off the worst is.

A machine that others share is not always as fast as when it was calibrated: here products took 8 to 20% longer in some seconds than in
others. So a small model trains between the steps as it did between the probes of the calibration. `pace` is how much longer that takes now,
and the second ratio has the prediction stretched by it. With --device there is none.

Where other programs use the cores, steps that take longer than a slice of the scheduler are all
interrupted: then `work` says more, what a rank is predicted to compute and to execute, beside the processor time of its step on the
average of the ranks. That is without `waits`, in which a rank looks again and again whether another has sent something, and without
`threads`, those of gloo, which copy what is sent. In the work of collectives between operations (`tp`) there are copies that are predicted
with the collectives.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smpc.v1 as smp
from smpc.calibration import CalibrationRanks, calibrate
from smpc.calibration.measure_device import to_toml
from smpc.calibration.operations import steady
from smpc.compile.options import PipelineOptions
from smpc.compile.passes import compile_batch
from smpc.compile.replica_traffic import StepSurroundings
from smpc.compile.step_breakdown import step_parts
from smpc.config import Config
from smpc.executor.host_memory.shared_peers import Peers
from smpc.launch.job import Job, launch
from smpc.launch.output import OutputOptions
from smpc.partitioner.costs.device import Device
from smpc.partitioner.costs.device_file import find_device

MICROBATCHES = 4
SAMPLES = 8  # of a batch
WITHIN = 0.1  # of measured: the goal
WAYS: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {"pipeline_parallel_degree": 2, "pipeline": "simple"},
    "1f1b": {"pipeline_parallel_degree": 2},
    "interleaved-1f1b": {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2, "schedule": "interleaved-1f1b"},
    "zb-h1": {"pipeline_parallel_degree": 2, "schedule": "zb-h1"},
    "zb-h2": {"pipeline_parallel_degree": 2, "schedule": "zb-h2"},
    "zb-v": {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2, "schedule": "zb-v"},
    "list": {"pipeline_parallel_degree": 2, "schedule": "list"},
    "tp": {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True, "ddp": True},
    "fsdp": {"ddp": True, "fully_shard": True},
    "ddp": {"ddp": True},
}


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


Made = tuple[nn.Module, dict[str, torch.Tensor]]


def text(model: nn.Module, vocabulary: int, length: int) -> Made:
    ids = torch.randint(0, vocabulary, (SAMPLES, length))
    return model, {"input_ids": ids, "labels": ids}


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 192, "n_layer": 6, "n_head": 6, "n_positions": 64, "vocab_size": 1024}
    return text(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)), 1024, 64)


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return text(LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)), 1024, 64)


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 192, "d_ff": 512, "d_kv": 32, "num_layers": 3, "num_heads": 6, "vocab_size": 1024}
    return text(T5ForConditionalGeneration(T5Config(**sizes, use_cache=False, decoder_start_token_id=0)), 1024, 64)


def unet() -> Made:
    return UNet(), {"x": torch.randn(SAMPLES, 3, 64, 64)}


MODELS: Mapping[str, Callable[[], Made]] = {"gpt2": gpt2, "llama": llama, "t5": t5, "unet": unet}


@smp.step
def train_step(model: smp.DistributedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    model.backward(loss)
    return loss


class Waits:
    """Processor time of waiting for words of other ranks in shared memory, of this rank since `seconds` was 0."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._wait = Peers.wait

    def __enter__(self) -> Waits:
        wait = self._wait

        def timed(peers: Peers, *args: Any) -> int:
            start = time.thread_time()
            try:
                return wait(peers, *args)
            finally:
                self.seconds += time.thread_time() - start

        Peers.wait = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Peers.wait = self._wait  # type: ignore[method-assign]


class Pace:
    """How fast this rank is at the moment: what a few passes of a small model take, by the clock."""

    PASSES = 4

    def __init__(self) -> None:
        self._model, self._rows = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.ones(128, 256)
        self.seconds: list[float] = []

    def look(self, *_: object) -> None:
        """Once more. The first pass, after other work, does not count."""
        for left in reversed(range(self.PASSES)):
            if left == self.PASSES - 2:
                start = time.perf_counter()
            self._model(self._rows).square().mean().backward()
        self.seconds.append(time.perf_counter() - start)

    def take(self, ranks: CalibrationRanks) -> float:
        """The median of the looks, on the average of the ranks; those to come are others. Collective."""
        found = statistics.median(self.seconds)
        self.seconds.clear()
        return ranks.mean([found])[0]


def predict(make: Callable[[], Made], settings: Mapping[str, Any], device: Device) -> tuple[float, float]:
    """Seconds of a step as `smpc compile` predicts them, without the optimizer, and those of a rank that are its own work."""
    model, batch = make()
    config = Config.parse(settings, origin="benchmark")
    replicas = 2 // config.pipeline_parallel_degree // config.tensor_parallel_degree
    options = PipelineOptions.of(config, device=device, data_parallel_degree=replicas, optimizer="sgd")
    planned = compile_batch(model.train(), batch, options).planned
    assert planned is not None
    assert planned.traced is not None
    parts = step_parts(planned.traced, planned.plan, planned.timeline, StepSurroundings.of(options))
    return parts.total - parts.optimizer, parts.compute + parts.executor


def measure(
    make: Callable[[], Made], settings: Mapping[str, Any], steps: int, pace: Pace
) -> tuple[float, tuple[float, ...]]:
    """Seconds of a step, and of the processor on the average of the ranks: work, waits, other threads. Looks at the pace meanwhile."""
    smp.init(dict(settings))
    made, batch = make()
    model = smp.DistributedModel(made.train())
    times, used = [], []
    with Waits() as waits:
        for _ in range(steps + 3):
            pace.look()
            model.zero_grad(set_to_none=True)
            smp.barrier()
            waits.seconds = 0.0
            start, own, all_threads = time.perf_counter(), time.thread_time(), time.process_time()
            train_step(model, batch)
            times.append(time.perf_counter() - start)
            own, all_threads = time.thread_time() - own, time.process_time() - all_threads
            used.append((own - waits.seconds, waits.seconds, max(0.0, all_threads - own)))
    typical = sorted(used[3:])[
        len(used[3:]) // 4
    ]  # by work: three quarters of the steps have had more of others in their caches
    ranks = smp.allgather(typical, smp.WORLD)
    smp.shutdown()
    return steady(times[3:]), tuple(map(statistics.mean, zip(*ranks, strict=True)))


class Folder:
    """What the jobs of a run have found, for each other."""

    def __init__(self, path: str) -> None:
        self.device, self.pace, self.steps = (str(Path(path) / name) for name in ("device.toml", "pace", "steps"))

    def usual_pace(self) -> float | None:
        """Of the calibration; None: there was none."""
        return float(Path(self.pace).read_text()) if Path(self.pace).exists() else None

    def errors(self) -> list[tuple[float, float]]:
        """Of all steps, each in its fastest job; at the pace of the calibration, too."""
        best: dict[tuple[str, str], tuple[float, float, float]] = {}
        for line in Path(self.steps).read_text().splitlines():
            name, way, *found = json.loads(line)
            best[name, way] = min(best.get((name, way), (math.inf, 0.0, 0.0)), tuple(found))
        return [(error, paced) for _, error, paced in best.values()]


def calibrate_into(folder: Folder, seconds: float) -> None:
    """What the ranks of the first job run."""
    ranks, pace = CalibrationRanks.here(), Pace()
    text = to_toml(calibrate(ranks, seconds, pace.look), "this machine")
    usual = pace.take(ranks)
    if ranks.rank == 0:
        Path(folder.device).write_text(text)
        Path(folder.pace).write_text(str(usual))


def compare(folder: Folder, name: str, way: str, device: str, steps: int) -> None:
    """What the ranks of each other job run."""
    torch.manual_seed(0)
    ranks, pace = CalibrationRanks.here(), Pace()
    settings = {"microbatches": MICROBATCHES, "memory_weight": 0.0, "device": device, **WAYS[way]}
    measured, (used, waits, threads) = measure(MODELS[name], settings, steps, pace)
    now, usual = pace.take(ranks), folder.usual_pace()
    if ranks.rank == 0:
        predicted, work = predict(MODELS[name], settings, find_device(device))
        slower = now / usual if usual else math.nan
        error, paced = predicted / measured - 1, slower * predicted / measured - 1
        with Path(folder.steps).open("a") as file:
            print(json.dumps([name, way, measured, error, paced]), file=file)
        print(
            f"{name:6} {way:17} predicted {1e3 * predicted:7.1f} ms   measured {1e3 * measured:7.1f} ms   {error:+6.1%}   "
            f"pace {slower:4.2f} {paced:+6.1%}   "
            f"work {1e3 * work:6.1f} / {1e3 * used:6.1f} ms {work / used - 1:+6.1%}   "
            f"waits {1e3 * waits:5.1f}   threads {1e3 * threads:5.1f}   "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def summary(what: str, errors: Sequence[float]) -> str:
    """How far off some steps are."""
    within = sum(abs(error) <= WITHIN for error in errors)
    median, worst = statistics.median(errors), max(errors, key=abs)
    return f"{len(errors)} steps{what}: median {median:+.1%}, worst {worst:+.1%}, {within} within {WITHIN:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seconds", type=float, default=60, help="of the calibration")
    parser.add_argument("--device", help="a .toml file, in place of a calibration")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)  # of the ranks: a folder, and what they compare
    args = parser.parse_args()
    if args.job:
        folder = Folder(args.job[0])
        if args.job[1:]:
            name, way = args.job[1:]
            compare(folder, name, way, args.device, args.steps)
        else:
            calibrate_into(folder, args.seconds)
        return 0
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(path)
        if not args.device and run_job(path, "--seconds", str(args.seconds)):
            return 1
        options = "--device", args.device or folder.device, "--steps", str(args.steps)
        pairs = list(itertools.product(args.models, args.ways)) * args.rounds
        failed = [pair for pair in pairs if run_job(path, *pair, *options)]
        if len(failed) == len(pairs):
            return len(failed)
        errors, paced = zip(*folder.errors(), strict=True)
        print(summary("", errors))
        if folder.usual_pace():
            print(summary(" at the pace of the calibration", paced))
        return len(failed)


def run_job(*arguments: str) -> int:
    """Two ranks of this script."""
    return launch(
        Job(__file__, ("--job", *arguments), num_ranks=2, output=OutputOptions(prefix=False, console="first"))
    )


if __name__ == "__main__":
    sys.exit(main())
