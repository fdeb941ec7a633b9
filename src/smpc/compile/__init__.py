"""From a model to the programs of every rank: record, rewrite, plan, split, schedule, lower, prove.

    compilation = compile_model(model, sample_inputs, pipeline_parallel_degree=2, microbatches=4)
    print(compilation.plan.to_json())
    print(compilation.rank_source(1))

Sample inputs are one whole batch, in the forms of `smpc.sample_inputs`. Only shapes and dtypes count, so tensors on the meta device will
do, and so will a model on the meta device: nothing is allocated. `smpc.compile.passes` lists the passes in their order.
Names are loaded when they are first used, so that `smpc.compile.options` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smpc.compile.options import PipelineOptions
    from smpc.compile.passes import (
        ContextSharing,
        Sharing,
        compile_model,
        compile_plan,
        plan_trace,
        rewrite_trace,
        write_programs,
    )
    from smpc.compile.result import Compilation, Planned, Traced
    from smpc.partitioner.graph.plan import plan_warnings

__all__ = [
    "Compilation",
    "ContextSharing",
    "PipelineOptions",
    "Planned",
    "Sharing",
    "Traced",
    "compile_model",
    "compile_plan",
    "plan_trace",
    "plan_warnings",
    "rewrite_trace",
    "write_programs",
]

_ELSEWHERE = {
    "PipelineOptions": "smpc.compile.options",
    "plan_warnings": "smpc.partitioner.graph.plan",
} | dict.fromkeys(("Compilation", "Planned", "Traced"), "smpc.compile.result")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'smpc.compile' has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE.get(name, "smpc.compile.passes")), name)
