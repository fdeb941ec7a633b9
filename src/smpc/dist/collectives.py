"""Tensors and objects of all ranks of a group. Alone they are what one rank's would be; collective otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp

from smpc.dist.place import get_world_size, is_initialized
from smpc.errors import ConfigError, GroupError

_OPERATIONS = {
    "SUM": ReduceOp.SUM,
    "PRODUCT": ReduceOp.PRODUCT,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
    "AVG": ReduceOp.AVG,
}


def has_others(what: str) -> bool:
    """Whether there are process groups to use; False alone. Raises GroupError in a larger world that is not initialised."""
    if is_initialized():
        return True
    size = get_world_size()
    if size > 1:
        raise GroupError(
            f"smpc.dist.{what}: this is one of {size} ranks, and torch.distributed is not initialised; call smpc.dist.initialize_dist before"
        )
    return False


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait for all ranks of the group."""
    if has_others("barrier"):
        distributed.barrier(group=group)


def all_reduce(tensor: Tensor, reduce_operation: str = "SUM", group: ProcessGroup | None = None) -> None:
    """Combine a tensor of all ranks, in place: SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR or AVG, in any case. Raises ConfigError for others."""
    name = reduce_operation.upper() if isinstance(reduce_operation, str) else ""
    if name not in _OPERATIONS:
        raise ConfigError(f"reduce_operation: expected one of {', '.join(_OPERATIONS)}, found {reduce_operation!r}")
    if not has_others("all_reduce"):
        return
    if name != "AVG" or distributed.get_backend(group) == "nccl":
        distributed.all_reduce(tensor, _OPERATIONS[name], group=group)
        return
    if not tensor.is_floating_point() and not tensor.is_complex():
        raise ConfigError(f"reduce_operation: AVG needs floating-point numbers, found {tensor.dtype}")
    distributed.all_reduce(tensor, ReduceOp.SUM, group=group)  # gloo knows no AVG
    tensor.div_(distributed.get_world_size(group))


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> None:
    """Give every rank the tensor of global rank `src`, in place."""
    if has_others("broadcast"):
        distributed.broadcast(tensor, src, group=group)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: ProcessGroup | None = None) -> None:
    """Give every rank the objects of global rank `src`, in place. They travel as pickles: ranks of one job trust each other."""
    if has_others("broadcast_object_list"):
        distributed.broadcast_object_list(object_list, src, group=group)


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """The tensors of all ranks, by their rank in the group; all of one shape and dtype."""
    if not has_others("all_gather"):
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, tensor.contiguous(), group=group)
    return found


def all_gather_object(obj: Any, group: ProcessGroup | None = None) -> list[Any]:
    """The objects of all ranks, by their rank in the group. They travel as pickles: ranks of one job trust each other."""
    if not has_others("all_gather_object"):
        return [obj]
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, obj, group=group)
    return found
