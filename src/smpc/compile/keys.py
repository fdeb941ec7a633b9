"""The planner's options that no script sets: what times and memory are predicted for, and how a compilation goes about it.

`smpc.compile.options.PipelineOptions` inherits them, beside the options of `smpc.config.planner`. Nothing here imports torch, so that
`smpc compile --help` and wrong usage answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from smpc.config.key import Flag, key
from smpc.config.numbers import MAX_RANKS
from smpc.config.planner import CONTEXT_LAYOUTS, CONTEXT_METHODS, PlannerKeys

if TYPE_CHECKING:
    from smpc.partitioner.costs.device import Device
    from smpc.partitioner.costs.named_optimizers import Optimizer
    from smpc.partitioner.manual import ManualPartition


@dataclass(frozen=True, slots=True)
class CompilationKeys(PlannerKeys):
    """How to cut and schedule a model, with what only the compiler is told."""

    _: KW_ONLY
    device: str | Device | Sequence[str | Device] = key(
        "h100",
        "What times and memory are predicted for: the name of a device, a .toml file or a `Device`; one for all pipeline ranks, or one for "
        "each (docs/planner.md)",
        flag=Flag(
            "Predict times for h100 (default), h200, a100, l4, cpu or FILE.toml. Repeatable, one for each rank: 2xh100, a100.",
            metavar="NAME|FILE",
            repeatable=True,
            is_searched=True,
            is_apart=True,
        ),
    )
    optimizer: str | Optimizer = key(
        "adam",
        "What memory is predicted for: sgd, sgd-momentum, adam, adamw, adamw-fp32-master and others (docs/planner.md)",
        flag=Flag(
            "Predict memory for sgd, sgd-momentum, adam (default; adamw-fp32-master with fp16 or bf16 in the configuration), adamw, ...",
            metavar="NAME",
            is_searched=True,
        ),
    )
    trace_execution_times: bool = key(
        False,
        "Times are measured on the device that the model is on, not predicted",
        flag=Flag("Measure times on this machine instead of predicting them."),
    )
    trace_memory_usage: bool = key(
        False,
        "Measure the workspace of operations, which is otherwise left out, on the device of the model",
        flag=Flag("Measure the workspace of operations on this machine."),
    )
    memory_limit: str | int | None = key(
        None,
        "The most that a rank may hold at its predicted peak: '80GB', or a number of bytes",
        flag=Flag("Most that a rank may hold at its peak, such as 80GB.", metavar="SIZE", is_searched=True),
    )
    data_parallel_degree: int = key(
        1,
        "Number of replicas of the pipeline, each with a batch like this. Their gradients are summed in buckets, which take memory; with "
        "shard_optimizer_state they split the optimizer state among them, with fully_shard that, parameters and gradients, and have no "
        "buckets (docs/data_parallel.md)",
        minimum=1,
        limit=MAX_RANKS,
        flag=Flag("Replicas, which need memory for buckets.", "-d", "D", shows_default=True),
    )
    recompute: Sequence[str] = key(
        (),
        "Patterns of names of modules, such as 'model.layers.*', whose activations are computed again for the backward pass, beside those "
        "that the model asks for (docs/activation_checkpointing.md)",
        flag=Flag(
            "Checkpoint the modules of these names, such as 'model.layers.*': their activations are computed again. Repeatable.",
            metavar="PATTERN",
            repeatable=True,
        ),
    )
    context_parallel_attention: str = key(
        "auto",
        "How context-parallel ranks compute attention: `p2p`, `all_gather`, `a2a`, or `auto`, the cheapest (docs/context_parallelism.md)",
        options=CONTEXT_METHODS,
        flag=Flag("With -c, how attention is computed: p2p, all_gather, a2a or auto (default).", metavar="NAME"),
    )
    context_parallel_layout: str = key(
        "auto",
        "Which slices of a sequence context-parallel ranks have: `contiguous`, `zigzag`, or `auto`, zigzag for causal attention",
        options=CONTEXT_LAYOUTS,
        flag=Flag("With -c, slices of sequences: contiguous, zigzag or auto (default).", metavar="NAME"),
    )
    manual: ManualPartition | None = key(None, "Ranks of modules by name: `smpc.partitioner.manual`")
    leaf_modules: Sequence[str] = key((), "Names of modules that are called whole, with nothing recorded inside")
