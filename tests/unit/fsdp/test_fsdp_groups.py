"""Groups by name, against brute force."""

import itertools

import pytest

from smpc.errors import ConfigError, ConfigTypeError
from smpc.fsdp import partition
from smpc.fsdp.meshes import MeshesOver, joined


@pytest.mark.parametrize("world", range(1, 17))
def test_by_brute_force(world):
    for size in (k for k in range(1, world + 1) if world % k == 0):
        sets, mods = partition(f"set{size}", world, 1), partition(f"mod{size}", world, 1)
        for rank in range(world):
            assert [group for group in sets if rank in group] == [
                tuple(r for r in range(world) if r // size == rank // size)
            ]
            assert [group for group in mods if rank in group] == [
                tuple(r for r in range(world) if r % size == rank % size)
            ]
        assert partition("node", world, size) == sets
        assert partition("local_rank_across_nodes", world, size) == mods
    assert partition("self", world, 1) == tuple((rank,) for rank in range(world))


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("set3", ConfigError, "expected a K that divides the number of processes, found K = 3 and 8 processes"),
        ("mod0", ConfigError, "found K = 0"),
        ("set", ConfigError, "expected self, node, local_rank_across_nodes, setK or modK, found 'set'"),
        ("world", ConfigError, "expected self, node"),
        (3, ConfigTypeError, "expected self, node"),
    ],
)
def test_names_that_cannot_be(name, error, says):
    with pytest.raises(error, match=says):
        partition(name, 8, 2)
    with pytest.raises(ConfigError, match="nodes of equal size"):
        partition("node", 8, 3)


@pytest.mark.parametrize("world", range(1, 5))
def test_lists_by_brute_force(world):
    """Of all ways in which ranks may name their members, those are taken that divide the ranks."""
    own = [members for size in range(1, world + 1) for members in itertools.combinations(range(world), size)]
    taken = 0
    for lists in itertools.product(own, repeat=world):
        is_partition = sorted(rank for members in set(lists) for rank in members) == list(range(world)) and all(
            rank in members for rank, members in enumerate(lists)
        )
        if is_partition:
            taken += 1
            assert set(joined(lists)) == set(lists)
        else:
            with pytest.raises(ConfigError, match="expected lists that divide the ranks"):
                joined(lists)
    assert taken == [1, 2, 5, 15][world - 1], "Bell's numbers"


@pytest.mark.parametrize("world", [2, 4, 6, 8])
def test_pairs_by_brute_force(world):
    """Of all pairs of names, those are taken that make grids, with one part on the ranks of a replica group."""
    names = [f"{kind}{size}" for kind in ("set", "mod") for size in range(1, world + 1) if world % size == 0]
    for one, other in itertools.product(names, repeat=2):
        shards, replicas = partition(one, world, 1), partition(other, world, 1)
        own, copies = (
            [{r for members in groups if rank in members for r in members} for rank in range(world)]
            for groups in (shards, replicas)
        )
        reached = [{r for each in own[rank] for r in copies[each]} for rank in range(world)]
        is_grid = all(
            own[rank] & copies[rank] == {rank}
            and len(reached[rank]) == len(own[rank]) * len(copies[rank])
            and all(reached[r] == reached[rank] for r in reached[rank])
            and all(sorted(own[r]).index(r) == sorted(own[rank]).index(rank) for r in copies[rank])
            for rank in range(world)
        )
        if is_grid:
            found = MeshesOver(shards, replicas)
            for rank in range(world):
                assert {r for row in found.grid(rank) for r in row} == reached[rank]
            assert found.is_whole == (len(reached[0]) == world)
        else:
            with pytest.raises(ConfigError, match="shards and replicas that make a grid"):
                MeshesOver(shards, replicas)
