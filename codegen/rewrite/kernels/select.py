"""The rewrites, in the order in which they look at a trace, and the choice among them; the setting: `smpc.kernels.setting`."""

from __future__ import annotations

from collections.abc import Sequence

from smpc.codegen.rewrite.kernels import (
    add_norm,
    bias_dropout_add,
    bias_gelu,
    cross_entropy,
    flash_attention,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rotary,
    swiglu,
)
from smpc.codegen.rewrite.kernels.replacement import Rewrite
from smpc.errors import ConfigError
from smpc.kernels.defaults import used_by_default
from smpc.kernels.setting import AUTO, OFF, OPERATIONS, faults_of, names_in

# Where two could take the same nodes the earlier one does.
REWRITES: tuple[Rewrite, ...] = (
    linear_cross_entropy.REWRITE,
    cross_entropy.REWRITE,
    flash_attention.REWRITE,
    bias_dropout_add.REWRITE,
    *add_norm.REWRITES,
    rms_norm.REWRITE,
    layer_norm.REWRITE,
    rotary.REWRITE,
    swiglu.REWRITE,
    bias_gelu.REWRITE,
)
assert tuple(rewrite.op for rewrite in REWRITES) == OPERATIONS, "smpc.kernels.setting names the rewrites in this order"


def select_rewrites(kernels: str | Sequence[str], *, on_gpu: bool) -> tuple[Rewrite, ...]:
    """The rewrites that a setting asks for, for targets that are GPUs or not. ConfigError for what is no setting."""
    faults = faults_of(kernels)
    if faults:
        raise ConfigError("\n".join(faults))
    names = names_in(kernels)
    if names == (OFF,):
        return ()
    if names == (AUTO,):
        return tuple(rewrite for rewrite in REWRITES if on_gpu and used_by_default(rewrite.op))
    return tuple(rewrite for rewrite in REWRITES if rewrite.op in names)
