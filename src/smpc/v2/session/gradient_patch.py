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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_sharded_data_parallel
from torch.nn.parallel import DistributedDataParallel

from smpc.errors import ConfigUnsupportedError, UsageError
from smpc.in_place.model_copy import plain_name
from smpc.mesh import Axis
from smpc.optimizers.torch_patches import (
    Tensors,
    check_optimizers,
    clip_grad_norm_by,
    listed,
    replace_clipping,
    replace_method,
    replace_unscaling,
)
from smpc.v2.grad_norm import clip_shared
from smpc.v2.state_handler import Session
from smpc.v2.transforming.transformed_slices import slices_of, transformed_models

_units: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()


def note_unit(unit: FullyShardedDataParallel) -> None:
    """A unit of FSDP1 was made."""
    _units.add(unit)


def patch_gradients(session: Session) -> list[Callable[[], None]]:
    """Patch torch for a session; the functions that take it back."""
    return [
        replace_clipping(_MAKERS),
        replace_method(FullyShardedDataParallel, "clip_grad_norm_", _clip_grad_norm_of_fsdp1),
        replace_method(fully_sharded_data_parallel, "_get_grad_norm", _norm_in_fp64),
        replace_method(DistributedDataParallel, "__init__", functools.partial(_replicated, session)),
        replace_unscaling(_groups_of_parts),
        check_optimizers(_parts_in, "degrees with which each rank has whole parameters"),
    ]


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
            if part is not None and not part.is_whole(parameter):
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


def _clip(given: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor | None:
    if _unit_of(given) is not None:
        raise UsageError(
            "clip_grad_norm_: expected parameters that this rank has whole, found shards of FullyShardedDataParallel, whose norm would "
            f"be another one on each rank; {_INSTEAD}"
        )
    model = _has_slices(given)
    if model is None:
        return None
    own = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(tensor) not in own for tensor in given)
    if strangers:
        raise UsageError(
            f"clip_grad_norm_: expected parameters of one transformed model, found {strangers} others among {len(given)}; ranks have "
            "slices of that model and all of the others: clip them in two calls"
        )
    only = {id(tensor.grad) for tensor in given if tensor.grad is not None}
    return clip_shared(model, max_norm, float(norm_type), only=only or {0}, finite=error_if_nonfinite)


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


_MAKERS = {"clip_grad_norm_": clip_grad_norm_by(_clip), "_get_total_norm": _get_total_norm}


def _norm_in_fp64(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The norm of this rank's gradients, which torch takes in fp32, or refuses to."""

    def get_grad_norm(params: Iterable[nn.Parameter], norm_type: float, zero: Tensor, device: torch.device) -> Tensor:
        params = [*params]
        if all(parameter.dtype is not torch.float64 for parameter in params):
            return original(params, norm_type, zero, device)
        grads = [parameter.grad.detach() for parameter in params if parameter.grad is not None]
        norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64) for grad in grads]
        return torch.linalg.vector_norm(torch.stack(norms), norm_type).to(device) if norms else zero.double()

    return get_grad_norm


def _clip_grad_norm_of_fsdp1(original: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP1's own norm is over its shards; with slices also over the ranks that have the others."""

    def clip_grad_norm_(self: FullyShardedDataParallel, max_norm: float, norm_type: float = 2.0) -> Tensor:
        if slices_of(self) is None:
            found: Tensor = original(self, max_norm, norm_type)
            return found
        return clip_shared(self, max_norm, float(norm_type))

    return clip_grad_norm_


# -- replicas --------------------------------------------------------------------------------------------------------------


def _replicated(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """DistributedDataParallel gives all ranks of its group the first one's parameters, so these have the same slices."""

    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _has_slices(module.parameters()) is not None:
            given = inspect.signature(original).bind(self, module, *args, **kwargs).arguments
            own = _group_of_replicas(session, given.get("process_group"))
            if given.get("process_group") is None and given.get("device_mesh") is None:
                kwargs["process_group"] = own
        original(self, module, *args, **kwargs)

    return init


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


def _groups_of_parts(parameters: Sequence[Tensor]) -> list[dist.ProcessGroup | None]:
    """The ranks that have parts of the same parameters: all of the session, or the ranks of a unit of FSDP1."""
    if _has_slices(parameters) is not None:
        return [None]
    unit = _unit_of(parameters)
    return [] if unit is None else [unit.process_group]


def _parts_in(parameters: Sequence[Tensor]) -> str:
    if _sliced(parameters) is not None:
        return "slices of a transformed model"
    return "" if _unit_of(parameters) is None else "shards of FullyShardedDataParallel"
