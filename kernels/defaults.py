"""Which kernels are used where nobody asked for them, and why: a table, because the answer is measured, not designed.

    used_by_default("layer_norm")      -> False

A kernel is on when a benchmark on the target has shown it to beat its library peer (`benchmarks/kernels.py`, results in
`benchmarks/results/`); until then the peer computes. It governs automatic choices, such as `smpc.nn.FusedLayerNorm` without
`kernel=` and rewrites that replace a model's modules. Calling an op of this package always runs its kernel on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelDefault:
    """One op: whether it is used by default, instead of what, and the reason in words."""

    op: str
    enabled: bool
    peer: str
    reason: str


_UNMEASURED = "not measured on a GPU yet"

DEFAULTS: tuple[KernelDefault, ...] = (
    KernelDefault("add_layer_norm", False, "add and layer_norm of torch", _UNMEASURED),
    KernelDefault("add_rms_norm", False, "add and rms_norm of torch", _UNMEASURED),
    KernelDefault("adamw", False, "torch.optim.AdamW(fused=True)", _UNMEASURED),
    KernelDefault("bias_dropout_add", False, "add, dropout and add of torch", _UNMEASURED),
    KernelDefault("bias_gelu", False, "add and gelu of torch", _UNMEASURED),
    KernelDefault("cross_entropy", False, "torch.nn.functional.cross_entropy", _UNMEASURED),
    KernelDefault("gradient_norm", False, "foreach functions of torch", _UNMEASURED),
    KernelDefault("lamb", False, "foreach functions of torch", _UNMEASURED),
    KernelDefault("flash_attention", False, "torch.nn.functional.scaled_dot_product_attention", _UNMEASURED),
    KernelDefault("layer_norm", False, "torch.nn.functional.layer_norm", _UNMEASURED),
    KernelDefault("linear_cross_entropy", False, "linear and cross_entropy of torch", _UNMEASURED),
    KernelDefault("novograd", False, "foreach functions of torch", _UNMEASURED),
    KernelDefault("rms_norm", False, "torch.nn.functional.rms_norm", _UNMEASURED),
    KernelDefault("rotary", False, "multiply, rotate and add of torch", _UNMEASURED),
    KernelDefault("swiglu", False, "silu and multiply of torch", _UNMEASURED),
    KernelDefault("vocab_parallel_cross_entropy", False, "the same formula, operation by operation", _UNMEASURED),
)


def used_by_default(op: str) -> bool:
    """Whether `op`'s kernel is used where nobody asked for it."""
    found = [default.enabled for default in DEFAULTS if default.op == op]
    assert len(found) == 1, f"expected one of {[default.op for default in DEFAULTS]}, found {op!r}"
    return found[0]
