"""The planner's options that are also keys of a script's configuration: each is declared here, once.

`smpc.config.Config` and `smpc.compile.options.PipelineOptions` inherit them, and the arguments of `smpc.compile_model` and the options of
`smpc compile` are made from the latter. Options that a script cannot set are declared there. To add an option, add a field to one of the
two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from smpc.config.key import Flag, key
from smpc.config.numbers import MAX_COUNT, MAX_MICROBATCHES, MAX_PIECES, MAX_PIPELINE_RANKS, MAX_RANKS

CONTEXT_METHODS = ("auto", "p2p", "all_gather", "a2a")  # how context-parallel ranks compute attention
CONTEXT_LAYOUTS = ("auto", "contiguous", "zigzag")  # which slices of a sequence ranks have


@dataclass(frozen=True, slots=True)
class PlannerKeys:
    """How to cut and schedule a model: the options that a script can set."""

    pipeline_parallel_degree: int = key(
        1,
        "Number of pipeline ranks that the model is split over; `partitions` is an alias",
        minimum=1,
        limit=MAX_PIPELINE_RANKS,
        required=True,
        flag=Flag("Ranks to split the model over.", "-p", "P"),
    )
    microbatches: int = key(
        1,
        "Microbatches that a batch is split into; it must divide the batch size",
        minimum=1,
        limit=MAX_MICROBATCHES,
        flag=Flag("Microbatches that the batch is split into.", "-m", "M"),
    )
    pipeline: str = key(
        "interleaved",
        "The pipeline schedule",
        options=("interleaved", "simple"),
        flag=Flag("Schedule: interleaved or simple."),
    )
    memory_weight: float | None = key(
        None,
        "Weight of balancing memory, against balancing computation, when the model is cut. By default the fastest plan that fits the "
        "device is taken",
        minimum=0.0,
        maximum=1.0,
        flag=Flag(
            "0: balance computation alone; 1: memory alone. Default: the fastest plan that fits; with --config as that says.",
            metavar="W",
        ),
    )
    active_microbatches: int | None = key(
        None,
        "Most microbatches in execution at a time; never more than `microbatches`. By default pipeline_parallel_degree + 2",
        minimum=1,
        limit=MAX_MICROBATCHES,
        flag=Flag("Most microbatches in execution at a time.", metavar="A"),
    )
    _: KW_ONLY
    schedule: str | None = key(
        None,
        "The pipeline schedule by a name of docs/schedules.md, or a .csv file in the format of "
        "torch.distributed.pipelining; it wins over `pipeline`. By default what `pipeline` says",
        flag=Flag(
            "gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, list or a file; wins over --pipeline.",
            metavar="NAME|FILE.csv",
        ),
    )
    virtual_pipeline_degree: int | None = key(
        None,
        "Number of pieces of the model on each pipeline rank. By default what the schedule needs, which is 2 for "
        "interleaved-1f1b and zb-v, what a file has, else 1",
        minimum=1,
        limit=MAX_PIECES,
        flag=Flag("Pieces of the model per rank.", "-v", "V"),
    )
    tensor_parallel_degree: int = key(
        1,
        "Number of ranks that share every operation of a stage: plan and programs describe one of them",
        minimum=1,
        limit=MAX_RANKS,
        flag=Flag("Ranks that share every operation of a stage.", "-t", "T", is_apart=True),
    )
    tensor_parallel_plan: str | Mapping[str, str] = key(
        "auto",
        "What tensor-parallel ranks split: `auto`, `huggingface` (the model's own plan), `off` or styles by name pattern "
        "(docs/tensor_parallel_compiler.md)",
        flag=Flag(
            "auto (default), huggingface (the model's own), or styles by name pattern.",
            metavar="NAME|FILE.json",
            is_apart=True,
        ),
    )
    tensor_parallel_outputs: Sequence[str] | None = key(
        None,
        "The only tensors that tensor-parallel ranks return whole, such as ('loss',), so that logits need not be gathered; None in place "
        "of others. By default all",
        flag=Flag(
            "With -t, return this tensor only, such as loss: logits are then never gathered. Repeatable.",
            metavar="NAME",
            repeatable=True,
            is_apart=True,
        ),
    )
    draw_as_one_process: bool = key(
        False,
        "Whether ranks that share operations draw random numbers as one process does, so that dropout drops the same elements: every rank "
        "draws for the whole (docs/tensor_parallel_compiler.md)",
        flag=Flag("Ranks that share operations drop the same elements as one process.", is_apart=True),
    )
    expert_parallel_degree: int = key(
        1,
        "Number of ranks that experts of a mixture are divided over, each with its own batch (docs/expert_parallelism.md); it divides the "
        "data-parallel replicas x context_parallel_degree; a script requires ddp",
        minimum=1,
        limit=MAX_RANKS,
        flag=Flag("Ranks, among those of -d and -c, over which experts are divided.", "-e", "E", is_apart=True),
    )
    context_parallel_degree: int = key(
        1,
        "Number of ranks that share every sequence (docs/context_parallelism.md): parameters are whole, plan and programs describe "
        "one of them; a script requires ddp",
        minimum=1,
        limit=MAX_RANKS,
        flag=Flag("Ranks that share every sequence.", "-c", "C", is_apart=True),
    )
    skip_tracing: bool = key(
        False,
        "Cut the model by parameter sizes and the order of its modules alone, and not by what is recorded of them (recording allocates no "
        "parameters, and programs are made from it, so it is done all the same)",
        flag=Flag("Cut by parameter sizes and the order of modules alone."),
    )
    shard_optimizer_state: bool = key(
        False,
        "Split optimizer state and masters over the data-parallel ranks that hold the same parameters, balanced by size; requires ddp",
        flag=Flag("Replicas split the optimizer state among them.", is_searched=True, is_apart=True),
    )
    sharded_data_parallel_degree: int = key(
        1,
        "Number of ranks that parameters, gradients and optimizer state are split over; beyond it there are replicas. Requires ddp",
        minimum=1,
        limit=MAX_RANKS,
        flag=Flag(
            "Ranks of the replicas that split parameters, gradients and optimizer state among them.",
            metavar="N",
            is_apart=True,
        ),
    )
    fully_shard: bool = key(
        False,
        "Whether replicas hold parts of each stage's parameters, gradients and optimizer state, and gather parameters for a step "
        "(torch's fully_shard); requires ddp",
        flag=Flag("Replicas split parameters, gradients and optimizer state among them."),
    )
    offload_activations: bool = key(
        False,
        "Whether activations of checkpointed modules wait for their backward pass in CPU memory",
        flag=Flag("Keep what checkpointed modules read in CPU memory meanwhile."),
    )
    activation_loading_horizon: int = key(
        4,
        "How many pipeline tasks ahead of its backward pass an offloaded activation is loaded back",
        minimum=1,
        limit=MAX_COUNT,
        flag=Flag("Load it back so many pipeline tasks ahead of the backward pass.", metavar="N"),
    )
    kernels: str | Sequence[str] = key(
        "auto",
        "Which fused operations of docs/kernels.md replace what the model computes: `auto` for those known to be quicker "
        "on the device, `off`, or names separated by commas",
        flag=Flag(
            "Fused operations to replace what the model computes by, such as rms_norm,swiglu; auto: those known to be quicker.",
            metavar="auto|off|NAMES",
        ),
    )
