"""`smpc.mesh`: the tables of the reference, and an independent enumeration of all small meshes."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpc.config import Config
from smpc.errors import ConfigError
from smpc.mesh import Axis, Degrees, Mesh, check_degrees

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


@given(
    pp=st.integers(1, 2), tp=st.integers(1, 3), cp=st.integers(1, 2), shard=st.integers(1, 2), replicas=st.integers(1, 2),
    placement=st.sampled_from(PLACEMENTS), shares=st.booleans(),
)  # fmt: skip
def test_ranks_that_share_samples_read_the_same_part_of_the_data(pp, tp, cp, shard, replicas, placement, shares):
    mesh = Mesh(pp * tp * cp * shard * replicas, pp, tp, placement, cp, shard)
    parts = {}
    for rank in range(mesh.world_size):
        index, count = mesh.data_place(rank, tensor_ranks_share=shares)
        assert count == shard * replicas * (1 if shares else tp)
        parts.setdefault(index, set()).add(rank)
    assert sorted(parts) == list(range(count))
    for readers in parts.values():
        assert len(readers) == pp * cp * (tp if shares else 1)
        for axis in (Axis.PP, Axis.CP, *([Axis.TP] if shares else [])):
            assert all(readers.issuperset(mesh.group(axis, rank)) for rank in readers)
    if cp == 1:
        axis = Axis.RDP if shares else Axis.DP
        for index, readers in parts.items():
            assert {mesh.axis_rank(axis, rank) for rank in readers} == {index}


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


HELD = {
    Axis.REPLICA: "SCPT",
    Axis.SHARD: "RCPT",
    Axis.CP: "RSPT",
    Axis.FSDP: "RPT",
    Axis.DATA: "CPT",
    Axis.RDP: "PT",
    Axis.TP: "RSCP",
    Axis.PP: "RSCT",
    Axis.DP: "P",
    Axis.MP: "RSC",
}
EXPERT_HELD = {Axis.EP: "RXPT", Axis.EXPERT_FSDP: "REPT", Axis.EXPERT_DATA: "EPT"}


def degree_tuples(world):
    """All (pp, tp, cp, shard, ep) that fit: by brute force over everything up to the number of ranks."""
    for pp, tp, cp, shard, ep in itertools.product(range(1, world + 1), repeat=5):
        if pp * tp * cp * shard <= world and world % (pp * tp * cp * shard) == 0:
            inside = cp * shard if shard > 1 else world // (pp * tp)  # which replicas are, if nothing is sharded
            if inside % ep == 0:
                yield pp, tp, cp, shard, ep


def places_of(mesh, letters, sizes):
    """What every rank does, by loops nested in the order of the letters."""
    return [dict(zip(letters, place, strict=True)) for place in itertools.product(*(range(sizes[x]) for x in letters))]


@pytest.mark.parametrize("placement", ["cluster", "spread", "PTD"])
@pytest.mark.parametrize("world", [1, 2, 4, 8, 12])
def test_axes_inside_of_the_replicas_equal_nested_loops(world, placement):
    for pp, tp, cp, shard, ep in degree_tuples(world):
        mesh = Mesh(world, pp, tp, placement, cp, shard, ep)
        order = {"cluster": "DPT", "spread": "TPD"}.get(placement, placement)
        sizes = {
            "P": pp,
            "T": tp,
            "C": cp,
            "S": shard,
            "R": world // (pp * tp * cp * shard),
        }
        folded = cp * shard if cp * shard % ep == 0 else world // (pp * tp)
        of_experts = sizes | {"E": ep, "X": folded // ep, "R": world // (pp * tp * folded)}
        for inner, held, count in (("RSC", HELD, sizes), ("RXE", EXPERT_HELD, of_experts)):
            places = places_of(mesh, order.replace("D", inner), count)
            for axis, letters in held.items():
                groups = {}
                for rank, place in enumerate(places):
                    groups.setdefault(tuple(place[letter] for letter in letters), []).append(rank)
                assert sorted(map(tuple, groups.values())) == sorted(mesh.groups(axis))
                assert all(len(group) == mesh.size(axis) for group in groups.values())
                for group in groups.values():
                    assert [mesh.axis_rank(axis, rank) for rank in group] == list(range(len(group)))


def test_experts_lie_inside_of_what_shards_and_context_make_or_of_the_replicas():
    for world in range(1, 17):
        for degrees in degree_tuples(world):
            mesh = Mesh(world, *degrees[:2], "cluster", *degrees[2:])
            around = Axis.RDP if mesh.fsdp_size % mesh.ep_size else Axis.FSDP
            inside = {rank: mesh.group(around, rank) for rank in range(world)}
            for axis in (Axis.EP, Axis.EXPERT_FSDP):
                assert all(set(group) <= set(inside[group[0]]) for group in mesh.groups(axis))


@pytest.mark.parametrize("world", range(1, 17))
def test_degrees_are_refused_exactly_where_they_do_not_fit(world):
    fitting, top = set(degree_tuples(world)), min(world, 4)
    for degrees in itertools.product(range(top + 2), repeat=5):
        pp, tp, cp, shard, ep = degrees
        with contextlib.nullcontext() if degrees in fitting else pytest.raises(ConfigError):
            check_degrees(Degrees(world, pp, tp, cp, shard, ep))


def test_all_broken_rules_are_in_one_error():
    with pytest.raises(ConfigError) as caught:
        Mesh(6, 2, 1, context_parallel_degree=2, expert_parallel_degree=3)
    assert str(caught.value).splitlines() == [
        "expected a multiple of 4 processes (pipeline_parallel_degree 2 x tensor_parallel_degree 1 x context_parallel_degree 2 make one "
        "replica of the model), found 6; start 4 or 8 processes, or change the degrees",
        "expert_parallel_degree: expected a divisor of 2 (data-parallel replicas 1 x context_parallel_degree 2, among whose ranks "
        "experts are divided), found 3",
    ]
    with pytest.raises(ConfigError, match="degrees of at least 1, found 4 processes, context_parallel_degree 0"):
        Mesh(4, context_parallel_degree=0)
