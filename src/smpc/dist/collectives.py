"""Tensors and objects of all ranks of a group. Alone they are what one rank's would be; collective otherwise.

A tensor may have any strides, also other strides than on other ranks: torch itself would take the bytes from its beginning, and
silently mix up elements of a strided tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp

from smpc.dist.rank_and_size import get_world_size, is_initialized
from smpc.errors import ConfigError, ConfigTypeError, GroupError, UsageError

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
    """Combine a tensor of all ranks, in place; equal shapes and dtypes on all of them.

    `reduce_operation`: SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR or AVG, in upper or lower case; ConfigError for others. `group`: a
    process group, all ranks by default. Raises GroupError without initialised process groups in a larger world.
    """
    name = reduce_operation.upper() if isinstance(reduce_operation, str) else ""
    if name not in _OPERATIONS:
        raise ConfigError(f"reduce_operation: expected one of {', '.join(_OPERATIONS)}, found {reduce_operation!r}")
    if not has_others("all_reduce"):
        return
    _check_tensor("all_reduce", tensor)
    is_ours = name == "AVG" and distributed.get_backend(group) != "nccl"  # gloo knows no AVG
    if is_ours and not tensor.is_floating_point() and not tensor.is_complex():
        raise ConfigError(f"reduce_operation: AVG needs floating-point numbers, found {tensor.dtype}")
    with _in_order(tensor) as values:
        distributed.all_reduce(values, ReduceOp.SUM if is_ours else _OPERATIONS[name], group=group)
        if is_ours and distributed.get_rank(group) >= 0:
            values.div_(distributed.get_world_size(group))


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> None:
    """Give every rank the tensor of global rank `src`, in place; equal shapes and dtypes on all ranks.

    `group`: a process group, all ranks by default. Raises GroupError without initialised process groups in a larger world.
    """
    if has_others("broadcast"):
        _check_tensor("broadcast", tensor)
        with _in_order(tensor) as values:
            distributed.broadcast(values, src, group=group)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: ProcessGroup | None = None) -> None:
    """Give every rank the objects of global rank `src`, in place.

    `object_list`: a list of equal length on all ranks. Objects are sent as pickles: ranks of one job trust each other. `group`: a
    process group, all ranks by default.
    """
    if not isinstance(object_list, list):
        raise ConfigTypeError(
            f"broadcast_object_list: expected a list, which changes in place, found {type(object_list).__name__}"
        )
    if has_others("broadcast_object_list"):
        distributed.broadcast_object_list(object_list, src, group=group)


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """The tensors of all ranks, by their rank in the group. Collective.

    `group`: a process group, all ranks by default. Raises UsageError on all ranks, unless all tensors have one shape and dtype.
    """
    if not has_others("all_gather"):
        return [tensor]
    _check_tensor("all_gather", tensor)
    if distributed.get_rank(group) >= 0:
        _check_alike(tensor, group)
    own = tensor.detach().contiguous()
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, own, group=group)
    return found


def all_gather_object(obj: Any, group: ProcessGroup | None = None) -> list[Any]:
    """The objects of all ranks, by their rank in the group. They travel as pickles: ranks of one job trust each other."""
    if not has_others("all_gather_object"):
        return [obj]
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, obj, group=group)
    return found


@contextmanager
def _in_order(tensor: Tensor) -> Iterator[Tensor]:
    """The elements in memory order, and the permutation back to the tensor's order."""
    values = tensor.detach()
    if values.layout is not torch.strided or values.is_contiguous():  # of sparse ones gloo takes the parts
        yield values
        return
    copy = values.contiguous()
    yield copy
    values.copy_(copy)


def _check_tensor(what: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise ConfigTypeError(f"{what}: expected a tensor, found {type(tensor).__name__}")


def _check_alike(tensor: Tensor, group: ProcessGroup | None) -> None:
    """Before a call that would abort, or wait for ever. Collective."""
    told = f"{tensor.dtype} {tuple(tensor.shape)}"
    own = torch.tensor([zlib.crc32(told.encode())], device=tensor.device)
    sums = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sums, own, group=group)
    if len(set(torch.cat(sums).tolist())) > 1:
        found = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(all_gather_object(told, group)[:8]))
        raise UsageError(
            f"all_gather: expected tensors of one shape and dtype, found {found}; pad them, or gather objects"
        )
