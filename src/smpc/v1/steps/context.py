"""The context of a model's steps, which is passed to all code that runs in them, and the work that waits for them.

Terms
    calls     what `model(...)` and `model.backward(...)` do now; None outside of step functions
    divisor   what gradients are divided by, beside the loss scale, and in `join`
    cut       by the first step, a model with a pipeline; from the start, one without

`ModelHooks` is work that waits for the partition of a model, or for the end of its first step: optimizer states loaded earlier, and
hooks of the script.

    register_post_partition_hook, states of the optimizer before the first step ... first step: cut, `run`, then the program
    register_post_step_hook                                                     ... after the first step

States come in the order in which they were loaded. Their fp32 masters are parameters' values, too: a parameter that the script has
written since then keeps what was written, as it came last.

A hook gets the model and the script's DistributedOptimizer, None if there is none.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smpc.executor.failure.start import StartPhase
from smpc.nn.script_writes.between_steps import plain_parameters
from smpc.observe.observer import Observer
from smpc.sharding.dtensors import local
from smpc.v1.layout.experts import DividedExperts
from smpc.v1.layout.found_tensor_parallelism import CompiledTensors
from smpc.v1.layout.placement import Placement, digest_of
from smpc.v1.layout.tensor_parallel import Distribution
from smpc.v1.session.precision import Precision
from smpc.v1.session.process_state import Script, Session
from smpc.v1.session.supervision import Supervision
from smpc.v1.session.wait_limits import enter
from smpc.v1.steps.context_parallel import SharedSequences
from smpc.v1.steps.model_calls import KeptOutputs, ModelCalls

if TYPE_CHECKING:
    from smpc.v1.steps.join.join import Join
    from smpc.v1.steps.results import Losses


Hook = Callable[[Any, Any], Any]


Mark = tuple[int, str] | None  # changes when a parameter is written, also through `.data`; None if it has no values yet


def _mark(parameter: Tensor) -> Mark:
    return None if parameter.is_meta else (parameter._version, digest_of(parameter))


@dataclass(slots=True)
class EarlyLoad:
    """A state that was loaded before the partition. `marks`: by name, of the parameters that it writes, from when it was loaded.

    `kept`: the parameters that the script has written since.
    """

    load: Callable[[], object]
    marks: dict[str, Mark]
    kept: tuple[str, ...] = ()

    def look(self, model: nn.Module) -> None:
        """Before the partition: which parameters were written."""
        pairs = ((name, self.marks.get(name), parameter) for name, parameter in model.named_parameters())
        self.kept = tuple(name for name, mark, parameter in pairs if mark is not None and mark != _mark(parameter))

    @torch.no_grad()
    def run(self, model: Any) -> None:
        """Load it."""
        own = dict(model.local_named_parameters()) if self.kept else {}
        values = {name: local(own[name]).detach().clone() for name in self.kept if name in own}
        self.load()
        for name, value in values.items():
            local(own[name]).copy_(value)


class ModelHooks:
    """The hooks of `model`, the DistributedModel."""

    def __init__(self, model: Any, script: Script) -> None:
        self._model, self._script = model, script
        self._post_partition: OrderedDict[int, Hook] = OrderedDict()  # RemovableHandle wants this class
        self._post_step: OrderedDict[int, Hook] = OrderedDict()
        self.early: list[EarlyLoad] = []
        self.have_run = self.have_stepped = False

    def register_post_partition(self, hook: Hook) -> RemovableHandle:
        """Run `hook` with the others, or now if they have run."""
        handle = RemovableHandle(self._post_partition)
        self._post_partition[handle.id] = hook
        if self.have_run:
            hook(self._model, self._script.optimizer)
        return handle

    def register_post_step(self, hook: Hook) -> RemovableHandle:
        """Run `hook` after the first step, or now if that is done."""
        handle = RemovableHandle(self._post_step)
        self._post_step[handle.id] = hook
        if self.have_stepped:
            hook(self._model, self._script.optimizer)
        return handle

    def defer(self, load: Callable[[], object], *, has_masters: bool) -> None:
        """Call `load` in the first step; it fills in the optimizer's state, with masters parameters, too."""
        marks = {name: _mark(parameter) for name, parameter in self._model.named_parameters()} if has_masters else {}
        self.early.append(EarlyLoad(load, marks))
        self._script.awaits_optimizer = True

    def before_partition(self) -> None:
        """In the first step, while parameters are where the script has written them."""
        for early in self.early:
            early.look(self._model)

    def run(self) -> None:
        """In the first step, once the model is cut and before anything runs."""
        enter(StartPhase.STEP, "running it")
        self.have_run = True
        optimizer = self._script.optimizer
        if optimizer is not None:
            optimizer.prepare()
        loads, self.early = self.early, []
        for early in loads:
            early.run(self._model)
        if optimizer is not None:
            optimizer.tell_others()  # the optimizer reported before this step may differ from the loaded one
        self._script.awaits_optimizer = False
        for hook in list(self._post_partition.values()):
            hook(self._model, optimizer)

    def after_step(self) -> None:
        """Run the hooks that wait for the end of the first step: called after it."""
        self.have_stepped = True
        for hook in list(self._post_step.values()):
            hook(self._model, self._script.optimizer)


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
        """On a step's losses, unless they are those of another replica."""
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
