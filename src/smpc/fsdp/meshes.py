"""The ranks that a unit is over, as it says them, and the mesh of them.

    "node", "set4", [0, 2], a ProcessGroup     a mesh of (shard)              each parameter is divided over these ranks, and averaged
    ("set2", "mod2")                           a mesh of (replica, shard)     divided over the first, and averaged over both

Of a pair, the members of a shard group, each with the replicas of its part, are a grid; these have the same place in their shard groups:

    set2 and mod2 of 4 ranks      shards     0  1
                                  replicas   2  3

Beside slices of layers a mesh is part of one over all ranks, of which `tensor` is the last axis: `tensor` is the same in all of them, as
DTensors of several units must have it. So groups must be strided there: 0, 2, 4 and 1, 3, 5.

Groups by name, as arithmetic on ranks: `partition("set2", 4, 2)` is ((0, 1), (2, 3)), and `mod2` is ((0, 2), (1, 3)).

    self                      every rank by itself: set1
    node                      the ranks of a node: set{ranks on a node}
    local_rank_across_nodes   those with one local rank: mod{ranks on a node}
    setK                      K ranks that follow one another
    modK                      every K-th rank

    [0, 2]                    those ranks; every rank says its own: see `joined`

If ranks slice layers together, a unit is sharded over the ranks of its group with the same slice: see `among_slices`.

The same on every rank, so that all can make all groups in one order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smpc import dist
from smpc.dist.rank_and_size import known_local_size
from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError
from smpc.fsdp.tensor_slices import AXIS


def partition(name: object, world_size: int, local_size: int) -> tuple[tuple[int, ...], ...]:
    """All groups of that name, over `world_size` ranks on nodes of `local_size`.

    Raises ConfigError for other names, and if K or the nodes do not divide the ranks evenly.
    """
    if not isinstance(name, str):
        raise ConfigTypeError(
            f"process_group: expected self, node, local_rank_across_nodes, setK or modK, or a list of ranks, found {name!r}"
        )
    aliases = {"self": "set1", "node": f"set{local_size}", "local_rank_across_nodes": f"mod{local_size}"}
    found = re.fullmatch(r"(set|mod)([0-9]{1,7})", aliases.get(name, name))
    if found is None:
        raise ConfigError(f"process_group: expected self, node, local_rank_across_nodes, setK or modK, found {name!r}")
    size = int(found[2])
    if size < 1 or world_size % size:
        what = "nodes of equal size" if name in aliases else "a K that divides the number of processes"
        raise ConfigError(f"process_group {name!r}: expected {what}, found K = {size} and {world_size} processes")
    if found[1] == "set":
        return tuple(tuple(range(start, start + size)) for start in range(0, world_size, size))
    return tuple(tuple(range(start, world_size, size)) for start in range(size))


def joined(lists: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """All groups, where rank r has said `lists[r]`. Raises ConfigError unless each rank is in one group, and its members agree.

    >>> joined([(0, 2), (1,), (0, 2)])
    ((0, 2), (1,))
    """
    is_whole = all(
        rank in own
        and len(set(own)) == len(own)
        and all(0 <= other < len(lists) and lists[other] == own for other in own)
        for rank, own in enumerate(lists)
    )
    if not is_whole:
        said = ", ".join(f"rank {rank}: {list(own)}" for rank, own in enumerate(lists))
        raise ConfigError(
            f"process_group: expected lists that divide the ranks, each with the rank that gives it, found {said}"
        )
    return tuple(dict.fromkeys(lists))


def among_slices(groups: Sequence[tuple[int, ...]], slices: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each group that have the same slice, if `slices` consecutive ranks slice layers together.

    Raises ConfigError unless all slices of a unit are over the same places: a rank and those that slice layers with it stay together.

    >>> among_slices(((0, 1, 2, 3), (4, 5, 6, 7)), 2)
    ((0, 2), (1, 3), (4, 6), (5, 7))
    """
    found = [tuple(r for r in members if r % slices == own) for members in groups for own in range(slices)]
    places = [
        {tuple(rank // slices for rank in members) for members in found if members and members[0] % slices == own}
        for own in range(slices)
    ]
    if any(each != places[0] for each in places):
        raise ConfigError(
            f"process_group: expected groups that have all or none of {slices} ranks that slice layers together, or one each, found "
            f"{', '.join(str(list(members)) for members in groups)}"
        )
    return tuple(members for members in found if members)


Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MeshesOver:
    """All groups of a kind that units are over. `replicas`: of pairs. `slices`: how many ranks slice layers together."""

    shards: Groups
    replicas: Groups | None = None
    slices: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError for pairs that are no grids."""
        for rank in range(sum(map(len, self.shards))):
            if any(row not in self.shards for row in self.grid(rank)):
                raise ConfigError(
                    f"process_group: expected shards and replicas that make a grid, found shards {_groups_text(self.shards)} and replicas "
                    f"{_groups_text(self.replicas or ())}"
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
        return len(self._places(0)) * self.slices == sum(map(len, self.shards))

    def number(self, rank: int) -> tuple[int, int]:
        """The number of this rank's unit among units of its name with different values, by their first ranks; and how many there are."""
        units = list(dict.fromkeys(map(self._places, range(sum(map(len, self.shards))))))
        return units.index(self._places(rank)), len(units)

    def _places(self, rank: int) -> frozenset[int]:
        """The ranks that together hold the values of a rank's unit, with its slices."""
        return frozenset(member // self.slices for row in self.grid(rank) for member in row)


def over_all(groups: Iterable[Any], slices: int = 1) -> dict[Any, MeshesOver]:
    """These groups, by `key_of`, in the same order on all ranks. Collective if ranks name their own members.

    `slices`: how many ranks slice layers together; of a group those are meant that have the same slice.
    """
    found: dict[Any, MeshesOver] = {}
    for group in groups:
        if group is not None and key_of(group) not in found:
            shards, *replicas = (_groups_of(each) for each in (group if _is_pair(group) else (group,)))
            if slices > 1:
                shards, *replicas = (among_slices(each, slices) for each in (shards, *replicas))
            found[key_of(group)] = MeshesOver(shards, replicas[0] if replicas else None, slices)
            if slices > 1:
                _mesh_axes(found[key_of(group)])
    return found


def key_of(group: Any) -> Any:
    """The same for groups that are said alike."""
    return tuple(map(key_of, group)) if isinstance(group, list | tuple) else group


def check_name(group: Any) -> None:
    """Raise ConfigError for a name that is none here; no process group is needed."""
    for each in group if _is_pair(group) else (group,):
        if each is not None and not isinstance(each, list | tuple | distributed.ProcessGroup):
            partition(each, dist.get_world_size(), known_local_size())


def meshes_of(kinds: Iterable[MeshesOver], device_type: str) -> dict[MeshesOver, DeviceMesh]:
    """The mesh of each kind that this rank is in; equal groups are made once. Collective."""
    made: dict[Groups, distributed.ProcessGroup] = {}
    return {kind: _mesh_over(kind, device_type, made) for kind in dict.fromkeys(kinds)}


def _mesh_over(kind: MeshesOver, device_type: str, made: dict[Groups, distributed.ProcessGroup]) -> DeviceMesh:
    """The device mesh over which units are sharded; makes groups that are not there."""
    if kind.slices > 1:
        axes = _mesh_axes(kind)
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        return mesh["shard"] if kind.replicas is None else mesh["replica", "shard"]
    rank = dist.get_global_rank()
    for groups in (kind.shards, kind.replicas):
        if groups is not None and groups not in made:
            every = [distributed.new_group(list(members)) for members in groups]
            made[groups] = next(group for group, members in zip(every, groups, strict=True) if rank in members)
    if kind.replicas is None:
        return DeviceMesh.from_group(made[kind.shards], device_type, mesh_dim_names=("shard",))
    own, rows = [made[kind.replicas], made[kind.shards]], [list(row) for row in kind.grid(rank)]
    return DeviceMesh.from_group(own, device_type, mesh=rows, mesh_dim_names=("replica", "shard"))


def _mesh_axes(kind: MeshesOver) -> dict[str, int]:
    """The axes of a mesh over all ranks that has these groups, outer ones first, slices last. Raises ConfigUnsupportedError for none."""
    total = sum(map(len, kind.shards)) // kind.slices
    found = {"shard": _strided_mesh_groups(kind.shards, kind.slices)}
    if kind.replicas is not None:
        found["replica"] = _strided_mesh_groups(kind.replicas, kind.slices)
    inner_first: list[tuple[str, int]] = [(AXIS, kind.slices)]
    reached = 1
    for name in ("shard", "replica") if "replica" in found else ("shard",):
        size, stride = found[name] if found[name][0] > 1 else (1, reached)
        if stride % reached:
            raise ConfigUnsupportedError(
                f"process_group: expected shards that follow one another inside of their replicas beside tp, found shards "
                f"{_groups_text(kind.shards)} and replicas {_groups_text(kind.replicas or ())}"
            )
        inner_first += [(f"between {name}", stride // reached), (name, size)]
        reached = stride * size
    inner_first.append(("outside", total // reached))
    return {name: size for name, size in reversed(inner_first) if size > 1 or name in found}


def _strided_mesh_groups(groups: Groups, slices: int) -> tuple[int, int]:
    """(size, distance) of groups that all have as many ranks, each as far from the next one: of places, which slices share."""
    places = [[rank // slices for rank in members] for members in groups]
    size, stride = len(places[0]), places[0][1] - places[0][0] if len(places[0]) > 1 else 1
    if stride < 1 or any(each != list(range(each[0], each[0] + size * stride, stride)) for each in places):
        raise ConfigUnsupportedError(
            f"process_group: expected groups of one size, with ranks at one distance, beside tp, found {_groups_text(groups)}"
        )
    return size, stride


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


def _groups_text(groups: Groups) -> str:
    return ", ".join(str(list(members)) for members in groups)
