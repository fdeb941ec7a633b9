"""Sharded data parallelism of a module that runs as it is, without a program: its blocks are units of `smpc.sharding`.

Construction gives all ranks the parameters and buffers of the group's first one, and divides the parameters over the mesh. The hooks are
those of a step; without them, every backward averages its gradients. What is `apart` lies in parts on other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from smpc.executor.replicas.apart import Apart, make_equal
from smpc.executor.replicas.data_parallel import broadcast
from smpc.sharding import ShardingOptions, Unit, shard


class ModuleShards:
    """The hooks of steps of one module. `group`: all ranks of the mesh; `units` says which units a module has, once all ranks are equal."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        mesh: DeviceMesh,
        units: Callable[[nn.Module], Iterable[str | Unit]],
        options: ShardingOptions,
        *,
        broadcast_buffers: bool = True,
        apart: Apart | None = None,
    ) -> None:
        self._module, self._group, self._has_buffers = module, group, broadcast_buffers
        make_equal([module], group, apart)
        self._sharded = shard(module, units(module), mesh, options)
        self.exchanged = self._sharded.exchanged

    def release(self) -> None:
        """Free whole parameters: a backward of what has run gathers them again."""
        self._sharded.release()

    def start_of_step(self) -> None:
        """Broadcast buffers."""
        if self._has_buffers:
            broadcast(self._module.buffers(), self._group)
        self._sharded.begin_step()

    def before_last_backward(self, stage: int, roots: Sequence[Tensor]) -> None:
        """Average what has added up in the backward that follows."""
        self._sharded.last_backward()

    def end_of_step(self) -> None:
        """Average what no backward has, and let go of what is whole."""
        self._sharded.end_step()

    def did_not_train(self) -> None:
        """Let go of what is whole."""
        self._sharded.end_step()
