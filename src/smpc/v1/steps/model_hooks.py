"""Work that waits for the partition of a model, or for the end of its first step: hooks, and optimizer states loaded earlier.

    register_post_partition_hook, states of the optimizer before the first step ... first step: cut, `run`, then the program
    register_post_step_hook                                                     ... after the first step

States come in the order in which they were loaded. Their fp32 masters are parameters' values, too: a parameter that the script has
written since then keeps what was written, as it came last.

A hook gets the model and the script's DistributedOptimizer, None if there is none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smpc.executor.failure.start import StartPhase
from smpc.sharding.dtensors import local
from smpc.v1.layout.placement import digest_of
from smpc.v1.session.process_state import Script
from smpc.v1.session.wait_limits import enter

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
