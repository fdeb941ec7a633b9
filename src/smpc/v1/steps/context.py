"""The context of a model's steps: made with the model, and passed to all code that runs in its steps.

Terms
    calls     what `model(...)` and `model.backward(...)` do now; None outside of step functions
    divisor   what gradients are divided by, beside the loss scale
    cut       by the first step, a model with a pipeline; from the start, one without
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from smpc.observe.observer import Observer
from smpc.v1.layout.compiled_tensors import CompiledTensors
from smpc.v1.layout.experts import DividedExperts
from smpc.v1.layout.placement import Placement
from smpc.v1.layout.tensor_parallel import Distribution
from smpc.v1.session.precision import Precision
from smpc.v1.session.state import Script, Session
from smpc.v1.session.supervision import Supervision
from smpc.v1.steps.calls import ModelCalls
from smpc.v1.steps.context_parallel import SharedSequences
from smpc.v1.steps.hooks import ModelHooks

if TYPE_CHECKING:
    from smpc.v1.steps.join import Join


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
    share sequences. `experts`: None unless ranks divide them. `join`: the enclosing `join`, if any."""

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
    calls: ModelCalls | None = None
    join: Join | None = None

    @property
    def has_program(self) -> bool:
        """Whether steps run compiled programs and not the model itself."""
        return self.session.mesh.pp_size > 1 or self.tensors is not None or self.sequences is not None
