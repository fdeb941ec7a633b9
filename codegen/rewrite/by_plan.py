"""From a recorded model and what its user asks of tensor parallelism to the trace of one of the ranks that share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from smpc.codegen.rewrite.outputs import keep_outputs
from smpc.codegen.rewrite.plan import choose_by_plan, find_plan
from smpc.codegen.rewrite.tensor_parallel import ShardedTrace, rewrite
from smpc.errors import ConfigError
from smpc.tracer.ir import Trace


def rewrite_by_plan(
    model: nn.Module, trace: Trace, degree: int, plan: str | Mapping[str, str], outputs: Sequence[str] | None
) -> ShardedTrace | None:
    """The trace as `degree` ranks share it; None where nothing is shared.

    `plan`: "auto", "huggingface", "off" or styles by name pattern, see `smpc.codegen.rewrite.plan`. `outputs` are the only tensors that are
    returned whole, by default all. Raises ConfigError for a degree below 1, and for a plan or outputs without effect.
    """
    if degree < 1:
        raise ConfigError(f"tensor_parallel_degree: expected at least 1, found {degree}")
    if degree == 1:
        if plan not in ("auto", "off") or outputs is not None:
            raise ConfigError(
                "tensor_parallel_plan and tensor_parallel_outputs have no effect with tensor_parallel_degree 1; leave them out, or set "
                "the degree"
            )
        return None
    styles = find_plan(model, plan)
    trace = trace if outputs is None else keep_outputs(trace, outputs)
    return rewrite(trace, choose_by_plan(trace, degree, styles))
