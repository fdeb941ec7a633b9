"""The changes of `tsm.init` to what torch does with the gradients of a model of which ranks have parts; part of `fsdp_patch`.

    a script calls                            of slices of `transform`                 of FSDP1's shards
    torch.nn.utils.clip_grad_norm_            the norm of all ranks                    refused: the model's own method is right
    clip_grad_norm_ of FSDP1                  the norm of all ranks, of slices, too    torch's
    torch.nn.utils.get_total_norm             refused                                  refused
    torch.amp.GradScaler                      an overflow of one rank counts for all   the same
    DistributedDataParallel                   averages over ranks with the same slices
    the first step of an optimizer            refused if an element's update depends on others of the parameter

By themselves these see this rank's part and no more, so that ranks take other steps. Tensors that are whole here, and DTensors that know of
all ranks, are left to torch.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smpc.errors import ConfigError, ConfigUnsupportedError, UsageError
from smpc.mesh import Axis
from smpc.optimizers import NormGroups
from smpc.optimizers.elementwise import is_elementwise, is_elementwise_in_trial
from smpc.optimizers.torch_clipping import Tensors, listed, replace_clipping
from smpc.v2.grad_norm import clip_shared
from smpc.v2.state_handler import Session
from smpc.v2.transforming.slices import plain_name, slices_of, transformed_models

_units: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()


def note_unit(unit: FullyShardedDataParallel) -> None:
    """A unit of FSDP1 was made."""
    _units.add(unit)


def patch_gradients(session: Session) -> list[Callable[[], None]]:
    """Patch torch for a session; the functions that take it back."""
    hook = register_optimizer_step_pre_hook(_check_optimizer)
    return [replace_clipping(_MAKERS), _patch_fsdp1_clipping(), _patch_scaler(), _patch_replicas(session), hook.remove]


# -- what ranks have parts of ----------------------------------------------------------------------------------------------


def _sliced(tensors: Iterable[Tensor]) -> nn.Module | None:
    """The transformed model that one of the tensors, parameters or gradients, is a slice of; None if all are whole."""
    given = {id(tensor) for tensor in tensors}
    for model in transformed_models():
        parts = dict(slices_of(model) or {})
        for name, parameter in model.named_parameters():
            if given.isdisjoint((id(parameter), id(parameter.grad))):
                continue
            part = parts.get(plain_name(name))
            if part is not None and not (isinstance(parameter, DTensor) and tuple(parameter.shape) == part.shape):
                return model
    return None


def _has_slices(tensors: Iterable[Tensor]) -> nn.Module | None:
    """The transformed model that one of the tensors, parameters or gradients, belongs to; None if they are of other models."""
    given = {id(tensor) for tensor in tensors}
    for model in transformed_models():
        own = {id(each) for parameter in model.parameters() for each in (parameter, parameter.grad) if each is not None}
        if not given.isdisjoint(own):
            return model
    return None


def _unit_of(tensors: Iterable[Tensor]) -> Any:
    """A unit of FSDP1 that shards one of the tensors, parameters or gradients; None if no unit does."""
    given = {id(tensor) for tensor in tensors}
    for unit in _units:
        handle = unit._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        held = [handle.flat_param, *(handle.flat_param._params or ())]
        if not given.isdisjoint(id(each) for tensor in held for each in (tensor, tensor.grad)):
            return unit
    return None


# -- clipping --------------------------------------------------------------------------------------------------------------

_INSTEAD = "call model.clip_grad_norm_(max_norm) of FullyShardedDataParallel, or smpc.v2.grad_norm.clip_grad_norm_(model, max_norm)"


def _clip_grad_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_norm_(
        parameters: Tensors,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        parameters, given = listed(parameters)
        if _unit_of(given) is not None:
            raise UsageError(
                "clip_grad_norm_: expected parameters that this rank has whole, found shards of FullyShardedDataParallel, whose norm would "
                f"be another one on each rank; {_INSTEAD}"
            )
        model = _has_slices(given)
        if model is None:
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        own = {id(parameter) for parameter in model.parameters()}
        strangers = sum(id(tensor) not in own for tensor in given)
        if strangers:
            raise UsageError(
                f"clip_grad_norm_: expected parameters of one transformed model, found {strangers} others among {len(given)}; ranks have "
                "slices of that model and all of the others: clip them in two calls"
            )
        only = {id(tensor.grad) for tensor in given if tensor.grad is not None}
        return clip_shared(model, float(max_norm), float(norm_type), only=only or {0}, finite=error_if_nonfinite)

    return clip_grad_norm_


def _get_total_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_total_norm(tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        tensors, given = listed(tensors)
        if _has_slices(given) is not None or _unit_of(given) is not None:
            raise UsageError(
                "get_total_norm: expected tensors that this rank has whole, found parts of a model whose other parts other ranks have; "
                "smpc.v2.grad_norm.clip_grad_norm_(model, float('inf')), on every rank, returns the norm of all gradients and changes none"
            )
        return original(tensors, *args, **kwargs)

    return get_total_norm


_MAKERS = {"clip_grad_norm_": _clip_grad_norm, "_get_total_norm": _get_total_norm}


def _patch_fsdp1_clipping() -> Callable[[], None]:
    """FSDP1's own norm is over its shards; with slices also over the ranks that have the others."""
    original = FullyShardedDataParallel.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(self: FullyShardedDataParallel, max_norm: float, norm_type: float = 2.0) -> Tensor:
        if slices_of(self) is None:
            return original(self, max_norm, norm_type)
        return clip_shared(self, float(max_norm), float(norm_type))

    FullyShardedDataParallel.clip_grad_norm_ = clip_grad_norm_  # type: ignore[method-assign]

    def undo() -> None:
        FullyShardedDataParallel.clip_grad_norm_ = original  # type: ignore[method-assign]

    return undo


# -- replicas --------------------------------------------------------------------------------------------------------------


def _patch_replicas(session: Session) -> Callable[[], None]:
    """DistributedDataParallel gives all ranks of its group the first one's parameters, so these have the same slices."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _has_slices(module.parameters()) is not None:
            given = inspect.signature(original).bind(self, module, *args, **kwargs).arguments
            own = _group_of_replicas(session, given.get("process_group"))
            if given.get("process_group") is None and given.get("device_mesh") is None:
                kwargs["process_group"] = own
        original(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]

    def undo() -> None:
        DistributedDataParallel.__init__ = original  # type: ignore[method-assign]

    return undo


def _group_of_replicas(session: Session, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ranks with this one's slices. An error for experts, and if the script has given ranks with other slices."""
    if session.mesh.size(Axis.EP) > 1:
        raise ConfigUnsupportedError(
            "DistributedDataParallel: expected ranks that have the same parameters, found expert_parallel_degree "
            f"{session.mesh.size(Axis.EP)}, where each has experts of its own; use FullyShardedDataParallel or fully_shard"
        )
    own = session.groups[Axis.RDP]
    if given is not None and not set(dist.get_process_group_ranks(given)) <= set(dist.get_process_group_ranks(own)):
        raise UsageError(
            f"DistributedDataParallel: expected a process group of ranks that have the same slices, "
            f"{dist.get_process_group_ranks(own)}, found {dist.get_process_group_ranks(given)}; leave process_group out"
        )
    return own


# -- loss scales and optimizers ----------------------------------------------------------------------------------------------


def _held_by(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _patch_scaler() -> Callable[[], None]:
    """Ranks whose parts are finite skip the step with those whose parts are not, and have the same scale afterwards."""
    original = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(original)
    def unscale_grads(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = original(self, optimizer, *args, **kwargs)
        held = _held_by(optimizer)
        unit = _unit_of(held)
        is_shared = _has_slices(held) is not None
        if unit is None and not is_shared:
            return found
        device = self._scale.device
        anywhere = torch.full((1,), max((float(each) for each in found.values()), default=0.0), device=device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, None if is_shared else unit.process_group)
        return {device: anywhere}

    torch.amp.GradScaler._unscale_grads_ = unscale_grads  # type: ignore[method-assign]

    def undo() -> None:
        torch.amp.GradScaler._unscale_grads_ = original  # type: ignore[method-assign]

    return undo


_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ConfigError before the first step of an optimizer that looks at whole parameters of which this rank has parts."""
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    held = _held_by(optimizer)
    parts = "slices of a transformed model" if _sliced(held) is not None else ""
    parts = parts or ("shards of FullyShardedDataParallel" if _unit_of(held) is not None else "")
    groups = getattr(optimizer, "norm_groups", None)
    if not parts or is_elementwise(optimizer) or (isinstance(groups, NormGroups) and groups.shard_group is not None):
        return
    if not is_elementwise_in_trial(optimizer):
        _checked.discard(optimizer)
        raise ConfigError(
            f"{type(optimizer).__name__}: expected an optimizer whose update of an element depends on that element alone, found one that "
            f"gives other values to the halves of a tensor than to the whole of it, for {parts}; use another optimizer such as AdamW, "
            "smpc.optimizers.FusedLamb with shard_group, or degrees with which each rank has whole parameters"
        )
