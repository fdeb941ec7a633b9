"""`FusedLayerNorm` and `FusedRMSNorm`: apex's modules of these names, without apex.

    norm = FusedLayerNorm(1024)            weight, bias: as torch.nn.LayerNorm, state dicts are interchangeable
    norm = FusedRMSNorm(1024, eps=1e-6)    weight: as torch.nn.RMSNorm

On CUDA the kernel of `smpc.kernels` computes them if it is known to be the faster one (`smpc.kernels.setting`) or asked for by
`kernel=True`; otherwise, and on every other device, torch does. Two features that torch lacks always use the kernel's op, on every
device: `memory_efficient`, which keeps the output for the backward pass instead of the input, and inputs of another dtype than the
weights'. Statistics are fp32 in all of them.

Source: apex.normalization (FusedLayerNorm, FusedRMSNorm); public SMP v1 API (`smp.nn.FusedLayerNorm`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smpc.errors import UsageError
from smpc.kernels.layer_norm import layer_norm
from smpc.kernels.rms_norm import rms_norm
from smpc.kernels.setting import used_by_default


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
