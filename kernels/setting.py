"""The setting `kernels`: which operations of this package are to replace what a model computes.

    "auto"                   those that are known to beat their peers on the target: `DEFAULTS`
    "off"                    none
    "rms_norm,swiglu"        these, whether or not they are quicker; a tuple of names says the same

It knows names alone, and imports nothing, so that a configuration can be checked without torch.

`DEFAULTS`: which kernels are used without a request, and why. It is a table, because the answer is measured, not designed.

    used_by_default("layer_norm")      -> False

A kernel is on when a benchmark on the target has shown it to beat its library peer (`benchmarks/kernels.py`, results in
`benchmarks/results/`); until then the peer computes. It governs automatic choices, such as `smpc.nn.FusedLayerNorm` without
`kernel=` and rewrites that replace a model's modules. Calling an op of this package always runs its kernel on CUDA.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

AUTO, OFF = "auto", "off"

# The kernels' names, in the order in which rewrites look for matches: of two that match the same operations the first wins.
OPERATIONS: tuple[str, ...] = (
    "linear_cross_entropy",
    "cross_entropy",
    "flash_attention",
    "bias_dropout_add",
    "add_rms_norm",
    "add_layer_norm",
    "rms_norm",
    "layer_norm",
    "rotary",
    "swiglu",
    "bias_gelu",
)


@dataclass(frozen=True, slots=True)
class KernelUse:
    """The outcome for an op of `smpc.kernels`, requested or on by default. `reason`: why it was not used, "" if it was."""

    op: str
    count: int  # places; 0: none in the model
    first: str  # the first of them: a module, or a source line
    reason: str = ""


def names_in(kernels: str | Sequence[str]) -> tuple[str, ...]:
    """The names in a setting; "auto" and "off" are names here."""
    return tuple(name.strip() for name in kernels.split(",")) if isinstance(kernels, str) else tuple(kernels)


def faults_of(kernels: str | Sequence[str]) -> list[str]:
    """The violations of a setting, one line each."""
    names = names_in(kernels)
    return [] if names in ((AUTO,), (OFF,)) else [_fault(name) for name in names if name not in OPERATIONS]


def _fault(name: str) -> str:
    if name in (AUTO, OFF):
        return f"kernels: {name!r} stands alone, found it in a list of names"
    close = difflib.get_close_matches(name, [*OPERATIONS, AUTO, OFF], n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"kernels: expected 'auto', 'off' or names among {', '.join(OPERATIONS)}, found {name!r}{hint}"


@dataclass(frozen=True, slots=True)
class KernelDefault:
    """One op: whether it is used by default, what it replaces, and the reason in words."""

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
    """Whether `op`'s kernel is used without a request."""
    found = [default.enabled for default in DEFAULTS if default.op == op]
    assert len(found) == 1, f"expected one of {[default.op for default in DEFAULTS]}, found {op!r}"
    return found[0]


def wanted(kernels: str | Sequence[str], *, on_gpu: bool) -> tuple[str, ...]:
    """The operations that a setting without faults asks for, for targets that are GPUs or not."""
    names = names_in(kernels)
    if names == (AUTO,):
        return tuple(op for op in OPERATIONS if on_gpu and used_by_default(op))
    return () if names == (OFF,) else names
