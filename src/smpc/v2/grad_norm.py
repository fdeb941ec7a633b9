"""Clipping by the norm of all gradients, each counted once, whatever holds parts of it.

    holds a part                                        its squares are counted
    FSDP1, FSDP2                                        by the ranks of the shard group
    slices of tensor-parallel ranks, experts            by those ranks
    everybody                                           divided by the number of ranks that have the same

Source: public training scripts for SMP v2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from smpc.in_place.model_copy import plain_name
from smpc.nn.script_writes.slice_provenance import refuse_of_slices
from smpc.optimizers.gradients import check_finite
from smpc.optimizers.gradients import clip_grad_norm_ as clip
from smpc.optimizers.norm_groups import local_part
from smpc.v2.transforming.transformed_slices import slices_of

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients of a model in place so that the norm of all of them is at most `max_norm`; returns the norm they had.

    The model may be wrapped by FSDP1, divided by FSDP2, or neither. All ranks call this.
    """
    if slices_of(model) is not None:
        return clip_shared(model, max_norm)
    if isinstance(model, FullyShardedDataParallel):
        found: Tensor = model.clip_grad_norm_(max_norm)
    else:
        found = clip(model.parameters(), max_norm)
    return found.full_tensor() if isinstance(found, DTensor) else found


@torch.no_grad()
def clip_shared(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, only: Collection[int] = (), finite: bool = False
) -> Tensor:
    """Clips gradients of which the ranks of several groups hold parts; the norm they had. Collective over all ranks.

    `only`: the ids of the gradients that count and are clipped; all, if there are none. `finite`: raise NonFiniteNormError, before anything
    is clipped, for a norm that is not.
    """
    refuse_of_slices("clip_grad_norm_: max_norm", max_norm)
    max_norm = float(max_norm)
    world, order = dist.get_world_size(), float(norm_type)
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    held = [each for each in _gradient_parts(model) if not only or id(each.whole) in only]
    for each in held:
        size = each.part.abs().double()
        if order == math.inf:
            total = torch.maximum(total, size.max() if size.numel() else total)
        else:
            total += (size**order).sum() * (each.holders / world)
    dist.all_reduce(total, dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM)
    wide = any(each.part.dtype is torch.float64 for each in held)
    norm = (total if order == math.inf else total ** (1 / order)).to(torch.float64 if wide else torch.float32)
    if finite:
        check_finite(norm)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None and (not only or id(parameter.grad) in only):
            own = local_part(parameter.grad)
            own.mul_(scale.to(own.dtype))
    return norm


@dataclass(frozen=True, slots=True)
class _GradientPart:
    """This rank's part of a gradient, the tensor that the parameter has as its gradient, and how many ranks have the gradient once."""

    part: Tensor
    whole: Tensor
    holders: int


def _gradient_parts(model: nn.Module) -> Iterator[_GradientPart]:
    """This rank's parts of gradients."""
    slices = slices_of(model)
    assert slices is not None
    sharing = {name: part.num_holders for name, part in slices.items()}
    flat: set[int] = set()
    for prefix, unit in _units(model):
        flat.update(id(parameter) for parameter in unit.parameters())
        shards = unit.process_group.size() if unit._handle is not None and unit._handle.uses_sharded_strategy else 1
        for name, part in _of_unit(unit):
            yield _GradientPart(part, part, shards * sharing.get(plain_name(prefix + name), 1))
    for name, parameter in model.named_parameters():
        if parameter.grad is None or id(parameter) in flat:
            continue
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            shards = math.prod(
                size
                for size, at in zip(gradient.device_mesh.shape, gradient.placements, strict=True)
                if not at.is_replicate()
            )
            found = slices.get(plain_name(name))
            holders = shards * (1 if found is None or found.is_whole(gradient) else found.num_holders)
            yield _GradientPart(gradient.to_local(), gradient, holders)
        else:
            yield _GradientPart(gradient, gradient, sharing.get(plain_name(name), 1))


def _units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            yield f"{name}." if name else "", module


def _of_unit(unit: Any) -> Iterator[tuple[str, Tensor]]:
    """The gradients of a unit's own parameters, as far as this rank has them."""
    handle = unit._handle
    if handle is None:
        return
    flat = handle.flat_param
    originals = flat._params or [None] * len(flat._fqns)
    for name, info, original in zip(flat._fqns, flat._shard_param_infos, originals, strict=True):
        if original is not None:
            if original.grad is not None:
                yield name, original.grad
        elif info.in_shard and flat.grad is not None:
            yield name, flat.grad[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
