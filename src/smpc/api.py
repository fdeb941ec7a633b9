"""The functions and classes that `import smpc` gives.

    plan = smpc.partition(model, sample_inputs, pipeline_parallel_degree=4, microbatches=8)
    print(plan.to_json())

needs no process group and allocates nothing: a model on the meta device works too.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from smpc.callbacks import ProgressLine, TensorBoard, WandB
from smpc.compile.options import PipelineOptions, asked_of, takes_options
from smpc.compile.passes import compile_batch, compile_model
from smpc.compile.result import Compilation
from smpc.compile.search import Search, search
from smpc.observe.observer import StepInfo
from smpc.partitioner.graph.plan import Plan, plan_warnings
from smpc.report.notebook import ShownPlan
from smpc.runtime import LoopbackRuntime, Runtime
from smpc.tracer import mark_leaf, register_shape_rule


@takes_options
def partition(model: nn.Module, sample_inputs: Any, **options: Any) -> ShownPlan:
    """The plan for a model: stages, messages between them, predicted memory and time. A notebook shows it as the report.

    `sample_inputs` are one whole batch: a tensor, a tuple of arguments, a dict of keyword arguments, or a (tuple, dict) pair of both;
    `microbatches` must divide its size along axis 0. Raises TypeError for an unknown option, ConfigError, TraceError or PartitionError;
    each says what was expected and what to do.
    """
    asked = asked_of("partition", options)
    plan = ShownPlan.of(compile_batch(model, sample_inputs, asked), asked)
    for text in plan_warnings(plan):
        warnings.warn(text, stacklevel=2)
    return plan


__all__ = [
    "Compilation",
    "LoopbackRuntime",
    "PipelineOptions",
    "Plan",
    "ProgressLine",
    "Runtime",
    "Search",
    "StepInfo",
    "TensorBoard",
    "WandB",
    "compile_model",
    "mark_leaf",
    "partition",
    "register_shape_rule",
    "search",
]
