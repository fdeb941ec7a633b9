"""Modules whose parameters are others on each rank of the replicas' group, such as experts that ranks divide among them.

    all else     in parts on all replicas            a unit of `smpc.sharding` over their mesh
    apart        in parts on those with the same     a unit over a mesh of its own, inside of what is around it

Gradients of what is apart are averaged over the ranks of its mesh; what they must be divided by beyond that is up to whoever made them
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smpc.executor.replicas.data_parallel import broadcast
from smpc.sharding import Unit


@dataclass(frozen=True, slots=True)
class Apart:
    """See above. `group`: all ranks of `mesh`, which have the same values; `parameters`: those that differ elsewhere."""

    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    mesh: DeviceMesh
    group: dist.ProcessGroup

    def inside(self, root: nn.Module) -> list[nn.Module]:
        """The modules that are inside another one, in its order."""
        own = {id(module) for module in self.modules}
        return [module for module in root.modules() if id(module) in own]

    def units(self, root: nn.Module) -> list[Unit]:
        """The units of what is apart in a module that runs as it is, to come before all others."""
        own = {id(module) for module in self.modules}
        return [Unit(name, mesh=self.mesh) for name, module in root.named_modules() if id(module) in own]


def make_equal(modules: Sequence[nn.Module], group: dist.ProcessGroup, apart: Apart | None) -> None:
    """Give all ranks of the group the parameters and buffers of its first one; of what is apart, those of the first that has the same."""
    own = {} if apart is None else {id(parameter): parameter for parameter in apart.parameters}
    held = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    broadcast(
        [
            *(parameter for key, parameter in held.items() if key not in own),
            *(buffer for module in modules for buffer in module.buffers()),
        ],
        group,
    )
    if apart is not None:
        broadcast([parameter for key, parameter in held.items() if key in own], apart.group)
