"""`smpc.mesh.device_mesh`: tables beside the mesh, what is taken and refused; torch's fake process group represents the others."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from smpc.errors import ConfigError
from smpc.mesh import Axis, Mesh
from smpc.mesh.device_mesh import DIMENSIONS, all_axes, device_mesh, make_groups, mesh_of

PLACEMENTS = ["DPT", "TPD", "PDT", "PTD", "DTP", "TDP"]


@pytest.fixture
def eight():
    """Rank 5 of 8; collectives do nothing."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_table_of_all_axes_has_the_pipeline_outside_and_the_right_most_fastest():
    mesh = Mesh(16, 2, 2, "PDT", 2, 2)
    assert torch.equal(all_axes(mesh), torch.arange(16).view(2, 1, 2, 2, 2))
    assert all_axes(Mesh(8, 2, 2, "DPT")).flatten(1).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_mesh_that_is_given_is_taken_as_the_same(eight, placement):
    for pp, tp, cp, shard in itertools.product((1, 2), repeat=4):
        if pp * tp * cp * shard > 8:
            continue
        mesh = Mesh(8, pp, tp, placement, cp, shard, cp * shard)
        given = DeviceMesh("cpu", all_axes(mesh), mesh_dim_names=tuple(DIMENSIONS))
        taken = mesh_of(given, expert_parallel_degree=cp * shard)
        assert all(taken.groups(axis) == mesh.groups(axis) for axis in Axis)


def test_dimensions_by_other_names_in_another_order_or_left_out(eight):
    table = torch.arange(8).view(2, 4)
    assert mesh_of(DeviceMesh("cpu", table, mesh_dim_names=("dp_shard", "tp"))) == Mesh(
        8, 1, 4, sharded_data_parallel_degree=2
    )
    turned = mesh_of(DeviceMesh("cpu", table.T, mesh_dim_names=("tensor", "shard")))
    assert turned.groups(Axis.SHARD) == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("table", "names", "message"),
    [
        (
            torch.arange(8).view(2, 4),
            ("data", "tensor"),
            "expected dimensions with names among pipeline, .* found data, tensor",
        ),
        (torch.arange(8).view(2, 4), ("tp", "tensor"), "each once, found tp, tensor"),
        (torch.arange(8), None, "found none; give them as mesh_dim_names"),
        (torch.arange(4, 8), ("shard",), r"expected all ranks from 0 to 3, found \[4, 5, 6, 7\]"),
        (
            torch.tensor([[0, 1, 2, 3], [7, 6, 5, 4]]),
            ("shard", "tensor"),
            r"such as \[\[0, 1, 2, 3\], \[4, 5, 6, 7\]\] for",
        ),
    ],
)
def test_what_no_placement_makes_is_refused(eight, table, names, message):
    with pytest.raises(ConfigError, match=message):
        mesh_of(DeviceMesh("cpu", table, mesh_dim_names=names))


def test_a_rank_sees_its_own_part_of_the_mesh_over_shared_groups(eight):
    mesh = Mesh(8, 1, 2, "cluster", 1, 2)
    groups = make_groups(mesh, 5, eight)
    assert {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()} == {
        axis: mesh.group(axis, 5) for axis in Axis
    }
    assert groups[Axis.SHARD] is groups[Axis.FSDP]
    seen = device_mesh(mesh, 5, "cpu", (Axis.REPLICA, Axis.FSDP), groups)
    assert seen.mesh.tolist() == [[1, 3], [5, 7]]
    assert tuple(seen.get_coordinate()) == (1, 0)
    assert seen["fsdp"].get_group() is groups[Axis.FSDP]
    assert device_mesh(mesh, 5, "cpu", (Axis.TP,), groups, ("mine",)).mesh_dim_names == ("mine",)


def test_without_new_kinds_of_parallelism_no_more_groups_are_made(eight):
    """Axes that share their groups with others exist, and nothing is made for them."""
    groups = make_groups(Mesh(8, 2, 2), 5, eight)
    basic = {Axis.WORLD, Axis.PP, Axis.TP, Axis.RDP, Axis.DP, Axis.MP}
    assert basic < set(groups) < set(Axis)
    assert {id(group) for group in groups.values()} == {id(groups[axis]) for axis in basic}
