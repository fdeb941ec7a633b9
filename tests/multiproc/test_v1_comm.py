"""`smpc.v1` on four gloo processes: groups for every placement, and every call of the communication API."""

import dataclasses
import datetime
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import smpc.v1 as smp
from smpc.errors import ConfigError, UsageError
from smpc.mesh import Axis, Mesh
from smpc.mesh.device_mesh import make_groups

WORLD_SIZE = 4
TIMEOUT = 300.0  # seconds for a whole test
SPREAD = {"pp": [[0, 2], [1, 3]], "rdp": [[0, 1], [2, 3]]}
CLUSTER = {"pp": [[0, 1], [2, 3]], "rdp": [[0, 2], [1, 3]]}
# Written by hand for 2 stages x 2 replicas: replicas are neighbours where D is right of P.
PLACEMENTS = {
    "cluster": CLUSTER,
    "DPT": CLUSTER,
    "DTP": CLUSTER,
    "TDP": CLUSTER,
    "spread": SPREAD,
    "PDT": SPREAD,
    "PTD": SPREAD,
    "TPD": SPREAD,
}


def assert_ranks_end_well(body, tmp_path):
    """Run `body(rank, tmp_path)` in four processes; the first exception of any is this test's, and none outlives it."""
    context = mp.start_processes(
        enter, args=(body, str(tmp_path)), nprocs=WORLD_SIZE, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + TIMEOUT
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < deadline, f"no end after {TIMEOUT} s"
    finally:
        for process in context.processes:
            process.kill()


def enter(rank, body, tmp_path):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=WORLD_SIZE)
    body(rank, Path(tmp_path))
    smp.shutdown()
    dist.destroy_process_group()


def config(**more):
    return {"pipeline_parallel_degree": 2, "ddp": True, **more}


def find(groups, rank):
    return next(group for group in groups if rank in group)


def check_groups(rank, _):
    for placement, expected in PLACEMENTS.items():
        smp.init(config(placement_strategy=placement))
        pp, rdp = find(expected["pp"], rank), find(expected["rdp"], rank)
        assert (smp.rank(), smp.size()) == (rank, 4)
        assert (smp.local_rank(), smp.local_size()) == (rank, 4)
        assert (smp.get_pp_group(), smp.pp_rank(), smp.pp_size()) == (pp, pp.index(rank), 2)
        assert (smp.get_mp_group(), smp.mp_rank(), smp.mp_size()) == (pp, pp.index(rank), 2)
        assert (smp.get_rdp_group(), smp.rdp_rank(), smp.rdp_size()) == (rdp, rdp.index(rank), 2)
        assert (smp.get_dp_group(), smp.dp_rank(), smp.dp_size()) == (rdp, rdp.index(rank), 2)
        assert (smp.get_tp_group(), smp.tp_rank(), smp.tp_size()) == ([rank], 0, 1)
        for group, members in (
            (smp.get_world_process_group(), [0, 1, 2, 3]),
            (smp.get_pp_process_group(), pp),
            (smp.get_mp_process_group(), pp),
            (smp.get_rdp_process_group(), rdp),
            (smp.get_dp_process_group(), rdp),
            (smp.get_tp_process_group(), [rank]),
        ):
            assert dist.get_process_group_ranks(group) == members
            total = torch.tensor(10**rank)
            dist.all_reduce(total, group=group)
            assert total.item() == sum(10**member for member in members)
        smp.shutdown()


def check_tensor_parallel_groups(rank, _):
    smp.init(config(placement_strategy="PTD"))
    session, mesh = smp.state.session, Mesh(4, 2, 2, "PTD")
    timeout = datetime.timedelta(hours=2)  # torch's own is ten minutes for nccl, less than a step may take
    groups = make_groups(mesh, rank, session.groups[Axis.WORLD], timeout)
    for axis in (Axis.TP, Axis.PP):
        assert groups[axis]._get_backend(torch.device("cpu")).options._timeout == timeout
    smp.state.start(dataclasses.replace(session, mesh=mesh, groups=groups))
    assert (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank()) == (rank // 2, rank % 2, 0)
    assert smp.get_mp_group() == [0, 1, 2, 3]
    assert smp.get_dp_group() == smp.get_tp_group() == [[0, 1], [0, 1], [2, 3], [2, 3]][rank]
    assert smp.get_pp_group() == [[0, 2], [1, 3], [0, 2], [1, 3]][rank]
    assert smp.get_mp_process_group() is smp.get_world_process_group()
    assert smp.allgather(rank, smp.PP_GROUP) == smp.get_pp_group()
    assert smp.allgather(rank, smp.TP_GROUP) == smp.get_tp_group()
    assert smp.allgather(rank, smp.MP_GROUP) == [0, 1, 2, 3]
    if smp.tp_rank() == 0:
        smp.broadcast(("from", rank), smp.TP_GROUP)
    else:
        assert smp.recv_from(0, smp.RankType.TP_RANK) == ("from", rank - 1)


def check_messages(rank, _):
    smp.init(config(placement_strategy="spread"))  # pp groups [0, 2], [1, 3]; dp groups [0, 1], [2, 3]
    shared = torch.arange(6.0)
    message = {
        "rank": rank,
        "half": torch.full((2, 3), 0.1, dtype=torch.bfloat16),
        "views": [shared, shared[2:4]],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "transposed": torch.arange(6).view(2, 3).t(),
        "empty": torch.empty(0, 4),
        "path": Path("/x"),
        "none": None,
    }
    peer = (rank + 2) % 4
    if smp.pp_rank() == 0:
        smp.send(message, 1, smp.RankType.PP_RANK)
        received = smp.recv_from(1, smp.RankType.PP_RANK)
    else:
        received = smp.recv_from(0, smp.RankType.PP_RANK)
        smp.send(message, 0, smp.RankType.PP_RANK)
    assert received["rank"] == peer
    assert torch.equal(received["half"], message["half"])
    assert received["half"].dtype == torch.bfloat16
    received["views"][0][2] = 100.0
    assert received["views"][1][0] == 100.0, "views still share memory"
    assert isinstance(received["parameter"], torch.nn.Parameter)
    assert received["transposed"].stride() == (1, 3)
    assert received["empty"].shape == (0, 4)
    assert (received["path"], received["none"]) == (Path("/x"), None)

    # Order is kept, sizes may differ, and one source can feed several kinds of receive.
    big = torch.arange(1_000_000)
    if rank == 0:
        for each in ("first", big, "third"):
            smp.send(each, 3, smp.RankType.WORLD_RANK)
    elif rank == 3:
        assert smp.recv_from(0, smp.RankType.WORLD_RANK) == "first"
        assert torch.equal(smp.recv_from(0, smp.RankType.WORLD_RANK), big)
        assert smp.recv_from(0, smp.RankType.WORLD_RANK) == "third"


def check_collectives(rank, tmp_path):
    smp.init(config(placement_strategy="cluster"))  # pp groups [0, 1], [2, 3]; dp groups [0, 2], [1, 3]
    replica, stage = rank // 2, rank % 2
    if rank == 2:
        smp.broadcast(["all", torch.tensor(2)], smp.WORLD)
    else:
        assert smp.recv_from(2, smp.RankType.WORLD_RANK) == ["all", torch.tensor(2)]
    for group, kind, mine, senders in (
        (smp.MP_GROUP, smp.RankType.MP_RANK, stage, [2 * replica, 2 * replica + 1]),
        (smp.PP_GROUP, smp.RankType.PP_RANK, stage, [2 * replica, 2 * replica + 1]),
        (smp.DP_GROUP, smp.RankType.DP_RANK, replica, [stage, stage + 2]),
        (smp.CommGroup.RDP_GROUP, smp.RankType.RDP_RANK, replica, [stage, stage + 2]),
    ):
        for source in (0, 1):
            if mine == source:
                smp.broadcast((rank, group.name), group)
            else:
                assert smp.recv_from(source, kind) == (senders[source], group.name)
    # A receiver may count the source in another way than the group of the broadcast.
    if stage == 0:
        smp.broadcast("mixed", smp.PP_GROUP)
    else:
        assert smp.recv_from(2 * replica, smp.RankType.WORLD_RANK) == "mixed"

    assert smp.allgather("x" * rank, smp.WORLD) == ["", "x", "xx", "xxx"]
    assert smp.allgather(rank, smp.MP_GROUP) == [2 * replica, 2 * replica + 1]
    assert smp.allgather(rank, smp.DP_GROUP) == [stage, stage + 2]
    assert smp.allgather(rank, smp.TP_GROUP) == [rank]
    gathered = smp.allgather(torch.full((rank + 1,), rank), smp.WORLD)
    assert [each.tolist() for each in gathered] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]

    for number, wait in enumerate((smp.barrier, smp.mp_barrier, smp.dp_barrier, smp.pp_barrier, smp.rdp_barrier)):
        members = [range(4), smp.get_mp_group(), smp.get_dp_group(), smp.get_pp_group(), smp.get_rdp_group()][number]
        (tmp_path / f"{number}_{rank}").touch()
        wait()
        assert all((tmp_path / f"{number}_{member}").exists() for member in members)
    smp.tp_barrier()


def check_errors(rank, _):
    with pytest.raises(ConfigError, match=r"expected a multiple of 3 processes .* found 4; start 3 or 6 processes"):
        smp.init({"partitions": 3})
    with pytest.raises(ConfigError, match=r"found 4, which make 2 data-parallel replicas; set ddp: true"):
        smp.init({"partitions": 2})
    with pytest.raises(ConfigError, match=r"^expected one configuration.*\nmicrobatches: 1 in rank 0, 2 in rank 1$"):
        smp.init(config(microbatches=1 + rank, active_microbatches=1))
    assert not smp.is_initialized()
    smp.init(config())
    with pytest.raises(UsageError, match=r"dest_rank: expected a PP_RANK from 0 to 1, found 2 \(on rank"):
        smp.send(0, 2, smp.RankType.PP_RANK)
    with pytest.raises(UsageError, match=r"src_rank: expected a WORLD_RANK from 0 to 3, found -1"):
        smp.recv_from(-1, smp.RankType.WORLD_RANK)
    with pytest.raises(UsageError, match=rf"expected another process, found WORLD_RANK {rank}, which is the caller"):
        smp.recv_from(rank, smp.RankType.WORLD_RANK)
    with pytest.raises(UsageError, match=r"rank_type: expected a smp\.RankType, found CommGroup"):
        smp.send(0, 1, smp.WORLD)
    with pytest.raises(UsageError, match=r"group: expected a smp\.CommGroup, found str 'WORLD'"):
        smp.broadcast(0, "WORLD")
    assert smp.allgather(rank, smp.WORLD) == [0, 1, 2, 3], "the mistakes sent nothing"


@pytest.mark.parametrize(
    "body", [check_groups, check_tensor_parallel_groups, check_messages, check_collectives, check_errors]
)
def test_four_ranks(body, tmp_path):
    assert_ranks_end_well(body, tmp_path)
