"""Tensors of which every replica has a part (DTensors, as `smpc.sharding.shard` makes them), and ordinary ones, alike.

local(weight)                   what this rank has: rows 4 to 7 of 8; of an ordinary tensor, the tensor
own_start(weight)               4; of an ordinary tensor, 0
own_part(weight, values)        rows 4 to 7 of `values`, a whole tensor; a view
sharded_like(weight, rows)      the DTensor of which this rank has `rows`
whole(weight)                   all 8 rows, on every rank; collective
digest(weight)                  a number that tells other values apart
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from smpc.errors import ConfigUnsupportedError


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the tensor itself, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(parameter: Tensor, own: Tensor) -> Tensor:
    """The tensor of which this rank has `own`, sharded as the parameter is; `own` itself if that one is not."""
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element


def digest(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements as integers, int64: other values have another one, but for what no training makes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int64)).sum(dtype=torch.int64)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; collective over those that it is sharded over."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part_of_sharded(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of a whole tensor of the parameter's shape; a view."""
    if not isinstance(parameter, DTensor):
        return tensor
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, min(start, tensor.shape[dim]), size)
    return tensor


def as_state_of(parameter: Tensor, value: Any) -> Any:
    """An optimizer's state for a parameter, sharded like the parameter: `value` may be whole, or this rank's part. Other values stay."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape == parameter.shape and value.dim():
        return sharded_like(parameter, own_part_of_sharded(parameter, value).clone())
    return sharded_like(parameter, value) if value.dim() and value.shape == local(parameter).shape else value


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody is called with the parameter's gradient."""
    with torch._C.DisableTorchFunctionSubclass():  # parameters of other ranks have one
        return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


@contextmanager
def updating_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In this context of an optimizer's step an operation that torch does not have for parts of tensors is a ConfigUnsupportedError."""
    try:
        yield
    except RuntimeError as error:
        refuse_parts(optimizer, error)
        raise


# What torch says of operations that it does not have for parts, or not beside ordinary tensors, such as state that an optimizer makes.
_OF_PARTS = ("Sharding propagation failed", "got mixed torch.Tensor and DTensor")


def refuse_parts(optimizer: torch.optim.Optimizer, error: RuntimeError) -> None:
    """ConfigUnsupportedError if an optimizer's step has failed because torch does not have an operation for parts of tensors."""
    if any(text in str(error) for text in _OF_PARTS):
        raise ConfigUnsupportedError(
            f"{type(optimizer).__name__}: expected an optimizer whose operations torch {torch.__version__} has for sharded parameters, "
            f"found {str(error).splitlines()[0]} Use another optimizer, such as AdamW, or leave out what shards the parameters"
        ) from error
