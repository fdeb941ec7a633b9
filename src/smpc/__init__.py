"""smpc: model-parallel training for PyTorch, a compiler with a runtime.

    plan = smpc.partition(model, sample_inputs, pipeline_parallel_degree=4)     a plan, without any process group
    import smpc.v1 as smp                                                       training scripts, SMP's own API

Names are loaded when they are first used, so that importing smpc does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smpc.api import (
        Compilation,
        LoopbackRuntime,
        PipelineOptions,
        Plan,
        ProgressLine,
        Runtime,
        Search,
        StepInfo,
        TensorBoard,
        compile_model,
        mark_leaf,
        partition,
        register_shape_rule,
        search,
    )
    from smpc.errors import SmpcError

__version__ = "0.1.0"
__all__ = [
    "Compilation",
    "LoopbackRuntime",
    "PipelineOptions",
    "Plan",
    "ProgressLine",
    "Runtime",
    "Search",
    "SmpcError",
    "StepInfo",
    "TensorBoard",
    "__version__",
    "compile_model",
    "mark_leaf",
    "partition",
    "register_shape_rule",
    "search",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'smpc' has no attribute {name!r}")
    return getattr(importlib.import_module("smpc.errors" if name == "SmpcError" else "smpc.api"), name)
