"""The ranks that a unit is over, as it says them, and the mesh of them.

    "node", "set4", [0, 2], a ProcessGroup     a mesh of (shard)              each parameter is divided over these ranks, and averaged
    ("set2", "mod2")                           a mesh of (replica, shard)     divided over the first, and averaged over both

Of a pair, the members of a shard group, each with the replicas of its part, are a grid; these have the same place in their shard groups:

    set2 and mod2 of 4 ranks      shards     0  1
                                  replicas   2  3
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from smpc import dist
from smpc.dist.place import known_local_size
from smpc.errors import ConfigError
from smpc.fsdp.groups import joined, partition

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Over:
    """All groups of a kind that units are over. `replicas`: of pairs."""

    shards: Groups
    replicas: Groups | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for pairs that are no grids."""
        for rank in range(sum(map(len, self.shards))):
            if any(row not in self.shards for row in self.grid(rank)):
                raise ConfigError(
                    f"process_group: expected shards and replicas that make a grid, found shards {_told(self.shards)} and replicas "
                    f"{_told(self.replicas or ())}"
                )

    def grid(self, rank: int) -> Groups:
        """The ranks of a unit of which this rank has a part: a row for each replica."""
        own = next(members for members in self.shards if rank in members)
        if self.replicas is None:
            return (own,)
        columns = [next(members for members in self.replicas if each in members) for each in own]
        return tuple(zip(*columns, strict=False)) if len(set(map(len, columns))) == 1 else ((),)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks hold parts of one unit."""
        return sum(map(len, self.grid(0))) == sum(map(len, self.shards))


def over_all(groups: Iterable[Any]) -> dict[Any, Over]:
    """What these groups are, by `key_of`, in one order on all ranks. Collective where ranks name their own members."""
    found: dict[Any, Over] = {}
    for group in groups:
        if group is not None and key_of(group) not in found:
            pair = group if _is_pair(group) else (group,)
            found[key_of(group)] = Over(*(_groups_of(each) for each in pair))
    return found


def key_of(group: Any) -> Any:
    """The same for groups that are said alike."""
    return tuple(map(key_of, group)) if isinstance(group, list | tuple) else group


def check_name(group: Any) -> None:
    """Raise ConfigError for a name that is none here; no process group is needed."""
    for each in group if _is_pair(group) else (group,):
        if each is not None and not isinstance(each, list | tuple | distributed.ProcessGroup):
            partition(each, dist.get_world_size(), known_local_size())


def meshes_of(kinds: Iterable[Over], device_type: str) -> dict[Over, DeviceMesh]:
    """The mesh of each kind that this rank is in; equal groups are made once. Collective."""
    made: dict[Groups, distributed.ProcessGroup] = {}
    return {kind: _mesh(kind, device_type, made) for kind in dict.fromkeys(kinds)}


def _mesh(kind: Over, device_type: str, made: dict[Groups, distributed.ProcessGroup]) -> DeviceMesh:
    rank = dist.get_global_rank()
    for groups in (kind.shards, kind.replicas):
        if groups is not None and groups not in made:
            every = [distributed.new_group(list(members)) for members in groups]
            made[groups] = next(group for group, members in zip(every, groups, strict=True) if rank in members)
    if kind.replicas is None:
        return DeviceMesh.from_group(made[kind.shards], device_type, mesh_dim_names=("shard",))
    own, rows = [made[kind.replicas], made[kind.shards]], [list(row) for row in kind.grid(rank)]
    return DeviceMesh.from_group(own, device_type, mesh=rows, mesh_dim_names=("replica", "shard"))


def _is_pair(group: Any) -> bool:
    return isinstance(group, tuple) and len(group) == 2 and not all(isinstance(each, int) for each in group)


def _groups_of(group: Any) -> Groups:
    if isinstance(group, distributed.ProcessGroup):
        group = distributed.get_process_group_ranks(group)
    is_list = isinstance(group, list | tuple) and all(
        isinstance(rank, int) and not isinstance(rank, bool) for rank in group
    )
    if not is_list or not group:
        return partition(group, dist.get_world_size(), known_local_size())
    return joined(dist.all_gather_object(tuple(group)))


def _told(groups: Groups) -> str:
    return ", ".join(str(list(members)) for members in groups)
