"""Source: public training scripts for SMP v2."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["get_global_ranks"]


def get_global_ranks(group: dist.ProcessGroup | None = None) -> list[int]:
    """The global ranks of a process group, in its order; None: of all processes."""
    found: list[int] = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    return found
