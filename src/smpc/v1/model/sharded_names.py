"""Sharded parameters without a pipeline: how long blocks stay whole, and attributes of sharded parameters that scripts read.

    sdp_max_live_parameters            a rank whose model has at most so many elements keeps each block whole from its forward to its
                                       backward; of a larger model, blocks let go of their parameters in between
    sdp_param_persistence_threshold    blocks whose parameters all have fewer elements stay whole for the step

    p.ds_shape, p.ds_numel             the shape and the number of elements of the whole parameter (with tensor parallelism: of the slice)
    p.ds_tensor                        this rank's part; `p.ds_tensor.ds_numel` is the size of the largest part, alike on all ranks
    p.ds_param_shard_group             the ranks that have the other parts

Source: public SMP v1 reference ("Sharded Data Parallelism") for the keys; public training scripts for the names, which are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from smpc.config import Config
from smpc.executor.replicas.apart import Apart
from smpc.sharding import Keep, Unit, find_units
from smpc.sharding.tensors import local


def units_to_keep(module: nn.Module, config: Config, apart: Apart | None) -> list[Unit]:
    """The units of a model, and how long each stays whole. The parameters in `apart` form units inside the blocks."""
    inner = [] if apart is None else apart.units(module)
    taken = {unit.name for unit in inner}
    units = [*inner, *(Unit(name) for name in find_units(module) if name not in taken)]
    total = sum(parameter.numel() for parameter in module.parameters())
    keep = Keep.MICROBATCH if total <= config.sdp_max_live_parameters else Keep.NEVER
    names = [unit.name for unit in units]
    return [replace(unit, keep=Keep.STEP if _is_small(module, unit.name, names, config) else keep) for unit in units]


def _is_small(module: nn.Module, name: str, names: Iterable[str], config: Config) -> bool:
    inside = [other for other in names if other and other != name and (not name or other.startswith(f"{name}."))]
    taken = {id(parameter) for other in inside for parameter in module.get_submodule(other).parameters()}
    own = [parameter.numel() for parameter in module.get_submodule(name).parameters() if id(parameter) not in taken]
    return max(own, default=0) < config.sdp_param_persistence_threshold


def name_parts(parameters: Iterable[nn.Parameter], group_of: Callable[[nn.Parameter], dist.ProcessGroup]) -> None:
    """Give sharded parameters the attributes that scripts read. `group_of`: the ranks that hold the shards of a parameter."""
    for parameter in parameters:
        group = group_of(parameter)
        rows = -(-parameter.shape[0] // group.size())
        part: Any = local(parameter.detach())
        part.ds_numel = rows * (parameter.numel() // max(1, parameter.shape[0]))
        found: Any = parameter
        found.ds_tensor, found.ds_param_shard_group = part, group
        found.ds_shape, found.ds_numel = parameter.shape, parameter.numel()
