"""`FusedLayerNorm` and `FusedRMSNorm`: apex's modules of these names, without apex.

    norm = FusedLayerNorm(1024)            weight, bias: as torch.nn.LayerNorm, state dicts are interchangeable
    norm = FusedRMSNorm(1024, eps=1e-6)    weight: as torch.nn.RMSNorm

On CUDA the kernel of `smpc.kernels` computes them if it is known to be the faster one (`smpc.kernels.setting`) or asked for by
`kernel=True`; otherwise, and on every other device, torch does. Two features that torch lacks always use the kernel's op, on every
device: `memory_efficient`, which keeps the output for the backward pass instead of the input, and inputs of another dtype than the
weights'. Statistics are fp32 in all of them.

Source: apex.normalization (FusedLayerNorm, FusedRMSNorm); public SMP v1 API (`smp.nn.FusedLayerNorm`).

Normalization over a hidden dimension that may be split over tensor-parallel ranks.

    DistributedLayerNorm   y = (x - mean) / sqrt(var + eps) * weight + bias, mean and var over the whole last dimension H
    DistributedRMSNorm     y = x / sqrt(mean(x^2) + eps) * weight

If hidden states are split, every rank has H / tp of them. For layer norms the ranks exchange the mean and the squared deviations of their
slices, two numbers a row, and combine them as Chan et al. (1979) do, which stays accurate where sums of squares would cancel; the backward
pass sums two numbers a row. For RMS norms it is one number a row each way. Weight and bias are split likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup, gathered, sum_over
from smpc.kernels.layer_norm import layer_norm
from smpc.kernels.rms_norm import rms_norm
from smpc.kernels.setting import used_by_default
from smpc.nn.parallel import DistributedModule, TensorParallel


class _FusedNorm(nn.Module):
    """The arguments that both norms have."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        elementwise_affine: bool,
        memory_efficient: bool,
        kernel: bool,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or min(shape) < 1:
            raise UsageError(
                f"{type(self).__name__}: expected normalized_shape to be one or more sizes of at least 1, found {shape}"
            )
        if not eps > 0:
            raise UsageError(f"{type(self).__name__}: expected eps > 0, found {eps}")
        self.normalized_shape = torch.Size(shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        self.kernel = kernel

    def extra_repr(self) -> str:
        """Shown by `print(module)`, in apex's words."""
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"

    def _needs_op(self, x: Tensor, weight: Tensor | None) -> bool:
        if self.memory_efficient or (weight is not None and weight.dtype != x.dtype):
            return True
        return self.kernel and x.is_cuda


class FusedLayerNorm(_FusedNorm):
    """LayerNorm over the last dimensions `normalized_shape`; see the module's docstring.

    `kernel` True or False asks for the kernel or for torch's on CUDA; None takes what is known to be faster.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        *,
        kernel: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        use = used_by_default("layer_norm") if kernel is None else kernel
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient, use)
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """The normalized input, in its dtype."""
        if self._needs_op(input, self.weight):
            return layer_norm(
                input, self.normalized_shape, self.weight, self.bias, self.eps, memory_efficient=self.memory_efficient
            )
        return nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class FusedRMSNorm(_FusedNorm):
    """RMSNorm over the last dimensions `normalized_shape`; see the module's docstring.

    `kernel` True or False asks for the kernel or for torch's on CUDA; None takes what is known to be faster.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        *,
        kernel: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        use = used_by_default("rms_norm") if kernel is None else kernel
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient, use)
        self.weight: nn.Parameter | None
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """The normalized input, in its dtype."""
        if self._needs_op(input, self.weight):
            return rms_norm(input, self.normalized_shape, self.weight, self.eps, memory_efficient=self.memory_efficient)
        return nn.functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)


class DistributedLayerNorm(DistributedModule):
    """LayerNorm of hidden states inside: [tp * B, S, H] or [tp * B, S, H / tp] in and out."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, parallel: TensorParallel) -> None:
        super().__init__(parallel)
        self.hidden_size, self.eps = hidden_size, eps
        dim = 0 if parallel.splits_hidden else None
        self.declare("weight", (hidden_size,), lambda block: block.fill_(1.0), dim)
        self.declare("bias", (hidden_size,), Tensor.zero_, dim)
        self.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalizes the last dimension."""
        group = self.parallel.group
        weight, bias = self.get_parameter("weight"), self.get_parameter("bias")
        if group.size == 1 or not self.parallel.splits_hidden:
            return F.layer_norm(hidden, (self.hidden_size,), weight, bias, self.eps)
        found: Tensor = _SplitLayerNorm.apply(hidden, weight, bias, self.eps, group)  # type: ignore[no-untyped-call]
        return found


class DistributedRMSNorm(DistributedModule):
    """RMSNorm of hidden states inside, as of T5: in float32, then scaled in the dtype of the weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, parallel: TensorParallel) -> None:
        super().__init__(parallel)
        self.hidden_size, self.eps = hidden_size, eps
        dim = 0 if parallel.splits_hidden else None
        self.declare("weight", (hidden_size,), lambda block: block.fill_(1.0), dim)
        self.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalizes the last dimension."""
        weight, group = self.get_parameter("weight"), self.parallel.group
        if group.size > 1 and self.parallel.splits_hidden:
            found: Tensor = _SplitRMSNorm.apply(hidden, weight, self.eps, group)  # type: ignore[no-untyped-call]
            return found
        rstd = torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + self.eps)
        return weight * (hidden * rstd).to(weight.dtype)


class _SplitLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, eps: float, group: TensorGroup) -> Tensor:
        x = hidden.float() if hidden.dtype in (torch.float16, torch.bfloat16) else hidden
        own_mean = x.mean(-1, keepdim=True)
        own_squares = (x - own_mean).square().sum(-1, keepdim=True)
        parts = gathered(torch.stack([own_mean, own_squares])[None], 0, group)
        means, squares = parts[:, 0], parts[:, 1]
        mean = means.mean(0)
        deviations = squares.sum(0) + x.shape[-1] * (means - mean).square().sum(0)
        rstd = torch.rsqrt(deviations / (x.shape[-1] * group.size) + eps)
        ctx.save_for_backward(hidden, weight, mean, rstd)
        ctx.group = group
        return ((x - mean) * rstd).to(weight.dtype).mul(weight).add(bias).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        hidden, weight, mean, rstd = ctx.saved_tensors
        normed = (hidden.to(mean.dtype) - mean) * rstd
        out = grad.to(mean.dtype)
        scaled = out * weight.to(mean.dtype)
        sums = sum_over(torch.stack([scaled.sum(-1, keepdim=True), (scaled * normed).sum(-1, keepdim=True)]), ctx.group)
        sums /= hidden.shape[-1] * ctx.group.size
        into = (scaled - sums[0] - normed * sums[1]) * rstd
        rows = tuple(range(out.dim() - 1))
        into_weight, into_bias = (out * normed).sum(rows), out.sum(rows)
        return into.to(hidden.dtype), into_weight.to(weight.dtype), into_bias.to(weight.dtype), None, None


class _SplitRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, group: TensorGroup) -> Tensor:
        x = hidden.float() if hidden.dtype in (torch.float16, torch.bfloat16) else hidden
        squares = sum_over(x.square().sum(-1, keepdim=True), group)
        rstd = torch.rsqrt(squares / (x.shape[-1] * group.size) + eps)
        ctx.save_for_backward(hidden, weight, rstd)
        ctx.group = group
        return weight * (x * rstd).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, rstd = ctx.saved_tensors
        normed = hidden.to(rstd.dtype) * rstd
        out = grad.to(rstd.dtype)
        scaled = out * weight.to(rstd.dtype)
        mean = sum_over((scaled * normed).sum(-1, keepdim=True), ctx.group) / (hidden.shape[-1] * ctx.group.size)
        into = (scaled - normed * mean) * rstd
        into_weight = (out * normed).sum(tuple(range(out.dim() - 1)))
        return into.to(hidden.dtype), into_weight.to(weight.dtype), None, None


def make_norm(kind: str, hidden_size: int, eps: float, parallel: TensorParallel) -> DistributedModule:
    """A norm of the kind "layer" or "rms"."""
    cls = {"layer": DistributedLayerNorm, "rms": DistributedRMSNorm}[kind]
    return cls(hidden_size, eps, parallel=parallel)
