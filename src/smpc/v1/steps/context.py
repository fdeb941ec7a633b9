"""The context of a model's steps, which is passed to all code that runs in them.

Terms
    calls     what `model(...)` and `model.backward(...)` do now; None outside of step functions
    divisor   what gradients are divided by, beside the loss scale, and in `join`
    cut       by the first step, a model with a pipeline; from the start, one without
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from smpc.nn.script_writes.between_steps import plain_parameters
from smpc.observe.observer import Observer
from smpc.tracer.ir import Trace
from smpc.v1.layout.experts import DividedExperts
from smpc.v1.layout.found_tensor_parallelism import CompiledTensors
from smpc.v1.layout.placement import Placement
from smpc.v1.layout.tensor_parallel import Distribution
from smpc.v1.session.precision import Precision
from smpc.v1.session.process_state import Script, Session
from smpc.v1.session.supervision import Supervision
from smpc.v1.steps.context_parallel import SharedSequences
from smpc.v1.steps.model_calls import KeptOutputs, ModelCalls
from smpc.v1.steps.model_hooks import ModelHooks

if TYPE_CHECKING:
    from smpc.v1.steps.join.join import Join
    from smpc.v1.steps.results import Losses


@dataclass(frozen=True, slots=True)
class Measures:
    """The measurements of one rank before the model is cut, see `smp.DistributedModel`."""

    times: bool = False
    memory: bool = False

    def __bool__(self) -> bool:
        return self.times or self.memory


@dataclass(slots=True)
class StepContext:
    """The context of one model. `tensors`: None unless the compiler splits tensors over ranks. `sequences`: None unless ranks
    share sequences. `experts`: None unless ranks divide them. `join`: the enclosing `join`, if any. Between steps, slices, stages and
    what has masters notices what scripts write; in `ordinary()` all are ordinary."""

    module: nn.Module
    session: Session
    script: Script
    precision: Precision
    supervision: Supervision
    observer: Observer
    distribution: Distribution
    placement: Placement
    hooks: ModelHooks
    measures: Measures
    tensors: CompiledTensors | None
    sequences: SharedSequences | None
    experts: DividedExperts | None
    divisor: int
    is_cut: bool = False
    batch_bytes: int = 0  # of the arguments on this rank's device, in the step that cuts the model
    calls: ModelCalls | None = None
    trace: Trace | None = None  # of the program that runs, or ran last
    outputs: KeptOutputs | None = None  # where it is asked
    join: Join | None = None
    ordinary: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        mesh = self.session.mesh
        is_noticed = (
            mesh.tp_size > 1 or mesh.pp_size > 1 or self.experts is not None or self.precision.dtype is not None
        )
        self.ordinary = partial(plain_parameters, self.module) if is_noticed else nullcontext

    @property
    def scale(self) -> float:
        """What gradients of a step are divided by."""
        return self.divisor / self.precision.loss_scale * (1.0 if self.join is None else self.join.divisor)

    def verdict(self, losses: Losses) -> int:
        """The verdict on a step's losses; 0 if they are another replica's."""
        return 0 if self.join is not None and math.isinf(self.join.divisor) else losses.verdict(self.session)

    @property
    def has_program(self) -> bool:
        """Whether steps run compiled programs and not the model itself."""
        return self.session.mesh.pp_size > 1 or self.tensors is not None or self.sequences is not None

    @property
    def shares_parameters(self) -> bool:
        """Whether a loss may use parameters that this rank has parts of, without a pipeline (`shared_use_of`)."""
        return self.distribution.shares_parameters or self.experts is not None

    def shared_use_of(self, parameter: nn.Parameter) -> str:
        """What a use of a parameter by a loss itself, beside the model, would count wrongly; "" where it is right."""
        if self.sequences is not None:
            return "each rank that shares sequences would add its gradient"
        if self.distribution.is_sharded(parameter):
            return "this rank has a slice of one"
        if self.experts is not None and parameter in self.experts:
            return "this rank has those of some experts"
        return "ranks divide the gradient of one" if self.distribution.divides_gradient_of(parameter) else ""
