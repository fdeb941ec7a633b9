"""Norms over ranks: which ranks hold the other parts of a tensor, which hold other parameters, and sums that count all of it once.

Terms
    shard groups   of a parameter: the process groups over whose ranks its slices are spread. Its norm is summed over them, one after the
                   other. None for a parameter that is whole on every rank, however many replicas of it there are
    norm group     the ranks that hold other parameters: the stages of a pipeline. The norm of all gradients is summed over it at last

    rank 0 (tp 0, stage 0)   w: rows 0-1   bias        rank 2 (tp 0, stage 1)   head: rows 0-1
    rank 1 (tp 1, stage 0)   w: rows 2-3   bias        rank 3 (tp 1, stage 1)   head: rows 2-3

    groups = NormGroups(shard_group=lambda p: tp_group if p is w else None, norm_group=pp_group)
    global norm ^2 = over pp_group (over tp_group (|w|^2) + |bias|^2)

DTensors know their shard groups, from the mesh dimensions along which they are sharded, so FSDP2's parameters need no hook. A
parameter that several ranks of the norm group hold, with the same gradient, is counted by the one where `counted` says so.

Every rank of a group has to ask for the same norms in the same order: the same parameters with gradients on all ranks of a shard group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from smpc.errors import UsageError

ShardGroup = Callable[[Tensor], dist.ProcessGroup | None]


@dataclass(frozen=True, slots=True)
class NormGroups:
    """Where norms are summed; see the module's docstring. Without arguments: DTensors over their meshes, everything else here."""

    shard_group: ShardGroup | None = None
    norm_group: dist.ProcessGroup | None = None
    counted: Callable[[Tensor], bool] | None = None

    def groups_of(self, parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
        """The shard groups of a parameter."""
        found = _mesh_groups(parameter) if isinstance(parameter, DTensor) else ()
        own = self.shard_group(parameter) if self.shard_group is not None else None
        if own is not None and not isinstance(own, dist.ProcessGroup):
            raise UsageError(
                f"shard_group: expected a torch.distributed.ProcessGroup or None, found {type(own).__name__}"
            )
        return found if own is None or own in found else (*found, own)

    def spanning(self) -> dist.ProcessGroup | None:
        """The norm group."""
        return self.norm_group

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank counts the parameter in the norm of all gradients."""
        return self.counted is None or self.counted(parameter)

    def whole_norms(self, norms: Tensor, parameters: Sequence[Tensor], order: float = 2.0) -> Tensor:
        """Norms of whole tensors from norms of this rank's parts: [..., parameters], in the order of the parameters."""
        places: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for place, parameter in enumerate(parameters):
            groups = self.groups_of(parameter)
            if groups:
                places.setdefault(groups, []).append(place)
        for groups, found in places.items():
            part = norms[..., found].contiguous()
            for group in groups:
                part = sum_norms(part, order, group)
            norms[..., found] = part
        return norms

    def total_norm(self, norms: Tensor, parameters: Sequence[Tensor], order: float = 2.0) -> Tensor:
        """The norm of everything, from the norms [parameters] of this rank's parts. Collective over the norm group."""
        kept = [place for place, parameter in enumerate(parameters) if self.counts(parameter)]
        # Every rank of a shard group counts the same parameters, so that those not counted need no norm.
        counted = self.whole_norms(norms[kept], [parameters[place] for place in kept], order)
        total = torch.linalg.vector_norm(counted, order) if kept else norms.new_zeros(())
        group = self.spanning()
        return total if group is None else sum_norms(total, order, group)


def sum_norms(norms: Tensor, order: float, group: dist.ProcessGroup) -> Tensor:
    """The norms of tensors that the ranks of a group hold together, from each rank's; the order is a positive number or infinity."""
    # fp64 whatever the norms are: a rank without gradients does not know the others' dtype, and squares of fp32 may exceed fp32.
    values = norms.to(torch.float64)
    if order == math.inf:
        # A maximum over ranks may lose a NaN; a sum keeps it.
        broken = values.isnan().to(torch.float64)
        largest = torch.where(values.isnan(), 0.0, values)
        group.allreduce([largest], dist.ReduceOp.MAX).wait()
        group.allreduce([broken]).wait()
        return torch.where(broken > 0, math.nan, largest).to(norms.dtype)
    powers = values**order
    group.allreduce([powers]).wait()
    return (torch.sqrt(powers) if order == 2.0 else powers ** (1.0 / order)).to(norms.dtype)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; the tensor itself, unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_gradient(parameter: Tensor, gradient: Tensor, where: str) -> None:
    """Refuses gradients that cannot be read as the parameter's: sparse, or DTensors that are laid out otherwise or not summed yet."""
    if gradient.layout != torch.strided:
        raise UsageError(
            f"{where}: expected dense gradients, found one of layout {gradient.layout} for a parameter of shape "
            f"{tuple(parameter.shape)}; use a dense embedding (sparse=False), or torch.optim.SparseAdam for this parameter"
        )
    placed = parameter.placements if isinstance(parameter, DTensor) else None
    found = gradient.placements if isinstance(gradient, DTensor) else None
    if placed != found:
        raise UsageError(
            f"{where}: expected a gradient placed like its parameter of shape {tuple(parameter.shape)}, {placed}, found {found}; "
            "redistribute it first"
        )


def _mesh_groups(parameter: DTensor) -> tuple[dist.ProcessGroup, ...]:
    if any(placement.is_partial() for placement in parameter.placements):
        raise UsageError(
            f"norms: expected DTensors that are sharded or replicated, found {parameter.placements}; redistribute it first"
        )
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )
