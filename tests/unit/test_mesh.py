"""`smpc.mesh`: the tables of the reference, and an independent enumeration of all small meshes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpc.config import Config
from smpc.errors import ConfigError
from smpc.mesh import Axis, Mesh

PLACEMENTS = ["cluster", "spread", "PDT", "PTD", "DPT", "DTP", "TPD", "TDP"]

# Tables of the public reference for 8 devices, tp 2, pp 2, rdp 2: rows of (rdp_rank, pp_rank, tp_rank).
DPT = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
PTD = [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize(("placement", "table"), [("DPT", DPT), ("cluster", DPT), ("PTD", PTD)])
def test_the_tables_of_the_reference(placement, table):
    mesh = Mesh(8, 2, 2, placement)
    assert [(mesh.rdp_rank(r), mesh.pp_rank(r), mesh.tp_rank(r)) for r in range(8)] == table


def test_spread_in_the_reference():
    mesh = Mesh(8, 2, placement="spread")
    assert mesh.groups(Axis.MP) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups(Axis.DP) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [mesh.axis_rank(Axis.MP, rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert mesh.axis_rank(Axis.DP, 6) == 2


def test_cluster_in_the_reference():
    mesh = Mesh(8, 2, placement="cluster")
    assert mesh.groups(Axis.MP) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(Axis.DP) == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_groups_of_three_parallelisms():
    mesh = Mesh(8, 2, 2, "PTD")
    assert mesh.groups(Axis.MP) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.groups(Axis.DP) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups(Axis.PP) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups(Axis.TP) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups(Axis.RDP) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(Axis.WORLD) == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert mesh.group(Axis.TP, 5) == (5, 7)


@given(pp=st.integers(1, 4), tp=st.integers(1, 3), rdp=st.integers(1, 3), placement=st.sampled_from(PLACEMENTS))
def test_every_mesh_equals_nested_loops_in_the_order_of_the_letters(pp, tp, rdp, placement):
    mesh = Mesh(pp * tp * rdp, pp, tp, placement)
    letters = {"cluster": "DPT", "spread": "TPD"}.get(placement, placement)
    loops = itertools.product(*(range({"P": pp, "T": tp, "D": rdp}[letter]) for letter in letters))
    ranks = [dict(zip(letters, place, strict=True)) for place in loops]
    for rank, place in enumerate(ranks):
        assert (mesh.pp_rank(rank), mesh.tp_rank(rank), mesh.rdp_rank(rank)) == (place["P"], place["T"], place["D"])
    same = {Axis.PP: "TD", Axis.TP: "PD", Axis.RDP: "PT", Axis.DP: "P", Axis.MP: "D", Axis.WORLD: ""}
    for axis, letters_held in same.items():
        for rank, place in enumerate(ranks):
            group = tuple(r for r, other in enumerate(ranks) if all(other[k] == place[k] for k in letters_held))
            assert mesh.group(axis, rank) == group
            assert len(group) == mesh.size(axis)
            assert group[mesh.axis_rank(axis, rank)] == rank
        assert sorted(itertools.chain(*mesh.groups(axis))) == list(range(mesh.world_size))
    assert mesh.world_size == mesh.rdp_size * mesh.pp_size * mesh.tp_size
    assert mesh.dp_size == mesh.rdp_size * mesh.tp_size == mesh.size(Axis.DP)
    assert mesh.mp_size == mesh.size(Axis.MP)
    for rank in range(mesh.world_size):
        assert mesh.axis_rank(Axis.PP, rank) == mesh.pp_rank(rank)
        assert mesh.axis_rank(Axis.TP, rank) == mesh.tp_rank(rank)
        assert mesh.axis_rank(Axis.RDP, rank) == mesh.rdp_rank(rank)


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (6, r"expected a multiple of 4 processes .* found 6; start 4 or 8 processes"),
        (3, "expected a multiple of 4 processes .* found 3; start 4 processes"),
        (0, "expected at least 1 process .* found 0 processes"),
    ],
)
def test_a_world_that_does_not_match_the_degrees(world, message):
    with pytest.raises(ConfigError, match=message):
        Mesh(world, 4)


def test_replicas_require_ddp():
    config = Config.parse({"partitions": 2})
    assert Mesh.build(config, 2) == Mesh(2, 2)
    with pytest.raises(
        ConfigError, match=r"expected 2 processes .* found 4, .* 2 data-parallel replicas; set ddp: true"
    ):
        Mesh.build(config, 4)
    with_ddp = Config.parse({"partitions": 2, "ddp": True, "placement_strategy": "spread"})
    assert Mesh.build(with_ddp, 4) == Mesh(4, 2, 1, "spread")


def test_a_rank_outside_and_an_unknown_placement():
    mesh = Mesh(4, 2)
    for call in (mesh.pp_rank, lambda rank: mesh.group(Axis.MP, rank)):
        with pytest.raises(ConfigError, match="expected a rank from 0 to 3, found 4"):
            call(4)
    with pytest.raises(ConfigError, match=r"placement_strategy: expected one of cluster, .* found 'DP'"):
        Mesh(4, 2, 1, "DP")
