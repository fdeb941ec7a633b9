"""`smpc.dist` on real ranks, of two pretended nodes."""

import os
import random
import socket
import time

import pytest
import torch
from support.executor_harness import run_workers
from torch import distributed

from smpc import dist
from smpc.errors import PeerError


def _begin(rank, size, port, per_node=2):
    """As a launcher with `per_node` ranks on every node would start this process."""
    distributed.barrier()  # or a slow rank still connects to one that is gone
    distributed.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node),
        "NODE_RANK": str(rank // per_node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    dist.initialize_dist("cpu", timeout=60.0)


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
    return found


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
