"""Conversions between the mesh and torch's `DeviceMesh`.

    given    device_mesh(mesh, rank, "cpu", (Axis.REPLICA, Axis.FSDP), groups)     what this rank sees of these axes: for `fully_shard`
             all_axes(mesh)                                                        [pipeline, replica, shard, context, tensor] of ranks
    taken    mesh_of(DeviceMesh("cpu", table, mesh_dim_names=("shard", "tensor"))) the `Mesh` with the same ranks in the same places

All meshes use the process groups of `make_groups`: one for each different set of ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from smpc.config import PLACEMENT_STRATEGIES
from smpc.errors import ConfigError
from smpc.mesh.mesh import Axis, Degrees, Mesh

# The dimensions of a whole mesh, the right-most fastest inside a stage, and other libraries' names for them.
DIMENSIONS = {
    "pipeline": Axis.PP,
    "replica": Axis.REPLICA,
    "shard": Axis.SHARD,
    "context": Axis.CP,
    "tensor": Axis.TP,
}
_OTHER_NAMES = {"pp": "pipeline", "dp_replicate": "replica", "dp_shard": "shard", "cp": "context", "tp": "tensor"}
# Without context, expert and sharded data parallelism, only these axes get groups.
_BASIC = (Axis.WORLD, Axis.PP, Axis.TP, Axis.RDP, Axis.DP, Axis.MP)


def make_groups(
    mesh: Mesh, rank: int, world: dist.ProcessGroup, timeout: datetime.timedelta | None = None
) -> dict[Axis, dist.ProcessGroup]:
    """The process group of every axis. Axes with the same groups share them: without tensor parallelism MP is PP.

    Experts have groups of their own: they exchange tokens while DistributedDataParallel averages, in an order that its hooks
    decide.

    Collective: every rank makes every group, in the same order, as torch.distributed demands.
    """
    made = {mesh.groups(Axis.WORLD): world}
    groups: dict[Axis, dist.ProcessGroup] = {}
    is_basic = mesh.fsdp_size == mesh.ep_size == 1
    for axis in dict.fromkeys((*_BASIC, *Axis)):
        partition = mesh.groups(axis)
        if is_basic and axis not in _BASIC and partition not in made:
            continue
        if partition not in made or (axis is Axis.EP and mesh.ep_size > 1):
            new = [dist.new_group(list(members), timeout=timeout) for members in partition]
            made[partition] = next(group for members, group in zip(partition, new, strict=True) if rank in members)
        groups[axis] = made[partition]
    return groups


def device_mesh(
    mesh: Mesh,
    rank: int,
    device_type: str,
    axes: Sequence[Axis],
    groups: Mapping[Axis, dist.ProcessGroup],
    names: Sequence[str] | None = None,
) -> DeviceMesh:
    """The ranks that differ from this one only along `axes`, with a dimension for each; no process group is made.

    `names` of the dimensions: the axes' own by default. torch caches layouts by equal meshes, even if their groups were destroyed: give a
    mesh distinct names if DTensors are made with it and an equal mesh can be made again in the process.
    """
    own = tuple(names) if names is not None else tuple(str(axis) for axis in axes)
    if len(axes) == 1:
        return DeviceMesh.from_group(groups[axes[0]], device_type, mesh_dim_names=own)
    table = _rank_table(mesh, axes, _same_elsewhere(mesh, axes, rank))
    return DeviceMesh.from_group([groups[axis] for axis in axes], device_type, table, mesh_dim_names=own)


def all_axes(mesh: Mesh) -> Tensor:
    """Global ranks by (pipeline, replica, shard, context, tensor), int64: what `DeviceMesh(device_type, ...)` takes on every rank."""
    return _rank_table(mesh, tuple(DIMENSIONS.values()), range(mesh.world_size))


def mesh_of(given: DeviceMesh, *, expert_parallel_degree: int = 1) -> Mesh:
    """The mesh that a DeviceMesh over all ranks describes.

    Its dimensions are named as in `DIMENSIONS`, or pp, dp_replicate, dp_shard, cp, tp; those that are left out have one rank. Raises
    ConfigError for other names, and for an order of ranks that no placement has.
    """
    sizes = _device_mesh_sizes(given)
    ranks = given.mesh.flatten().tolist()
    if sorted(ranks) != list(range(len(ranks))):
        raise ConfigError(f"device_mesh: expected all ranks from 0 to {len(ranks) - 1}, found {sorted(ranks)}")
    known = {name: size for name, size in sizes.items() if name != "replica"}  # the rest of the ranks
    degrees = Degrees(len(ranks), expert=expert_parallel_degree, **known)
    order = [DIMENSIONS[name] for name in sizes]
    for placement in PLACEMENT_STRATEGIES:
        mesh = Mesh.of(degrees, placement)
        if _rank_table(mesh, order, range(len(ranks))).flatten().tolist() == ranks:
            return mesh
    raise ConfigError(
        f"device_mesh: expected ranks in the order of a placement_strategy, such as "
        f"{_rank_table(Mesh.of(degrees), order, range(len(ranks))).tolist()} for ({', '.join(sizes)}), found {given.mesh.tolist()}"
    )


def _device_mesh_sizes(given: DeviceMesh) -> dict[str, int]:
    """The sizes of a mesh's dimensions by our names, in its order."""
    names = given.mesh_dim_names or ()
    ours = [_OTHER_NAMES.get(name, name) for name in names]
    if not ours or len(set(ours)) < len(ours) or any(name not in DIMENSIONS for name in ours):
        raise ConfigError(
            f"device_mesh: expected dimensions with names among {', '.join(DIMENSIONS)} (or {', '.join(_OTHER_NAMES)}), each once, "
            f"found {', '.join(names) if names else 'none'}; give them as mesh_dim_names"
        )
    return dict(zip(ours, given.mesh.shape, strict=True))


def _same_elsewhere(mesh: Mesh, axes: Sequence[Axis], rank: int) -> list[int]:
    """The ranks that can be reached from one by moving along the axes."""
    reached = {rank}
    for axis in axes:
        reached = {member for known in reached for member in mesh.group(axis, known)}
    return sorted(reached)


def _rank_table(mesh: Mesh, axes: Sequence[Axis], ranks: Iterable[int]) -> Tensor:
    """The ranks of a mesh by their positions along its axes."""
    table = torch.full([mesh.size(axis) for axis in axes], -1)
    for rank in ranks:
        table[tuple(mesh.axis_rank(axis, rank) for axis in axes)] = rank
    return table
