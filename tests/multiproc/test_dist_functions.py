"""`smpc.dist` on real ranks, of two pretended nodes."""

import importlib
import os
import random
import socket
import time

import pytest
import torch
import warm
from support.executor_harness import run_workers
from torch import distributed, nn

import smpc.v1 as smp
import smpc.v2 as tsm
from smpc import dist
from smpc.errors import PeerError, UsageError


def _begin(rank, size, port, per_node=2):
    """As a launcher with `per_node` ranks on every node would start this process."""
    distributed.barrier()  # or a slow rank still connects to one that is gone
    distributed.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node),
        "NODE_RANK": str(rank // per_node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    dist.initialize_dist("cpu", timeout=300.0)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def functions(rank, folder, port):
    _begin(rank, 4, port)
    groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    group = groups[rank // 2]
    found = {"gathered": [int(x) for x in dist.all_gather(torch.tensor(rank), group)]}
    for name in ("sum", "PRODUCT", "min", "MAX", "BAND", "bor", "BXOR"):
        tensor = torch.tensor([rank + 4])
        dist.all_reduce(tensor, name)
        found[name] = tensor.item()
    mean = torch.tensor([float(rank)])
    dist.all_reduce(mean, "AVG", group)
    found["avg"] = mean.item()
    source = torch.tensor([rank])
    dist.broadcast(source, 3)
    objects = [rank, None]
    dist.broadcast_object_list(objects, 2)
    found |= {"broadcast": source.item(), "objects": objects, "in group": dist.get_global_rank(group)}
    found["name"] = dist.get_node_signal_file_name(random.Random(rank))
    found["sampled"] = list(dist.get_sampler(range(10), drop_last=True))
    found["strided"] = _in_memory_of_any_kind(rank)
    try:
        dist.all_gather(torch.ones(1 + rank // 2))
    except UsageError as error:
        found["unequal"] = str(error)
    return found


def _in_memory_of_any_kind(rank):
    """A tensor that has gaps on some ranks and none on others, or another order of dimensions."""
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    kinds = (
        rows.clone(),
        rows.t().contiguous().t(),
        torch.stack([rows, -rows], 2)[:, :, 0],
        nn.Parameter(rows.clone()),
    )
    found = []
    for do in (
        dist.all_reduce,
        lambda tensor: dist.all_reduce(tensor, "AVG"),
        lambda tensor: dist.broadcast(tensor, 2),
    ):
        own = (
            kinds[rank].clone(memory_format=torch.preserve_format)
            if rank != 2
            else torch.stack([rows, -rows], 2)[:, :, 0]
        )
        do(own)
        found.append(own.tolist())
    return [*found, [each.tolist() for each in dist.all_gather(kinds[rank])]]


def test_functions(tmp_path, port):
    found = run_workers(functions, 4, tmp_path, port)
    for rank, own in enumerate(found):
        node = rank // 2
        assert own["gathered"] == [2 * node, 2 * node + 1], "by rank in the group"
        values = [4, 5, 6, 7]
        assert own["sum"] == sum(values)
        assert own["PRODUCT"] == 4 * 5 * 6 * 7
        assert (own["min"], own["MAX"], own["BAND"], own["bor"], own["BXOR"]) == (4, 7, 4, 7, 4 ^ 5 ^ 6 ^ 7)
        assert own["avg"] == 2 * node + 0.5
        assert (own["broadcast"], own["objects"], own["in group"]) == (3, [2, None], rank % 2)
        assert own["sampled"] == [rank, rank + 4]
        rows = [[1.0, 2.0], [3.0, 4.0]]
        assert own["strided"] == [[[4.0, 8.0], [12.0, 16.0]], rows, rows, [rows] * 4]
        assert (
            "torch.float32 (1,) on rank 0, torch.float32 (1,) on rank 1, torch.float32 (2,) on rank 2" in own["unequal"]
        )
    names = [own["name"] for own in found]
    assert names[0] == names[1] != names[2] == names[3]
    assert names[2].startswith("._signal_file_node1_")


def orders(rank, folder, port):
    _begin(rank, 4, port)
    if rank == 0:
        time.sleep(0.2)  # so that the order is not luck
    with dist.run_local_rank_zero_first():
        (folder / f"first{rank}").write_text("")
        seen = [(folder / f"first{other}").exists() for other in (0, 2)]
    node = folder / f"node{rank // 2}"
    node.mkdir(exist_ok=True)
    with dist.busy_wait_for_local_rank_zero(str(node)):
        if rank % 2 == 0:
            time.sleep(0.2)
            (node / "made").write_text("")
    made = (node / "made").exists()
    with dist.local_rank_zero_download_and_wait(str(node / "downloaded"), timeout=30.0):
        if rank % 2 == 0:
            (node / "downloaded").write_text("")
        downloaded = (node / "downloaded").exists()
    dist.barrier()
    return seen, made, downloaded, sorted(path.name for path in node.iterdir())


def test_local_rank_zero_goes_first(tmp_path, port):
    for rank, (seen, made, downloaded, left) in enumerate(run_workers(orders, 4, tmp_path, port)):
        assert made
        assert downloaded
        assert rank % 2 == 0 or all(seen)
        assert left == ["downloaded", "made"], "signal files are removed"


def failures(rank, folder, port):
    _begin(rank, 4, port)
    found = []
    for context in (
        dist.run_local_rank_zero_first,
        lambda: dist.busy_wait_for_local_rank_zero(str(folder / "signals")),
    ):
        ran = False
        try:
            with context():
                ran = True
                if rank == 2:
                    raise ValueError("no disk")
        except (ValueError, PeerError) as error:
            found.append((ran, type(error).__name__, str(error)))
    return found


def test_a_local_rank_zero_that_fails_ends_all(tmp_path, port):
    """The others used to wait for it, without end."""
    for rank, found in enumerate(run_workers(failures, 4, tmp_path, port)):
        for index, (ran, kind, text) in enumerate(found):
            assert ran == (rank % 2 == 0 or index == 1)
            if rank == 2:
                assert (kind, text) == ("ValueError", "no disk")
            else:
                assert (kind, text) == ("PeerError", "rank 2, local rank 0: ValueError: no disk")
        assert len(found) == 2
    assert list((tmp_path / "signals").iterdir()) == []


def folders(rank, folder, port):
    _begin(rank, 4, port)
    file, found = folder / "file", []
    if rank == 0:
        file.write_text("")
    dist.barrier()
    for place in (file / "below", folder / f"of{rank}"):
        ran, began = False, time.monotonic()
        try:
            with dist.busy_wait_for_local_rank_zero(str(place)):
                ran = True
        except UsageError as error:
            found.append((ran, str(error), time.monotonic() - began < 10.0))
    dist.barrier()  # all are still together
    return found


def test_a_folder_in_which_nobody_would_find_the_file(tmp_path, port):
    """The others used to wait for it for half an hour, behind bodies that had run."""
    for found in run_workers(folders, 4, tmp_path, port):
        assert [(ran, in_time) for ran, _, in_time in found] == [(False, True)] * 2
        assert "local rank 0 of node 1 cannot write to" in found[0][1]
        assert (
            f"expected '{tmp_path / 'of2'}', as local rank 0 of node 1 has it, found '{tmp_path / 'of3'}'"
            in found[1][1]
        )


AGAIN = """
import os, time, torch
from torch import distributed
from smpc import dist
IMPORT

for turn in range(2):
    if turn and os.environ["RANK"] == "0":
        time.sleep(2)  # so that the other rank looks for it in the store first
    BEGIN
    total = torch.tensor(dist.get_global_rank() + 1)
    distributed.all_reduce(total)
    print(turn, total.item(), flush=True)
    END
"""
BEGINNINGS = {
    "dist": ("", "dist.initialize_dist('cpu', timeout=300.0)", "distributed.destroy_process_group()"),
    "v2": ("import smpc.v2 as tsm", "tsm.init({'hybrid_shard_degree': 2})", "tsm.state.reset()"),
}


@pytest.mark.parametrize("name", ["dist", pytest.param("v2", marks=pytest.mark.slow)])
def test_a_rank_that_begins_again_late(tmp_path, name):
    """The other one used to find the addresses of the first time in the launcher's store, and to connect to nobody."""
    script, text = tmp_path / "again.py", AGAIN
    for word, line in zip(("IMPORT", "BEGIN", "END"), BEGINNINGS[name], strict=True):
        text = text.replace(word, line)
    script.write_text(text)
    done = warm.run("run", "-n", "2", "--console", "all", str(script), timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {turn} 3" for rank in range(2) for turn in range(2)]


PIPELINES = {"pipeline_parallel_degree": 2, "microbatches": 1, "ddp": True}
SLICES = {"tensor_parallel_degree": 2, "microbatches": 1, "ddp": True}
SESSIONS = {
    "pipelines": (smp.init, PIPELINES, smp.shutdown),
    "slices of their own samples": (smp.init, SLICES, smp.shutdown),
    "slices of the same samples": (smp.init, {**SLICES, "prescaled_batch": True}, smp.shutdown),
    "v2's slices": (tsm.init, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, tsm.state.reset),
    "v2's sequences": (tsm.init, {"context_parallel_degree": 2, "hybrid_shard_degree": 4}, tsm.state.reset),
}


def sampled(rank, folder):
    found = {"before": list(dist.get_sampler(range(8)))}
    for name, (begin, config, end) in SESSIONS.items():
        begin(config)
        found[name] = list(dist.get_sampler(range(8)))
        found[f"{name}, told"] = list(dist.get_sampler(range(8), num_replicas=4, rank=3))
        end()
    return found | {"after": list(dist.get_sampler(range(8)))}


def connected(rank, folder, module):
    """When this rank, of which one is slow, had its groups; when its `init` came back."""
    init = importlib.import_module(module)
    make_groups, made = init.make_groups, []

    def slow(*arguments):
        groups = make_groups(*arguments)
        time.sleep(rank == 2)
        made.append(time.monotonic())
        return groups

    init.make_groups = slow
    begin, config, end = SESSIONS["pipelines" if "v1" in module else "v2's slices"]
    begin(config)
    came_back = time.monotonic()
    end()
    return made[0], came_back


@pytest.mark.parametrize("module", ["smpc.v1.session.init", "smpc.v2.session.init"])
def test_nobody_leaves_while_another_connects(module, tmp_path):
    """A script that was short ended its session, and with it the connections that a slower rank was still making."""
    made, came_back = zip(*run_workers(connected, 4, tmp_path, module), strict=True)
    assert min(came_back) >= max(made)


def test_the_samples_of_a_session(tmp_path):
    """Ranks that need the same batch read the same samples: ranks of a pipeline, of a sequence, of slices of one model."""
    found = run_workers(sampled, 4, tmp_path)
    by_rank = [[0, 4], [1, 5], [2, 6], [3, 7]]
    pairs = [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]
    for name in ("before", "slices of their own samples", "after"):
        assert [own[name] for own in found] == by_rank, name
    for name in ("pipelines", "slices of the same samples", "v2's slices", "v2's sequences"):
        assert [own[name] for own in found] == pairs, name
    assert [own[f"{name}, told"] for own in found for name in SESSIONS] == [[3, 7]] * 20
