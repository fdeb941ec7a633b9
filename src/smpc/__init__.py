"""smpc: model-parallel training for PyTorch, a compiler with a runtime.

    plan = smpc.partition(model, sample_inputs, pipeline_parallel_degree=4)     a plan, without any process group
    import smpc.v1 as smp                                                       training scripts, SMP's own API
    smpc.alias()                                                                the same, imported by SMP's own name

Names are loaded when they are first used, so that importing smpc does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smpc.aliasing import alias
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
        WandB,
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
    "WandB",
    "__version__",
    "alias",
    "compile_model",
    "mark_leaf",
    "partition",
    "register_shape_rule",
    "search",
]

_ELSEWHERE = {"SmpcError": "smpc.errors", "alias": "smpc.aliasing"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'smpc' has no attribute {name!r}")
    found = getattr(importlib.import_module(_ELSEWHERE.get(name, "smpc.api")), name)
    globals()[name] = found  # the next use finds it there
    return found
