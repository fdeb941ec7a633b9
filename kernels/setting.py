"""The setting `kernels`: which operations of this package are to replace what a model computes.

    "auto"                   those that are known to beat their peers on the target: `smpc.kernels.defaults`
    "off"                    none
    "rms_norm,swiglu"        these, whether or not they are quicker; a tuple of names says the same

It knows names alone, and imports nothing, so that a configuration can be checked without torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

AUTO, OFF = "auto", "off"

# What can be asked for by name, in the order in which rewrites look for it: of two that take the same the first does.
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
    """What became of an op of `smpc.kernels`, asked for or on by default: `reason` says why it was not used, "" that it was."""

    op: str
    count: int  # places; 0: none in the model
    first: str  # the first of them: a module, or a source line
    reason: str = ""


def names_in(kernels: str | Sequence[str]) -> tuple[str, ...]:
    """The names in a setting; "auto" and "off" are names here."""
    return tuple(name.strip() for name in kernels.split(",")) if isinstance(kernels, str) else tuple(kernels)


def faults_of(kernels: str | Sequence[str]) -> list[str]:
    """What is wrong with a setting, one line for each."""
    names = names_in(kernels)
    return [] if names in ((AUTO,), (OFF,)) else [_fault(name) for name in names if name not in OPERATIONS]


def _fault(name: str) -> str:
    if name in (AUTO, OFF):
        return f"kernels: {name!r} stands alone, found it in a list of names"
    close = difflib.get_close_matches(name, [*OPERATIONS, AUTO, OFF], n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"kernels: expected 'auto', 'off' or names among {', '.join(OPERATIONS)}, found {name!r}{hint}"
