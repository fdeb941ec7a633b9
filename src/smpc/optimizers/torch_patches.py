"""torch's own functions for gradients, exchanged for others that know more of parameters, and a check of optimizers that are given parts.

    undo = replace_clipping({"clip_grad_norm_": lambda original: ...})
    undo = replace_method(DistributedDataParallel, "__init__", lambda original: ...)
    undo = patch_attribute(module, "name", value)             # by a value that does without the original
    undo = replace_unscaling(lambda parameters: [group])      # torch.amp.GradScaler: an overflow of one rank counts for all of the group

Several may exchange the same function: each calls what was there before it, and taking one back leaves the others in place.

Each of torch's functions that clip is `_no_grad(function)`, a closure over the inner function. The content of that cell is exchanged, so
that names imported earlier (`from torch.nn.utils import clip_grad_norm_`, accelerate) change, too, and no attribute of torch is replaced.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smpc.errors import ConfigError
from smpc.optimizers.elementwise import couples_parameters, is_elementwise, is_elementwise_in_trial
from smpc.optimizers.norm_groups import NormGroups

Tensors = Tensor | Iterable[Tensor]
Maker = Callable[[Callable[..., Any]], Callable[..., Any]]
Undo = Callable[[], None]


class _ExchangedFunction:
    """One function of torch's, and what is put in its place: a chain of makers over the original."""

    def __init__(self, original: Callable[..., Any], put: Callable[[Callable[..., Any]], None]) -> None:
        self._original, self._put = original, put
        self._makers: list[Maker] = []

    def add(self, make: Maker) -> Undo:
        self._makers.append(make)
        self._renew()

        def undo() -> None:
            if make in self._makers:
                self._makers.remove(make)
                self._renew()

        return undo

    def _renew(self) -> None:
        self._put(functools.reduce(lambda found, make: make(found), self._makers, self._original))


_exchanges: dict[tuple[object, str], _ExchangedFunction] = {}


def replace_clipping(makers: Mapping[str, Maker]) -> Undo:
    """Exchange functions of torch.nn.utils.clip_grad, by name, for what is made of each; the function that undoes it."""
    undos = [_clipping(name).add(make) for name, make in makers.items()]

    def undo() -> None:
        for each in reversed(undos):
            each()

    return undo


def _clipping(name: str) -> _ExchangedFunction:
    key = (clip_grad, name)
    if key not in _exchanges:
        cell = _cell_of(getattr(clip_grad, name))
        _exchanges[key] = _ExchangedFunction(
            cell.cell_contents, lambda function: setattr(cell, "cell_contents", function)
        )
    return _exchanges[key]


def _cell_of(wrapper: Any) -> Any:
    """The cell in which a function under `_no_grad` finds what it calls."""
    cells: tuple[Any, ...] = tuple(wrapper.__closure__ or ())
    assert len(cells) == 1, f"torch.nn.utils.{wrapper.__name__} is not what it was up to torch 2.13"
    return cells[0]


def clip_grad_norm_by(clip: Callable[[list[Tensor], float, float, bool], Tensor | None]) -> Maker:
    """Have `clip_grad_norm_` call `clip(tensors, max_norm, norm_type, error_if_nonfinite)` first; None leaves them to the original."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(
            parameters: Tensors,
            max_norm: float,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Any:
            if not torch.compiler.is_compiling():
                parameters, given = listed(parameters)
                norm = clip(given, max_norm, norm_type, error_if_nonfinite)
                if norm is not None:
                    return norm
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

        return clip_grad_norm_

    return make


def refuse_norms(parts_in: Callable[[Sequence[Tensor]], str]) -> Undo:
    """Have `clip_grad_norm_` raise ConfigError for parameters of which other ranks have the rest.

    `parts_in` the parameters: what parts they are, in words; empty, if there are no others.
    """

    def clip(given: list[Tensor], *_: object) -> None:
        parts = parts_in(given)
        if parts:
            raise ConfigError(
                f"clip_grad_norm_: expected all parameters whose gradients have one norm, found {parts}: each rank would clip by a norm "
                "of its own; add up the squares of all ranks' torch.nn.utils.get_total_norm with torch.distributed.all_reduce, each "
                "shared parameter once, and clip by the root of the sum: torch.nn.utils.clip_grads_with_norm_"
            )

    return replace_clipping({"clip_grad_norm_": clip_grad_norm_by(clip)})


def refuse_scaling(parts_in: Callable[[Sequence[Tensor]], str]) -> Undo:
    """Have `torch.amp.GradScaler` raise ConfigError for an optimizer of parameters of which other ranks have the rest.

    `parts_in` the optimizer's parameters: what parts they are, in words; empty, if there are no others.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            parts = parts_in(held_by(optimizer)) if self.is_enabled() else ""
            if parts:
                raise ConfigError(
                    f"GradScaler: expected all parameters whose overflows skip one step, found {parts}: the scale is known on the rank of "
                    "the loss alone, and a rank whose gradients are finite would step where another one skips; train in bf16 without a "
                    "scaler, or with smpc.v1, whose smp.amp.GradScaler asks all ranks"
                )
            return original(self, optimizer, *args, **kwargs)

        return checked

    undos = [replace_method(torch.amp.GradScaler, name, make) for name in ("unscale_", "step")]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def patch_attribute(owner: Any, name: str, value: Any) -> Undo:
    """Replace an attribute by a value; returns the function that undoes it."""
    original = vars(owner)[name]
    setattr(owner, name, value)
    return lambda: setattr(owner, name, original)


def replace_method(owner: type | types.ModuleType, name: str, make: Maker) -> Undo:
    """Exchange a method of a class, or a function of a module, for what is made of it; the function that undoes it."""
    key = (owner, name)
    if key not in _exchanges:
        _exchanges[key] = _ExchangedFunction(getattr(owner, name), lambda function: setattr(owner, name, function))
    return _exchanges[key].add(lambda original: functools.wraps(original)(make(original)))


def replace_unscaling(groups_of: Callable[[Sequence[Tensor]], Iterable[dist.ProcessGroup | None]]) -> Undo:
    """Have ranks whose gradients are finite skip the step of `torch.amp.GradScaler` together with ranks of a group whose gradients are not.

    `groups_of` the optimizer's parameters: the groups of ranks that hold parts of them (None: all ranks), alike on all of these ranks.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_grads(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            found = original(self, optimizer, *args, **kwargs)
            groups = list(groups_of(held_by(optimizer)))
            if not groups:
                return found
            device = self._scale.device
            anywhere = torch.full((1,), max((float(each) for each in found.values()), default=0.0), device=device)
            for group in groups:
                dist.all_reduce(anywhere, dist.ReduceOp.MAX, group)
            return {device: anywhere}

        return unscale_grads

    return replace_method(torch.amp.GradScaler, "_unscale_grads_", make)


def listed(given: Tensors) -> tuple[Tensors, list[Tensor]]:
    """The argument, to be passed on unchanged, and as a list."""
    if isinstance(given, Tensor):
        return given, [given]
    tensors = list(given)
    if isinstance(given, types.GeneratorType):
        return (tensor for tensor in tensors), tensors  # torch warns of empty ones
    return tensors, tensors


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_checks: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def check_optimizers(parts_in: Callable[[Sequence[Tensor]], str], way_out: str, *, are_whole: bool = False) -> Undo:
    """Have the first step of an optimizer that looks at whole parameters raise ConfigError where this rank has parts of them.

    `parts_in` the optimizer's parameters: what parts they are, in words; empty, if all are whole. `are_whole`: each parameter is whole,
    and others are elsewhere.
    """
    checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in checked:
            parts = parts_in(held_by(optimizer))
            if parts and are_whole and looks_at_others(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__}: expected an optimizer whose update of a parameter depends on that parameter alone, found "
                    f"one in which the gradient of one changes the update of another, for {parts}; use another optimizer, or {way_out}"
                )
            if parts and not are_whole and not _counts_all_parts(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__}: expected an optimizer whose update of an element depends on that element alone, found "
                    f"one that gives other values to the halves of a tensor than to the whole of it, or that looks at the gradients of all "
                    f"parameters (a norm over all, one step size that is found for all), for {parts}; use another optimizer "
                    f"such as AdamW, smpc.optimizers.FusedLamb with shard_group, or {way_out}"
                )
            checked.add(optimizer)

    _checks.add(check)
    return register_optimizer_step_pre_hook(check).remove


def is_check_of_optimizers(hook: Callable[..., Any]) -> bool:
    """Whether a hook of all optimizers is one of these, which read no parameter that belongs to another model."""
    return hook in _checks


def _counts_all_parts(optimizer: Optimizer) -> bool:
    groups = getattr(optimizer, "norm_groups", None)
    counts = isinstance(groups, NormGroups) and groups.shard_group is not None
    if counts or is_elementwise(optimizer):
        return True
    return is_elementwise_in_trial(optimizer) and not looks_at_others(optimizer)


def looks_at_others(optimizer: Optimizer) -> bool | None:
    """`couples_parameters`, of an optimizer that may clip by torch's functions, which count all ranks."""

    def no_norm(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: torch.zeros(())

    undo = replace_clipping({"clip_grad_norm_": no_norm, "_get_total_norm": no_norm})
    try:
        return couples_parameters(optimizer)
    finally:
        undo()
