"""How long collectives take: against rings and trees that are walked step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smpc.mesh import Axis, Mesh
from smpc.partitioner.costs.collective_times import CollectiveKind, collective_time, least_time, sent_time
from smpc.partitioner.costs.device import DEVICES, H100, Device, Group, Wire

DEVICE = Device("d", {"float32": 1e12}, 1e12, 10**9, 4, Wire(100.0, 1.0, 1.0, 0.1), Wire(10.0, 5.0, 1.0, 0.5))


def walked_ring(num_bytes: float, group: Group, device: Device, rounds: int) -> float:
    """A part of 1/d goes from rank to rank, all wires at once; between hosts it is split over the wires of all the devices there."""
    part, inside, between = num_bytes / group.size, device.inside_host, device.between_hosts
    seconds = inside.latency if group.hosts == 1 else between.latency
    for _ in range(rounds * (group.size - 1)):
        slowest = part / inside.rate if group.per_host > 1 else 0.0
        if group.hosts > 1:
            slowest = max(slowest, part / (group.per_host * between.rate))
        seconds += slowest + (inside.hop if group.hosts == 1 else between.hop)
    return seconds


@pytest.mark.parametrize("group", [Group(2, 2), Group(4, 4), Group(8, 4), Group(4, 1), Group(6, 2)])
@pytest.mark.parametrize("kind", [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER])
def test_gathers_and_scatters_go_round_a_ring_once(kind, group):
    assert collective_time(kind, 1000.0, group, DEVICE) == pytest.approx(walked_ring(1000.0, group, DEVICE, 1))


@pytest.mark.parametrize("group", [Group(2, 2), Group(4, 4), Group(8, 4), Group(4, 1), Group(6, 2)])
def test_a_large_all_reduce_goes_round_twice(group):
    assert collective_time(CollectiveKind.ALL_REDUCE, 1e6, group, DEVICE) == pytest.approx(
        walked_ring(1e6, group, DEVICE, 2)
    )


def test_a_small_all_reduce_of_many_ranks_takes_a_tree():
    group = Group(4096, 4)
    ring, found = walked_ring(1.0, group, DEVICE, 2), collective_time(CollectiveKind.ALL_REDUCE, 1.0, group, DEVICE)
    assert found < ring / 50
    assert found == pytest.approx(5.0 + 2 * 1.0 / 40.0 + 2 * (3 * 0.1 + 10 * 0.5))


@pytest.mark.parametrize("kind", list(CollectiveKind))
def test_one_rank_and_nothing_to_send_take_no_time(kind):
    assert collective_time(kind, 1e9, Group(1, 1), DEVICE) == 0.0
    assert collective_time(kind, 0, Group(8, 4), DEVICE) == 0.0


@pytest.mark.parametrize("kind", list(CollectiveKind))
@pytest.mark.parametrize("device", list(DEVICES.values()), ids=list(DEVICES))
def test_more_bytes_and_slower_wires_never_take_less(kind, device):
    slower = replace(device, between_hosts=replace(device.between_hosts, bandwidth=device.between_hosts.bandwidth / 4))
    for group in (Group(2, 2), Group(16, 2), Group(64, 1)):
        times = [collective_time(kind, num_bytes, group, device) for num_bytes in (1.0, 1e3, 1e6, 1e9, 1e12)]
        assert times == sorted(times)
        assert collective_time(kind, 1e9, group, slower) >= times[3]
        assert least_time(kind, 1e9, group, device) <= times[3] or kind in (
            CollectiveKind.ALL_TO_ALL,
            CollectiveKind.SEND,
            CollectiveKind.BROADCAST,
        )


def test_all_to_all_sends_each_rank_its_part_over_the_wire_there():
    assert collective_time(CollectiveKind.ALL_TO_ALL, 400.0, Group(4, 4), DEVICE) == pytest.approx(
        1.0 + 3 * 100 / 100.0 + 0.3
    )
    assert collective_time(CollectiveKind.ALL_TO_ALL, 800.0, Group(8, 4), DEVICE) == pytest.approx(
        5.0 + 4 * 100 / 10.0 + 0.3 + 0.5
    )


def test_what_every_rank_sends_is_enough_to_tell_the_time():
    for group in (Group(4, 4), Group(16, 4)):
        whole = 1e6
        part = whole * (group.size - 1) / group.size
        assert sent_time(part, group, DEVICE) == pytest.approx(
            collective_time(CollectiveKind.ALL_GATHER, whole, group, DEVICE)
        )


def test_groups_of_a_mesh():
    mesh = Mesh(64, 4, 4, "cluster")  # replicas of 16 ranks, neighbours share operations
    assert Group.of(mesh, Axis.TP, H100) == Group(4, 4)
    assert Group.of(mesh, Axis.RDP, H100) == Group(4, 1)
    assert Group.of(mesh, Axis.DP, H100) == Group(16, 4)
    assert Group.of(Mesh(64, 4, 1, "spread"), Axis.RDP, H100) == Group(16, 8)
    assert Group.neighbours(16, H100) == Group(16, 8)


def test_the_example_of_the_module():
    assert collective_time(CollectiveKind.ALL_GATHER, 268e6, Group(8, 8), H100) == pytest.approx(0.69e-3, rel=0.01)
