"""The options of `smpc compile`, one name each: what typer shows and parses."""

from __future__ import annotations

from typing import Annotated

import typer

Target = Annotated[
    str,
    typer.Argument(
        help="module:factory or file.py:factory, which returns (model, sample_inputs) or a model; "
        "or a Hugging Face config.json.",
        show_default=False,
    ),
]
PipelineParallelDegree = Annotated[
    int | None, typer.Option("-p", "--pipeline-parallel-degree", metavar="P", help="Ranks to split the model over.")
]
TensorParallelDegree = Annotated[
    int | None,
    typer.Option("-t", "--tensor-parallel-degree", metavar="T", help="Ranks that share every operation of a stage."),
]
TensorParallelPlan = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.json", help="auto (default), huggingface (the model's own), or styles by name pattern."
    ),
]
TensorParallelOutputs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="With -t, return this tensor only, such as loss: logits are then never gathered. Repeatable.",
    ),
]
Microbatches = Annotated[
    int | None, typer.Option("-m", "--microbatches", metavar="M", help="Microbatches that the batch is split into.")
]
Pipeline = Annotated[str | None, typer.Option(help="Schedule: interleaved or simple.")]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.csv",
        help="gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, list or a file; wins over --pipeline.",
    ),
]
VirtualPipelineDegree = Annotated[
    int | None, typer.Option("-v", "--virtual-pipeline-degree", metavar="V", help="Pieces of the model per rank.")
]
MemoryWeight = Annotated[float | None, typer.Option(metavar="W", help="0: balance computation alone; 1: memory alone.")]
ActiveMicrobatches = Annotated[int | None, typer.Option(metavar="A", help="Most microbatches in execution at a time.")]
Device = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Predict times for h100 (default), h200, a100, l4, cpu or FILE.toml. Repeatable, one for each rank: 2xh100, a100.",
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Predict memory for sgd, sgd-momentum, adam (default; adamw-fp32-master with fp16 or bf16 in the configuration), adamw, ...",
    ),
]
TraceExecutionTimes = Annotated[
    bool, typer.Option("--trace-execution-times", help="Measure times on this machine instead of predicting them.")
]
TraceMemoryUsage = Annotated[
    bool, typer.Option("--trace-memory-usage", help="Measure on this machine what operations take while they work.")
]
SkipTracing = Annotated[
    bool, typer.Option("--skip-tracing", help="Cut by parameter sizes and the order of modules alone.")
]
MemoryLimit = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most that a rank may hold at its peak, such as 80GB.")
]
DataParallelDegree = Annotated[
    int, typer.Option("-d", "--data-parallel-degree", metavar="D", help="Replicas, which need memory for buckets.")
]
ShardOptimizerState = Annotated[
    bool, typer.Option("--shard-optimizer-state", help="Replicas split the optimizer state among them.")
]
FullyShard = Annotated[
    bool, typer.Option("--fully-shard", help="Replicas split parameters, gradients and optimizer state among them.")
]
Recompute = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Checkpoint the modules of these names, such as 'model.layers.*': their activations are computed again. Repeatable.",
    ),
]
OffloadActivations = Annotated[
    bool, typer.Option("--offload-activations", help="Keep what checkpointed modules read in CPU memory meanwhile.")
]
ActivationLoadingHorizon = Annotated[
    int | None, typer.Option(metavar="N", help="Load it back so many pipeline tasks ahead of the backward pass.")
]
Kernels = Annotated[
    str | None,
    typer.Option(
        metavar="auto|off|NAMES",
        help="Fused operations to replace what the model computes by, such as rms_norm,swiglu; auto: those known to be quicker.",
    ),
]
Auto = Annotated[
    bool,
    typer.Option(
        "--auto", help="Search for the fastest way to train on --world-size ranks; the inputs are the global batch."
    ),
]
WorldSize = Annotated[int | None, typer.Option(metavar="N", help="Ranks in all, with --auto.")]
Config = Annotated[
    str | None, typer.Option(metavar="FILE", help="Settings, .json or .toml; options given here win over it.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="NAME=DTYPE[d0,d1]", help="A sample input by shape, the whole batch. Repeatable."),
]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")]
Out = Annotated[str | None, typer.Option(metavar="DIR", help="Write the plan, its report and the programs there.")]
Plot = Annotated[
    str | None, typer.Option(metavar="FILE.png", help="Draw the step and its memory there; needs matplotlib.")
]
