"""The functions and classes that `import smpc` gives.

    plan = smpc.partition(model, sample_inputs, pipeline_parallel_degree=4, microbatches=8)
    print(plan.to_json())

needs no process group and allocates nothing: a model on the meta device will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from smpc.auto import Search, search
from smpc.callbacks import ProgressLine, TensorBoard
from smpc.compile import Compilation, PipelineOptions, compile_model
from smpc.observe import StepInfo
from smpc.partitioner.device import Device
from smpc.partitioner.plan import Plan
from smpc.runtime import LoopbackRuntime, Runtime
from smpc.tracer import mark_leaf, register_shape_rule


def partition(
    model: nn.Module,
    sample_inputs: Any,
    *,
    pipeline_parallel_degree: int,
    microbatches: int = 1,
    pipeline: str = "interleaved",
    schedule: str | None = None,
    virtual_pipeline_degree: int | None = None,
    memory_weight: float = 0.8,
    active_microbatches: int | None = None,
    device: str | Device | Sequence[str | Device] = "h100",
    optimizer: str = "adam",
    memory_limit: str | int | None = None,
    trace_execution_times: bool = False,
    trace_memory_usage: bool = False,
    leaf_modules: Sequence[str] = (),
) -> Plan:
    """The plan for a model: stages, what crosses between them, predicted memory and time.

    `sample_inputs` are one whole batch: a tensor, a tuple of arguments, a dict of keyword arguments, or a (tuple, dict) pair of both;
    `microbatches` must divide its size along axis 0. The other arguments are those of SMP's configuration: `pipeline` is
    "interleaved" or "simple", `memory_weight` in [0, 1] weighs balanced memory against balanced time, `active_microbatches` limits
    how many microbatches are in execution at a time (default: ranks + 2). `schedule` names one of docs/schedules.md, or a .csv file,
    and wins over `pipeline`; `virtual_pipeline_degree` is the number of stages on each rank. `leaf_modules` names modules to be
    called whole, with nothing recorded inside.

    `device` is what times are predicted for: "h100", "h200", "a100", "l4", "cpu", a .toml file or a `Device`, or one of
    them for each rank (docs/planner.md);
    `optimizer` what memory is: "sgd", "sgd-momentum", "adam", "adamw", "adamw-fp32-master" and others. `memory_limit` is the most that
    a rank may hold at its predicted peak: "80GB", or a number of bytes. With `trace_execution_times` times are measured on the device
    that the model is on, not predicted; with `trace_memory_usage` so is what operations take and give back while they work.

    Raises ConfigError, TraceError or PartitionError; each says what was expected and what to do.
    """
    return compile_model(
        model,
        sample_inputs,
        pipeline_parallel_degree=pipeline_parallel_degree,
        microbatches=microbatches,
        pipeline=pipeline,
        schedule=schedule,
        virtual_pipeline_degree=virtual_pipeline_degree,
        memory_weight=memory_weight,
        active_microbatches=active_microbatches,
        device=device,
        optimizer=optimizer,
        memory_limit=memory_limit,
        trace_execution_times=trace_execution_times,
        trace_memory_usage=trace_memory_usage,
        leaf_modules=leaf_modules,
    ).plan


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
    "compile_model",
    "mark_leaf",
    "partition",
    "register_shape_rule",
    "search",
]
