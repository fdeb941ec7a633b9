"""Updates of AdamW, LAMB and NovoGrad, and norms, for many tensors at a time: by kernel, or by torch's foreach functions.

Legend: p parameter, g gradient, m and v moments, lr learning rate, b1 b2 betas, b3 = 1 - b1 (1 without gradient averaging),
t steps of this parameter, this one included, c_i = 1 - b_i^t (1 without bias correction), wd weight decay.

    AdamW      p -= lr wd p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p -= lr / c1 m / (sqrt(v) / sqrt(c2) + eps)
               with amsgrad, the largest v so far takes v's place in the last

    LAMB       g = g / clip;  coupled decay: g += wd p
               m = b1 m + b3 g;  v = b2 v + (1 - b2) g^2
               u = (m / c1) / (sqrt(v / c2) + eps);  decoupled decay: u += wd p
               p -= lr ||p|| / ||u|| u, where a ratio is asked for and neither norm is 0;  else p -= lr u

    NovoGrad   d: the tensor's denominator, from the running norm of its gradients
               inside:    m = b1 m + b3 (g / d + wd p);   p -= lr m / c1
               otherwise: m = b1 m + b3 g;                p -= lr ((m / c1) / d + wd p)
               both are computed as
                          m += G g + I p - (1 - b1) m;    p -= U m + O p
               with G = b3 / d or b3, I = b3 wd or 0, U = lr / c1 or lr / (c1 d), O = 0 or lr wd. G and U are fp64, split in two fp32
               addends, since a factor that is half a place off shifts every step to the same side.

A `Bucket` holds tensors of one device and one choice of dtypes. Moments and masters are fp32 (fp64 for fp64 parameters); everything is
computed in that. Where there are masters they are p, and the parameters are rounded copies of them. Norms are per tensor, and whole:
`reduce` is given what this rank's slices yield and returns the norms of the whole tensors.

Sources: Kingma and Ba 2015; Loshchilov and Hutter 2019; You et al. 2020 (LAMB), Ginsburg et al. 2019 (NovoGrad), as apex computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smpc.kernels.launch.backend import Backend, backend
from smpc.kernels.shared.tensor_checks import KERNEL_DTYPES, accumulation_dtype
from smpc.kernels.shared.tensor_table import TableCache

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are updated together; lists of equal length, or empty where there is no such tensor."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    first: list[Tensor] = field(default_factory=list)  # m
    second: list[Tensor] = field(default_factory=list)  # v
    masters: list[Tensor] = field(default_factory=list)
    maxima: list[Tensor] = field(default_factory=list)  # the largest v

    def columns(self) -> tuple[list[Tensor], ...]:
        """The lists in the order of a TensorTable's columns."""
        return (self.params, self.grads, self.first, self.second, self.masters, self.maxima)


@dataclass(frozen=True, slots=True)
class AdamWRule:
    """The numbers of one step; see the module's docstring."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    step: int

    @property
    def correction1(self) -> float:
        """c1."""
        return 1.0 - self.beta1**self.step

    @property
    def correction2(self) -> float:
        """c2."""
        return 1.0 - self.beta2**self.step


@dataclass(frozen=True, slots=True)
class LambRule:
    """The numbers of one step; see the module's docstring."""

    beta1: float
    beta2: float
    beta3: float
    correction1: float
    correction2: float
    eps: float
    weight_decay: float
    decoupled: bool
    ratio: bool


@dataclass(frozen=True, slots=True)
class NovoGradRule:
    """The factors of one step; see the module's docstring. Tensors are fp64, [tensors], on the bucket's device."""

    gradient: Tensor  # G
    update: Tensor  # U
    rest1: float  # 1 - b1
    inner: float  # I
    outer: Tensor | None  # O; None for 0


def kernels_update(*tensors: Tensor) -> bool:
    """Whether kernels can work on tensors of one device and these dtypes here: on CUDA with Triton, or in its interpreter."""
    return all(tensor.dtype in KERNEL_DTYPES for tensor in tensors) and backend(tensors[0].device) is not Backend.TORCH


def tensor_norms(tensors: Sequence[Tensor], order: float, tables: TableCache | None) -> Tensor:
    """The norm of each of at least one tensor of one device and dtype, [tensors], in fp32 or fp64; by kernel if there are `tables`.

    `order` is a positive number or infinity; kernels know 2 and infinity.
    """
    if tables is not None and order in (2.0, math.inf):
        from smpc.kernels.programs.optimizers_triton import launch_norms

        return launch_norms(tensors, order, tables)
    dtype = accumulation_dtype(tensors[0].dtype)
    norms = torch.zeros(len(tensors), dtype=dtype, device=tensors[0].device)
    filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]  # a maximum over nothing is refused
    if filled:
        found = torch._foreach_norm([tensors[index] for index in filled], order, dtype=dtype)
        norms[filled] = torch.stack(list(found))
    return norms


def scale_tensors_(tensors: Sequence[Tensor], factor: Tensor, tables: TableCache | None) -> None:
    """Multiplies tensors of one device and dtype by `factor` (no dimension, same device)."""
    if tables is not None:
        from smpc.kernels.programs.optimizers_triton import launch_scale_

        launch_scale_(tensors, factor, tables)
        return
    torch._foreach_mul_(list(tensors), factor)


def adamw_(bucket: Bucket, rule: AdamWRule, lr: float | Tensor, tables: TableCache | None) -> None:
    """One step of AdamW; by kernel if there are `tables`, else by torch's fused one on CUDA where that takes the dtypes."""
    if tables is not None:
        from smpc.kernels.programs.optimizers_triton import launch_adamw_

        launch_adamw_(bucket, rule, lr, tables)
        return
    if bucket.params[0].is_cuda and bucket.params[0].dtype == bucket.grads[0].dtype == bucket.first[0].dtype:
        _torch_adamw_(bucket, rule, lr)
        return
    params, grads = _working(bucket)
    if rule.weight_decay:
        torch._foreach_mul_(params, 1.0 - lr * rule.weight_decay)
    torch._foreach_lerp_(bucket.first, grads, 1.0 - rule.beta1)
    torch._foreach_mul_(bucket.second, rule.beta2)
    torch._foreach_addcmul_(bucket.second, grads, grads, 1.0 - rule.beta2)
    if rule.amsgrad:
        torch._foreach_maximum_(bucket.maxima, bucket.second)
    denominators = torch._foreach_sqrt(bucket.maxima if rule.amsgrad else bucket.second)
    torch._foreach_div_(denominators, math.sqrt(rule.correction2))
    torch._foreach_add_(denominators, rule.eps)
    updates = torch._foreach_div(bucket.first, denominators)
    torch._foreach_mul_(updates, lr / rule.correction1)
    torch._foreach_sub_(params, updates)
    _store(bucket, params)


def _torch_adamw_(bucket: Bucket, rule: AdamWRule, lr: float | Tensor) -> None:
    steps = [torch.full((), rule.step, dtype=torch.float32, device=bucket.params[0].device)] * len(bucket.params)
    torch._fused_adamw_(
        bucket.params,
        bucket.grads,
        bucket.first,
        bucket.second,
        bucket.maxima if rule.amsgrad else [],
        steps,
        lr=lr,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        amsgrad=rule.amsgrad,
        maximize=False,
    )


def lamb_(
    bucket: Bucket, rule: LambRule, lr: float | Tensor, clip: Tensor | None, reduce: Reduce, tables: TableCache | None
) -> None:
    """One step of LAMB. `clip` divides the gradients (no dimension, same device); `reduce` takes and returns [2, tensors]."""
    if tables is not None:
        from smpc.kernels.programs.optimizers_triton import launch_lamb_

        launch_lamb_(bucket, rule, lr, clip, reduce, tables)
        return
    params, grads = _working(bucket)
    if clip is not None:
        grads = list(torch._foreach_div(grads, clip.to(grads[0].dtype)))
    if rule.weight_decay and not rule.decoupled:
        grads = list(torch._foreach_add(grads, params, alpha=rule.weight_decay))
    torch._foreach_mul_(bucket.first, rule.beta1)
    torch._foreach_add_(bucket.first, grads, alpha=rule.beta3)
    torch._foreach_mul_(bucket.second, rule.beta2)
    torch._foreach_addcmul_(bucket.second, grads, grads, 1.0 - rule.beta2)
    denominators = torch._foreach_div(bucket.second, rule.correction2)
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, rule.eps)
    updates = torch._foreach_div(bucket.first, rule.correction1)
    torch._foreach_div_(updates, denominators)
    if rule.weight_decay and rule.decoupled:
        torch._foreach_add_(updates, params, alpha=rule.weight_decay)
    if rule.ratio:
        norms = torch.stack((tensor_norms(params, 2.0, None), tensor_norms(updates, 2.0, None)))
        torch._foreach_mul_(updates, list(trust_ratios(reduce(norms), lr).unbind()))
    else:
        torch._foreach_mul_(updates, lr)
    torch._foreach_sub_(params, updates)
    _store(bucket, params)


def trust_ratios(norms: Tensor, lr: float | Tensor) -> Tensor:
    """lr ||p|| / ||u|| of each tensor, lr where either norm is 0."""
    of_params, of_updates = norms
    return torch.where((of_params > 0) & (of_updates > 0), of_params / of_updates, 1.0) * lr


def novograd_(bucket: Bucket, rule: NovoGradRule, tables: TableCache | None) -> None:
    """One step of NovoGrad."""
    if tables is not None:
        from smpc.kernels.programs.optimizers_triton import launch_novograd_

        launch_novograd_(bucket, rule, tables)
        return
    params, grads = _working(bucket)
    changes = _scaled(grads, rule.gradient)
    if rule.inner:
        torch._foreach_add_(changes, params, alpha=rule.inner)
    torch._foreach_add_(changes, bucket.first, alpha=-rule.rest1)
    torch._foreach_add_(bucket.first, changes)
    updates = _scaled(bucket.first, rule.update)
    if rule.outer is not None:
        torch._foreach_addcmul_(updates, params, list(rule.outer.to(params[0].dtype).unbind()))
    torch._foreach_sub_(params, updates)
    _store(bucket, params)


def split_factors(factors: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 numbers as sums of two in fp32: the rounded ones, and what rounding left of them."""
    high = factors.to(torch.float32)
    return high, (factors - high).to(torch.float32)


def _scaled(tensors: list[Tensor], factors: Tensor) -> list[Tensor]:
    """Each tensor times its factor, [tensors] in fp64."""
    if tensors[0].dtype == factors.dtype:
        return list(torch._foreach_mul(tensors, list(factors.unbind())))
    high, low = split_factors(factors)
    products = list(torch._foreach_mul(tensors, list(low.unbind())))
    torch._foreach_addcmul_(products, tensors, list(high.unbind()))
    return products


def _working(bucket: Bucket) -> tuple[list[Tensor], list[Tensor]]:
    """p and g in the dtype of the moments; p is updated in place, and `_store` rounds it where it is a copy."""
    dtype = bucket.first[0].dtype
    params = bucket.masters or [param.to(dtype) for param in bucket.params]
    return params, [grad.to(dtype) for grad in bucket.grads]


def _store(bucket: Bucket, params: list[Tensor]) -> None:
    if params[0] is not bucket.params[0]:
        torch._foreach_copy_(bucket.params, params)
