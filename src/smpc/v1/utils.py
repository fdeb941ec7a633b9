"""`smp.utils`: how a parameter is sliced, and messages marked with ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smpc.errors import UsageError
from smpc.v1.session.process_state import state
from smpc.v1.session.ranks import local_rank, pp_rank, rank, rdp_rank, tp_rank

__all__ = ["get_distribution_axis", "rmsg"]


def get_distribution_axis(param: Tensor) -> int | None:
    """The dimension along which tensor-parallel ranks hold slices of a parameter, or of its fp32 master; None if each rank has all of it.

    Raises UsageError before there is a `smp.DistributedModel`.
    """
    if state.model is None:
        raise UsageError("get_distribution_axis: expected a smp.DistributedModel, found none; construct it first")
    script = state.script_with([param], "get_distribution_axis")
    own = param if script.optimizer is None else script.optimizer.parameter_of(param)
    for name, parameter in script.model.named_parameters():
        if parameter is own:
            shard = script.model.slices.get(name)
            return None if shard is None else int(shard.dim)
    return None


def rmsg(msg: Any) -> str:
    """A message with the ranks of this process before it; the message alone before `smp.init`."""
    if not state.initialized:
        return str(msg)
    return f"[rank {rank()}, local {local_rank()}, pp {pp_rank()}, tp {tp_rank()}, rdp {rdp_rank()}] {msg}"
