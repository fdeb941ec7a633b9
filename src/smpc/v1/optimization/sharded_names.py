"""Attributes of an optimizer that scripts read under `sharded_data_parallel_degree`, by DeepSpeed's names. Without that key they do not
exist.

    optimizer.fp16_groups                      for each group, the model's parameters, in parts
    optimizer.fp32_partitioned_groups_flat     for each group, this rank's parts of what is updated, in one flat fp32 tensor; a copy
    optimizer._global_grad_norm                the norm of all gradients before the last step, which clips to `sdp_gradient_clipping`
    optimizer.ds_param_shard_group             the ranks that have the other parts

Source: public training scripts for SMP v1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from smpc.mesh import Axis
from smpc.sharding.tensors import local
from smpc.v1.session.state import state


class ShardedNames(Optimizer):
    """These attributes, for an optimizer of a sharded model."""

    optimizer: Optimizer
    parameter_of: Callable[[Tensor], Tensor]
    _norm: Tensor | None = None

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's parameters, whatever their dtype."""
        _check("fp16_groups")
        return [[self.parameter_of(entry) for entry in group["params"]] for group in self.optimizer.param_groups]

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Masters, or the parameters themselves in fp32: this rank's parts."""
        _check("fp32_partitioned_groups_flat")
        groups = [[local(entry.detach()) for entry in group["params"]] for group in self.optimizer.param_groups]
        return [
            torch.cat([part.float().reshape(-1) for part in parts]) if parts else torch.zeros(0) for parts in groups
        ]

    @property
    def ds_param_shard_group(self) -> dist.ProcessGroup:
        """The process group over which each parameter is sharded."""
        _check("ds_param_shard_group")
        return state.session.groups[Axis.FSDP]

    @property
    def _global_grad_norm(self) -> Any:
        """0-dimensional; None before the first step, and without clipping."""
        _check("_global_grad_norm")
        return self._norm


def max_norm() -> float:
    """The norm that the optimizer's step clips to; 0: no clipping."""
    is_sharded = state.initialized and state.session.mesh.shard_size > 1
    return state.cfg.sdp_gradient_clipping if is_sharded else 0.0


def _check(name: str) -> None:
    if not (state.initialized and state.session.mesh.shard_size > 1):
        raise AttributeError(
            f"DistributedOptimizer.{name}: there is one under sharded data parallelism alone (sharded_data_parallel_degree above 1)"
        )
