"""Checks of the tensors of every op in this package: dtype, device and shape, with errors that say what was found.

require_floating("rms_norm", x=x, weight=None)     None is an argument left out
require_like("rms_norm", "x", x, residual=r)       same shape, dtype and device
kernels_compute(x)                                 whether the op launches kernels for x, or uses the formula in torch
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.kernels.launch.backend import Backend, backend

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLOATING_DTYPES = (*KERNEL_DTYPES, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a formula is computed: fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernels_compute(x: Tensor) -> bool:
    """Whether kernels are launched for `x`: on CUDA with Triton, or in its interpreter; never for fp64."""
    return x.dtype in KERNEL_DTYPES and backend(x.device) is not Backend.TORCH


def require_floating(op: str, **tensors: Tensor | None) -> None:
    """Refuses integer, complex and 8-bit tensors, and tensors on several devices."""
    faults = [
        f"expected {name} of dtype {', '.join(str(dtype) for dtype in FLOATING_DTYPES)}, found {tensor.dtype}"
        for name, tensor in tensors.items()
        if tensor is not None and tensor.dtype not in FLOATING_DTYPES
    ]
    require_same_device(op, **tensors)
    if faults:
        raise UsageError(f"{op}: " + "; ".join(faults))


def require_same_device(op: str, **tensors: Tensor | None) -> None:
    """Refuses tensors on several devices."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(dict.fromkeys(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UsageError(f"{op}: expected all tensors on one device, found {found}")


def require_like(op: str, base: str, like: Tensor, **tensors: Tensor | None) -> None:
    """Refuses tensors whose shape, dtype or device differs from `like`'s, which the message calls `base`."""
    require_same_device(op, **{base: like}, **tensors)
    faults = [
        f"expected {name} like {base}, {tuple(like.shape)} {like.dtype}, found {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in tensors.items()
        if tensor is not None and (tensor.shape != like.shape or tensor.dtype != like.dtype)
    ]
    if faults:
        raise UsageError(f"{op}: " + "; ".join(faults))


def as_rows(x: Tensor) -> Tensor:
    """`x` as a matrix of its last dimension with contiguous rows; a copy only if no view is possible."""
    columns = x.shape[-1]
    matrix = x.reshape(math.prod(x.shape[:-1]), columns)
    return matrix if matrix.stride(-1) == 1 or columns == 1 else matrix.contiguous()
