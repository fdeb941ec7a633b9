"""What fills a module that was made on the meta device: what its constructor and the constructors of the modules around it have run.

A model of Hugging Face's runs `_init_weights` of every module, inner ones first; one of them may fill what is in modules inside of it.

In other models a module's constructor runs its `reset_parameters`, and what is around it may fill it again: `nn.MultiheadAttention` its
output layer, a model all of its layers (`self.apply(self._init_weights)`):

    in this order                                            writes to a weight of a linear layer
    reset_parameters of the module                           1
    reset_parameters of a module around it                   1, if it fills the layers inside of it
    _init_weights(module) of a module around it              1

torch counts how often a tensor was written, on the meta device, too. A parameter that was written more often than all of these write it has
values that nothing here repeats. One that was written less often may be a copy, whose count began anew.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.init
from torch import Tensor, nn

Fill = Callable[[], object]
_Place = tuple[int, str]  # the identity of a module, and a name in it
_WRITES = "_smpc_num_writes"  # of a parameter on the meta device, which may be a part of one that was written
_TRUNCATED = "_no_grad_trunc_normal_"  # in torch.nn.init: it leaves the meta device alone


def note_writes(model: nn.Module) -> None:
    """Keep how often parameters on the meta device were written, before others are put in their place with their attributes."""
    for parameter in model.parameters():
        if parameter.is_meta:
            vars(parameter)[_WRITES] = parameter._version


def writes_of(parameter: Tensor) -> int:
    """How often a parameter on the meta device was written."""
    return max(parameter._version, int(vars(parameter).get(_WRITES, 0)))


def reset_of(module: nn.Module) -> Fill | None:
    """The method that fills a module as its constructor does; None if it has none."""
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next((method for method in found if callable(method)), None)


class Initializers:
    """What fills the modules of a model. `owners`: by the identity of a module, the model of Hugging Face's around it, if there is one."""

    def __init__(self, model: nn.Module, owners: Mapping[int, nn.Module]) -> None:
        self._owners = owners
        self._around: dict[int, tuple[nn.Module, ...]] = {id(model): ()}  # innermost first
        for module in model.modules():  # parents before their children
            for child in module.children():
                self._around.setdefault(id(child), (module, *self._around[id(module)]))
        self._written_by: dict[int, Mapping[_Place, int] | None] = {}

    def of(self, module: nn.Module, written: Mapping[str, float]) -> tuple[list[Fill], list[str]]:
        """What fills a module whose parameters are on the meta device, in order; and those that something else has written, too.

        `written`: how often each of them was, by its name in the module; infinity, if other modules have it, too.
        """
        if id(module) in self._owners:
            return [*self._of_hugging_face(module)], []
        left = dict(written)
        found: list[Fill] = []
        for at in (module, *self._around[id(module)]):
            for fill, counts in self._of_plain(at, module):
                left = {name: count - counts.get(name, 0) for name, count in left.items()}
                found.append(fill)
        return found, [name for name, count in left.items() if 0 < count < math.inf]

    def _of_hugging_face(self, module: nn.Module) -> Iterator[Fill]:
        for at in (module, *self._around[id(module)]):
            owner = self._owners.get(id(at))
            if owner is None:
                return
            init: Any = owner._init_weights
            fill = partial(init, at)
            counts = {} if at is module else self._writes(at, fill, truncates=True) or {}
            if at is module or any(place == id(module) for place, _ in counts):
                yield partial(_alone, fill, at, module)

    def _of_plain(self, at: nn.Module, module: nn.Module) -> Iterator[tuple[Fill, Mapping[str, int]]]:
        """What a module runs to fill itself, or one inside of it, and how often that writes the parameters of the latter."""
        reset = reset_of(at)
        if reset is not None:
            counts = _of_place(self._writes(at, reset, truncates=False) or {}, module)
            if at is module or counts:
                yield partial(_alone, reset, at, module), counts
        init = getattr(at, "_init_weights", None)
        if callable(init) and _takes_one(init):
            fill = partial(init, module)
            written = _tried(module, fill, truncates=False)
            if written is not None:
                yield partial(_alone, fill, module, module), _of_place(written, module)

    def _writes(self, at: nn.Module, fill: Fill, *, truncates: bool) -> Mapping[_Place, int] | None:
        if id(at) not in self._written_by:
            self._written_by[id(at)] = _tried(at, fill, truncates=truncates)
        return self._written_by[id(at)]


def _of_place(counts: Mapping[_Place, int], module: nn.Module) -> dict[str, int]:
    return {name: count for (place, name), count in counts.items() if place == id(module)}


def _takes_one(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _alone(fill: Fill, at: nn.Module, module: nn.Module) -> None:
    """Runs a function for a module in `at`: what the others have keeps its values."""
    with _others_on_meta(at, module):
        fill()


@contextmanager
def _others_on_meta(at: nn.Module, module: nn.Module | None) -> Iterator[None]:
    """In this context, what modules in `at` have, other than `module`, is on the meta device, and not yet written."""
    held = [(each, dict(each._parameters), dict(each._buffers)) for each in at.modules() if each is not module]
    try:
        for each, parameters, buffers in held:
            each._parameters.update({name: _fresh(one) for name, one in parameters.items()})
            each._buffers.update({name: _fresh(one) for name, one in buffers.items()})
        yield
    finally:
        for each, parameters, buffers in held:
            each._parameters.update(parameters)
            each._buffers.update(buffers)


def _fresh(tensor: Any) -> Any:
    if tensor is None:
        return None
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _tried(at: nn.Module, fill: Fill, *, truncates: bool) -> dict[_Place, int] | None:
    """How often a function writes each parameter in a module, all of it on the meta device; None if it fails there."""
    with _others_on_meta(at, None), _truncating_on_meta() if truncates else nullcontext():
        held = {(id(each), name): p for each in at.modules() for name, p in each._parameters.items() if p is not None}
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                fill()
        except Exception:  # it looks at values, or is something else than its name says
            return None
        return {place: parameter._version for place, parameter in held.items() if parameter._version}


@contextmanager
def _truncating_on_meta() -> Iterator[None]:
    """In this context, torch's truncated normal distribution counts as a write on the meta device, too."""
    own = vars(torch.nn.init).get(_TRUNCATED)
    if own is not None:
        setattr(torch.nn.init, _TRUNCATED, lambda tensor, *args, **kwargs: tensor.zero_())
    try:
        yield
    finally:
        if own is not None:
            setattr(torch.nn.init, _TRUNCATED, own)
