"""The common part of LayerNorm and RMSNorm: one formula with two switches, in torch, and the choice between it and the kernels.

    s = x + r                                  r: residual, optional; s is rounded to x's dtype, since it is handed out
    m = mean(s)        (LayerNorm; RMSNorm: 0)
    v = mean((s - m)^2)
    k = 1 / sqrt(v + eps)
    h = (s - m) k                              normalized
    y = h (w + offset) + b                     w, b optional; offset 1 for weights stored as differences from one

    g = dy (w + offset)
    ds = k (g - mean(g) - h mean(g h))         (RMSNorm: without mean(g))   plus s's own incoming gradient
    dw = sum over rows of dy h,   db = sum over rows of dy

All of it in fp32 (fp64 for fp64 inputs), rounded once at the end. `memory_efficient`, as in apex, keeps y for the backward
pass instead of s, and computes h = (y - b) / (w + offset) again; a factor closer to zero than eps counts as eps there.

`NormRule` says which of the two it is. Tensors here are matrices: every leading dimension is a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.kernels.shared.tensor_checks import accumulation_dtype, kernels_compute, require_floating, require_like

# The widest row that the kernels hold in registers; wider rows take the formula in torch.
MAX_COLUMNS = 32768


@dataclass(frozen=True, slots=True)
class NormRule:
    """Which norm: `center` subtracts the mean (LayerNorm); `eps` and `offset` as in the module's docstring."""

    center: bool
    eps: float
    offset: float = 0.0


class Normed(NamedTuple):
    """The results of a forward pass; `summed` and `mean` are None where the norm has none. `mean`, `rstd`: one per row."""

    out: Tensor
    summed: Tensor | None
    mean: Tensor | None
    rstd: Tensor


class NormSaved(NamedTuple):
    """The inputs of the backward pass; `source` is the normalized input, or the output if `from_output`."""

    source: Tensor
    from_output: bool
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    rstd: Tensor


class NormGradients(NamedTuple):
    """Gradients; empty for absent weights."""

    x: Tensor
    weight: Tensor
    bias: Tensor


def forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, rule: NormRule) -> Normed:
    """Normalizes the last dimension of `x` (+ `residual`), any leading shape; `mean` and `rstd` have the leading shape."""
    if kernels_compute(x) and x.shape[-1] <= MAX_COLUMNS:
        from smpc.kernels.programs.norms_triton import launch_forward

        return launch_forward(x, residual, weight, bias, rule)
    return reference_forward(x, residual, weight, bias, rule)


def backward(grad: Tensor, grad_summed: Tensor | None, saved: NormSaved, rule: NormRule) -> NormGradients:
    """Gradients of `forward`; `grad_summed` is what arrives at `summed` from its other uses."""
    if kernels_compute(grad) and grad.shape[-1] <= MAX_COLUMNS:
        from smpc.kernels.programs.norms_triton import launch_backward

        return launch_backward(grad, grad_summed, saved, rule)
    return reference_backward(grad, grad_summed, saved, rule)


def reference_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, rule: NormRule
) -> Normed:
    """The formula, operation by operation."""
    wide = accumulation_dtype(x.dtype)
    summed = None if residual is None else x + residual
    values = (x if summed is None else summed).to(wide)
    mean = values.mean(-1) if rule.center else None
    centered = values if mean is None else values - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centered.square().mean(-1) + rule.eps)
    out = centered * rstd.unsqueeze(-1)
    if weight is not None:
        out = out * (weight.to(wide) + rule.offset)
    if bias is not None:
        out = out + bias.to(wide)
    return Normed(_contiguous(out, x.dtype), None if summed is None else _contiguous(summed, x.dtype), mean, rstd)


def reference_backward(grad: Tensor, grad_summed: Tensor | None, saved: NormSaved, rule: NormRule) -> NormGradients:
    """The gradient formula, operation by operation."""
    wide = accumulation_dtype(grad.dtype)
    incoming = grad.to(wide)
    factor = None if saved.weight is None else saved.weight.to(wide) + rule.offset
    rstd = saved.rstd.unsqueeze(-1)
    normalized = _normalized(saved, factor, rule)
    scaled = incoming if factor is None else incoming * factor
    projected = scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)
    if rule.center:
        projected = projected - scaled.mean(-1, keepdim=True)
    grad_x = projected * rstd
    if grad_summed is not None:
        grad_x = grad_x + grad_summed.to(wide)
    rows = tuple(range(grad.dim() - 1))
    none = grad.new_empty(0)
    return NormGradients(
        _contiguous(grad_x, grad.dtype),
        none if saved.weight is None else _sum(incoming * normalized, rows).to(saved.weight.dtype),
        none.clone() if saved.bias is None else _sum(incoming, rows).to(saved.bias.dtype),
    )


def _normalized(saved: NormSaved, factor: Tensor | None, rule: NormRule) -> Tensor:
    values = saved.source.to(saved.rstd.dtype)
    if not saved.from_output:
        centered = values if saved.mean is None else values - saved.mean.unsqueeze(-1)
        return centered * saved.rstd.unsqueeze(-1)
    if saved.bias is not None:
        values = values - saved.bias.to(values.dtype)
    return values if factor is None else values / _away_from_zero(factor, rule.eps)


def fake_gradients(grad: Tensor, weight: Tensor | None, bias: Tensor | None) -> NormGradients:
    """The shapes of `backward`, for tracing."""
    absent = grad.new_empty(0)
    return NormGradients(
        grad.new_empty(grad.shape),
        absent if weight is None else weight.new_empty(weight.shape),
        torch.empty_like(absent) if bias is None else bias.new_empty(bias.shape),
    )


def _away_from_zero(values: Tensor, least: float) -> Tensor:
    """`values`, with every magnitude below `least` raised to it; zero counts as positive."""
    return torch.where(values >= 0, values.clamp(min=least), values.clamp(max=-least))


def _sum(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    # `sum` over no dimension at all means over every one.
    return values.sum(dims) if dims else values.clone()


def _contiguous(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).contiguous()


def check_norm(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, rule: NormRule
) -> None:
    """Refuses what no norm can be computed of, with all that is wrong with it."""
    require_floating(op, x=x, residual=residual, weight=weight, bias=bias)
    faults = []
    if x.dim() == 0 or x.shape[-1] == 0:
        faults.append(f"expected x to have at least one column, found shape {tuple(x.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and x.dim() and tuple(parameter.shape) != (x.shape[-1],):
            faults.append(f"expected {name} of shape ({x.shape[-1]},), found {tuple(parameter.shape)}")
    if bias is not None and weight is None:
        faults.append("expected weight along with bias, found None")
    if not rule.eps > 0:
        faults.append(f"expected eps > 0, found {rule.eps}")
    if faults:
        raise UsageError(f"{op}: " + "; ".join(faults))
    require_like(op, "x", x, residual=residual)


def flatten_normalized(op: str, x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` with its last dimensions, which must be `shape`, made one."""
    expected = tuple(shape)
    if not expected or x.dim() < len(expected) or tuple(x.shape[-len(expected) :]) != expected:
        raise UsageError(f"{op}: expected an input whose last dimensions are {expected}, found {tuple(x.shape)}")
    return x if len(expected) == 1 else x.flatten(-len(expected))
