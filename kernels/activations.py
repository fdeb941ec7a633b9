"""Activations of a transformer's feed-forward layer as ops: `smpc::bias_gelu`, `smpc::swiglu`.

    bias_gelu(x, b)      y = gelu(x + b)       exact: u (1 + erf(u / sqrt 2)) / 2
                                               tanh:  u (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3))) / 2
    swiglu(g, u)         y = g sigmoid(g) u

Computed in fp32 (fp64 for fp64), rounded once. The backward passes compute the activation again from the inputs, so nothing but the
inputs is kept; the gradient of the bias is summed in fp32. The halves of one matrix, `gate, up = packed.chunk(2, -1)`, are read in
place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.kernels.shared.tensor_checks import (
    accumulation_dtype,
    as_rows,
    kernels_compute,
    require_floating,
    require_like,
)

APPROXIMATIONS = ("none", "tanh")


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """`gelu(x + bias)` of `x` [..., features] and `bias` [features]; `approximate` as in `torch.nn.functional.gelu`.

    Raises UsageError (a ValueError) for shapes, dtypes, devices or an approximation that do not fit.
    """
    require_floating("bias_gelu", x=x, bias=bias)
    faults = []
    if x.dim() == 0:
        faults.append("expected x to have a dimension, found none")
    elif bias is not None and tuple(bias.shape) != (x.shape[-1],):
        faults.append(f"expected bias of shape ({x.shape[-1]},), found {tuple(bias.shape)}")
    if approximate not in APPROXIMATIONS:
        faults.append(f"expected approximate to be one of {', '.join(APPROXIMATIONS)}, found {approximate!r}")
    if faults:
        raise UsageError("bias_gelu: " + "; ".join(faults))
    out: Tensor = _bias_gelu(x, bias, approximate == "tanh")
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, of two tensors of one shape, dtype and device; otherwise UsageError (a ValueError)."""
    require_floating("swiglu", gate=gate, up=up)
    require_like("swiglu", "gate", gate, up=up)
    if gate.dim() == 0:
        raise UsageError("swiglu: expected gate and up to have a dimension, found none")
    out: Tensor = _swiglu(gate, up)
    return out


@torch.library.custom_op("smpc::bias_gelu", mutates_args=())
def _bias_gelu(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    if kernels_compute(x):
        from smpc.kernels.programs.activations_triton import launch_bias_gelu

        return launch_bias_gelu(as_rows(x), bias, tanh).view(x.shape)
    values = _biased(x, bias)
    return torch.nn.functional.gelu(values, approximate="tanh" if tanh else "none").to(x.dtype).contiguous()


@torch.library.custom_op("smpc::bias_gelu_backward", mutates_args=())
def _bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    if kernels_compute(x):
        from smpc.kernels.programs.activations_triton import launch_bias_gelu_backward

        grad_x, grad_bias = launch_bias_gelu_backward(as_rows(grad), as_rows(x), bias, tanh)
        return grad_x.view(x.shape), grad_bias
    wide = grad.to(accumulation_dtype(x.dtype)) * gelu_slope(_biased(x, bias), tanh)
    grad_bias = x.new_empty(0) if bias is None else wide.reshape(-1, x.shape[-1]).sum(0).to(bias.dtype)
    return wide.to(x.dtype).contiguous(), grad_bias


@torch.library.custom_op("smpc::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if kernels_compute(gate):
        from smpc.kernels.programs.activations_triton import launch_swiglu

        return launch_swiglu(as_rows(gate), as_rows(up)).view(gate.shape)
    wide = accumulation_dtype(gate.dtype)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()


@torch.library.custom_op("smpc::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if kernels_compute(gate):
        from smpc.kernels.programs.activations_triton import launch_swiglu_backward

        grad_gate, grad_up = launch_swiglu_backward(as_rows(grad), as_rows(gate), as_rows(up))
        return grad_gate.view(gate.shape), grad_up.view(gate.shape)
    wide = accumulation_dtype(gate.dtype)
    values, incoming = gate.to(wide), grad.to(wide)
    sigmoid = values.sigmoid()
    grad_gate = incoming * up.to(wide) * sigmoid * (1 + values * (1 - sigmoid))
    return grad_gate.to(gate.dtype).contiguous(), (incoming * values * sigmoid).to(gate.dtype).contiguous()


def gelu_slope(values: Tensor, tanh: bool) -> Tensor:
    """The derivative of gelu."""
    if tanh:
        bent = torch.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values**3))
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * values.square())
        return 0.5 * (1 + bent) + 0.5 * values * (1 - bent.square()) * inner
    density = torch.exp(-0.5 * values.square()) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(values / math.sqrt(2))) + values * density


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    values = x.to(accumulation_dtype(x.dtype))
    return values if bias is None else values + bias.to(values.dtype)


@_bias_gelu.register_fake
def _(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return x.new_empty(x.shape)


@_bias_gelu_backward.register_fake
def _(grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if bias is None else bias.new_empty(bias.shape)


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@_swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save_bias_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _differentiate_bias_gelu(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = _bias_gelu_backward(grad, x, bias, ctx.tanh)
    return grad_x, None if bias is None else grad_bias, None


def _save_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    grads: tuple[Tensor, Tensor] = _swiglu_backward(grad, gate, up)
    return grads


_bias_gelu.register_autograd(_differentiate_bias_gelu, setup_context=_save_bias_gelu)
_swiglu.register_autograd(_differentiate_swiglu, setup_context=_save_swiglu)
