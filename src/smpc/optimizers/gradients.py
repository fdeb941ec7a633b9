"""The norm of all gradients, and clipping by it, for tensors of any number, dtype and device, on one rank or many.

    norm = clip_grad_norm_(model.parameters(), 1.0)                              # torch's, with fp32 sums for fp16 and bf16
    norm = clip_grad_norm_(parameters, 1.0, shard_group=..., norm_group=...)     # of parameters sliced over ranks
    norm = global_norm([p.grad for p in parameters])

A tensor's norm is taken over the ranks that hold its parts, once, and the norm of all finally over `norm_group`: see
`smpc.optimizers.norm_groups`. Nothing waits for the device.

Source: torch.nn.utils.clip_grad_norm_, whose rule for scaling this is: max_norm / (norm + 1e-6), at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import NonFiniteNormError, UsageError
from smpc.kernels.optimizers import kernels_update, scale_tensors_, tensor_norms
from smpc.kernels.setting import used_by_default
from smpc.kernels.shared.tensor_checks import FLOATING_DTYPES, accumulation_dtype
from smpc.kernels.shared.tensor_table import TableCache
from smpc.optimizers.base import Batch
from smpc.optimizers.norm_groups import NormGroups, ShardGroup, check_gradient, local_part


@torch.no_grad()
def global_norm(
    grads: Iterable[Tensor] | Tensor,
    norm_type: float = 2.0,
    *,
    shard_group: ShardGroup | None = None,
    norm_group: dist.ProcessGroup | None = None,
    kernel: bool | None = None,
) -> Tensor:
    """The norm of all tensors as one vector, without dimension, in fp32 (fp64 if one is fp64), on the first one's device.

    `norm_type`: a positive number or infinity. `shard_group` is given the tensors themselves. 0 for no tensors.
    """
    tensors = [grads] if isinstance(grads, Tensor) else list(grads)
    _check_gradients("global_norm", norm_type, tensors)
    return norm_of(tensors, tensors, float(norm_type), NormGroups(shard_group, norm_group), kernel)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    shard_group: ShardGroup | None = None,
    norm_group: dist.ProcessGroup | None = None,
    kernel: bool | None = None,
) -> Tensor:
    """Scales gradients in place so that the norm of all of them is at most `max_norm`; returns the norm they had.

    Raises UsageError for sparse gradients, NonFiniteNormError, with `error_if_nonfinite`, for a norm that is infinite or NaN.
    """
    return clip_by(parameters, max_norm, norm_type, error_if_nonfinite, NormGroups(shard_group, norm_group), kernel)


def clip_by(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    groups: NormGroups,
    kernel: bool | None,
) -> Tensor:
    """`clip_grad_norm_` with norm groups."""
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not isinstance(max_norm, int | float) or not max_norm >= 0.0:
        raise UsageError(f"clip_grad_norm_: expected max_norm >= 0, found {max_norm!r}")
    kept = [parameter for parameter in every if parameter.grad is not None]
    grads = [parameter.grad for parameter in kept if parameter.grad is not None]
    _check_gradients("clip_grad_norm_", norm_type, grads)
    for parameter, grad in zip(kept, grads, strict=True):
        check_gradient(parameter, grad, "clip_grad_norm_")
    total = norm_of(grads, kept, float(norm_type), groups, kernel, every)
    if error_if_nonfinite:
        check_finite(total)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for part, tables in _by_kind([local_part(grad) for grad in grads], kernel):
        scale_tensors_([tensor for _, tensor in part], factor.to(part[0][1].device), tables)
    return total


def check_finite(norm: Tensor) -> None:
    """Raise NonFiniteNormError for a norm that is infinite or NaN."""
    if not bool(norm.isfinite()):
        raise NonFiniteNormError(
            f"clip_grad_norm_: expected a finite norm of the gradients, found {float(norm)}; nothing was scaled"
        )


def norm_of(
    grads: Sequence[Tensor],
    parameters: Sequence[Tensor],
    order: float,
    groups: NormGroups,
    kernel: bool | None = None,
    every: Sequence[Tensor] = (),
) -> Tensor:
    """The norm of all gradients over all ranks; `parameters` are what they belong to, `every` also those without gradient."""
    device = next((tensor.device for tensor in (*grads, *every)), torch.device("cpu"))
    dtypes = [accumulation_dtype(grad.dtype) for grad in grads]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    norms = torch.zeros(len(grads), dtype=dtype, device=device)
    for part, tables in _by_kind([local_part(grad) for grad in grads], kernel):
        found = tensor_norms([tensor for _, tensor in part], order, tables)
        norms[[place for place, _ in part]] = found.to(device, dtype)
    return groups.total_norm(norms, parameters, order)


def batch_norm(batches: Sequence[Batch], groups: Sequence[Mapping[str, Any]], norm_groups: NormGroups) -> Tensor:
    """The norm of the gradients of an optimizer's batches, over all ranks."""
    every = [parameter for group in groups for parameter in group["params"]]
    device = next((parameter.device for parameter in every), torch.device("cpu"))
    wide = any(batch.bucket.first[0].dtype == torch.float64 for batch in batches)
    dtype = torch.float64 if wide else torch.float32
    norms = [tensor_norms(batch.bucket.grads, 2.0, batch.tables).to(device, dtype) for batch in batches]
    parameters = [parameter for batch in batches for parameter in batch.parameters]
    return norm_groups.total_norm(torch.cat(norms) if norms else torch.zeros(0, device=device), parameters)


def _by_kind(
    tensors: Sequence[Tensor], kernel: bool | None
) -> list[tuple[list[tuple[int, Tensor]], TableCache | None]]:
    """Tensors with their places, apart by device and dtype, and tables where kernels compute."""
    use = used_by_default("gradient_norm") if kernel is None else kernel
    kinds: dict[tuple[object, ...], list[tuple[int, Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append((place, tensor))
    return [(part, TableCache() if use and kernels_update(part[0][1]) else None) for part in kinds.values()]


def _check_gradients(owner: str, norm_type: float, tensors: Sequence[object]) -> None:
    """Raises an error for gradients or a kind of norm that cannot be."""
    faults = []
    if not isinstance(norm_type, int | float) or not norm_type > 0 or math.isnan(norm_type):
        faults.append(f"expected norm_type to be a positive number or infinity, found {norm_type!r}")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            faults.append(f"expected tensors, found {type(tensor).__name__}")
        elif tensor.dtype not in FLOATING_DTYPES:
            faults.append(f"expected tensors of dtype fp16, bf16, fp32 or fp64, found {tensor.dtype}")
        elif tensor.layout != torch.strided:
            faults.append(f"expected dense tensors, found layout {tensor.layout}")
    if faults:
        raise UsageError("\n".join(f"{owner}: {fault}" for fault in faults))
