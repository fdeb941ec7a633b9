"""Groups by name, as arithmetic on ranks: `partition("set2", 4, 2)` is ((0, 1), (2, 3)), and `mod2` is ((0, 2), (1, 3)).

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
from collections.abc import Sequence

from smpc.errors import ConfigError, ConfigTypeError


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
