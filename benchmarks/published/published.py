"""Predicted step times beside published ones: training runs of large language models, on the devices and at the degrees of their papers.

    python benchmarks/published/published.py [--rows PATTERN] [--plot FILE.png] [--check]

Every run is planned as `smpc compile` plans it (its trace, layouts, cut and schedule, memory weight 0), and its step is what
`smpc.compile.step_breakdown` says. The figures, their sources and how each is counted are in rows.toml; the constants of the devices are
from datasheets and public measurements of kernels (`smpc.partitioner.costs.device`); which effects the model has was decided after a
first comparison with these rows (docs/design/decisions.md, 49). Printed are both
times, their ratio, and where the predicted time goes; at the end the median of the ratios and the rank correlation (Spearman). With
--check the exit status is 1 if a ratio is not within 0.8 to 1.25, the median not within 5% of 1, or the correlation below 0.97.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from published_models import LanguageModel, Sizes

from smpc.compile import PipelineOptions, plan_trace
from smpc.compile.passes import Sharing, rewrite_trace
from smpc.compile.replica_traffic import StepSurroundings
from smpc.compile.step_breakdown import StepParts, step_parts
from smpc.tracer import record

ROWS = Path(__file__).with_name("rows.toml")
RATIOS, MEDIAN, CORRELATION = (0.8, 1.25), 0.05, 0.97


@dataclass(frozen=True)
class Row:
    """A published run."""

    name: str
    source: str
    model: str
    device: str
    gpus: int
    tensor: int
    pipeline: int
    batch: int
    microbatch: int
    virtual: int
    recompute: str
    sharding: str
    seconds: float = 0.0
    tflops: float = 0.0
    counting: str = ""
    gradients: str = "bfloat16"

    @property
    def replicas(self) -> int:
        return self.gpus // self.tensor // self.pipeline

    def measured(self, sizes: Sizes) -> float:
        """Seconds of a step as published."""
        return self.seconds or step_flops(sizes, self.batch, self.counting) / self.gpus / (self.tflops * 1e12)

    def options(self) -> PipelineOptions:
        """The run, as settings of the planner."""
        return PipelineOptions(
            self.pipeline,
            self.batch // self.replicas // self.microbatch,
            memory_weight=0.0,
            device=self.device,
            optimizer="adamw-fp32-master-wide-grad" if self.gradients == "float32" else "adamw-fp32-master",
            tensor_parallel_degree=self.tensor,
            data_parallel_degree=self.replicas,
            shard_optimizer_state=self.sharding == "state",
            schedule="interleaved-1f1b" if self.virtual > 1 else "1f1b",
            virtual_pipeline_degree=self.virtual,
            recompute=("layers.*",) if self.recompute == "full" else (),
        )


def step_flops(sizes: Sizes, batch: int, counting: str) -> float:
    """FLOPs of a step as its source counts them: see rows.toml."""
    b, s, h, layers, vocabulary = batch, sizes.sequence, sizes.width, sizes.layers, sizes.vocabulary
    if counting == "recompute":
        return 96.0 * b * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in LanguageModel(sizes).parameters())
    return b * s * (6.0 * parameters + 6.0 * layers * h * s)


def predicted(row: Row, sizes: Sizes) -> StepParts:
    """The parts of the run's step."""
    with torch.device("meta"):
        model = LanguageModel(sizes).to(torch.bfloat16)
        ids = torch.empty(row.microbatch, sizes.sequence, dtype=torch.long)
    options = row.options()
    traced = rewrite_trace(record(model, (ids,)), options, Sharing.of(model, options))
    planned = plan_trace(traced, options, prove=False)
    assert planned.traced is not None
    return step_parts(planned.traced, planned.plan, planned.timeline, StepSurroundings.of(options), options.recompute)


def load(path: Path = ROWS) -> tuple[list[Row], dict[str, Sizes]]:
    """The rows and the models of a file."""
    data: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Row(**row) for row in data["rows"]], {name: Sizes(**sizes) for name, sizes in data["models"].items()}


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The rank correlation of two lists."""
    ranks = [[sorted(values).index(value) for value in values] for values in (a, b)]
    return statistics.correlation(*ranks) if len(a) > 1 else math.nan


def show(row: Row, parts: StepParts, measured: float) -> None:
    shares = ", ".join(
        f"{name} {getattr(parts, name) / parts.total:.0%}"
        for name in ("compute", "bubble", "waiting", "tensor", "data", "optimizer")
    )
    print(
        f"{row.name:24} predicted {parts.total:6.2f} s   published {measured:6.2f} s   ratio {parts.total / measured:.2f}   "
        f"MFU {parts.mfu:.1%}   {shares}",
        flush=True,
    )


def plot(path: str, found: Sequence[tuple[Row, float, float]]) -> None:
    """Predicted over published times."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 6))
    for source in dict.fromkeys(row.source for row, *_ in found):
        pairs = [(measured, time) for row, time, measured in found if row.source == source]
        axes.scatter(*zip(*pairs, strict=True), label=source)
    ends = [min(measured for *_, measured in found) / 1.5, max(measured for *_, measured in found) * 1.5]
    for ratio in (1.0, *RATIOS):
        axes.plot(ends, [ratio * end for end in ends], "k-" if ratio == 1.0 else "k:", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="published step (s)", ylabel="predicted step (s)")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="names of rows, such as 'Llama*'")
    parser.add_argument("--plot", help="a .png file")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    rows, models = load()
    found = []
    for row in rows:
        if fnmatch.fnmatch(row.name, args.rows):
            parts, measured = predicted(row, models[row.model]), row.measured(models[row.model])
            show(row, parts, measured)
            found.append((row, parts.total, measured))
    ratios = [time / measured for _, time, measured in found]
    median, correlation = statistics.median(ratios), spearman(*zip(*[pair[1:] for pair in found], strict=True))
    print(
        f"{len(found)} rows: ratios {min(ratios):.2f} to {max(ratios):.2f}, median {median:.2f}, Spearman {correlation:.3f}"
    )
    if args.plot:
        plot(args.plot, found)
    good = min(ratios) >= RATIOS[0] and max(ratios) <= RATIOS[1] and abs(median - 1) <= MEDIAN
    return 0 if not args.check or (good and correlation >= CORRELATION) else 1


if __name__ == "__main__":
    sys.exit(main())
