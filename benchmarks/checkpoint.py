"""Saving against torch.distributed.checkpoint: the same state, the same folder, the same ranks, in turns.

Two ranks hold a replicated model and its Adam state. Synchronous: until the checkpoint is on the disk. Asynchronous: how long the call
stalls training. Both bring their files to the disk (fsync; torch by its default `sync_files=True`, this library the folders too); only this
library writes checksums and publishes by a rename. Ratios are ours / torch's, medians over the rounds.
Run: python benchmarks/checkpoint.py [--megabytes 512] [--rounds 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from smpc.checkpoint import BackgroundSaver, Content, GroupChannel, Root, Shard, save

RANKS = 2


def tensors(megabytes: int) -> dict[str, dict[str, Tensor]]:
    """A model of 12 equal layers and two moments of each."""
    rows = max(1, megabytes * 1_000_000 // (3 * 12 * 4 * 1024))
    names = [f"layer{i}.weight" for i in range(12)]
    torch.manual_seed(0)
    model = {name: torch.randn(rows, 1024) for name in names}
    return {"model": model, "optimizer": {f"{n}.{k}": torch.randn(rows, 1024) for n in names for k in ("m", "v")}}


def timed(work: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(rank: int, rendezvous: str, folder: str, megabytes: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    timeout = datetime.timedelta(minutes=5)
    channel, own = (GroupChannel(dist.new_group(backend="gloo"), timeout) for _ in range(2))
    theirs = dist.new_group(backend="gloo")
    state = tensors(megabytes)
    content = Content([Shard.whole(kind, name, t) for kind, found in state.items() for name, t in found.items()])
    root, saver = Root(f"{folder}/ours"), BackgroundSaver(own)
    found: dict[str, list[float]] = {"sync": [], "torch sync": [], "stall": [], "torch stall": []}
    for turn in range(rounds + 1):  # the first warms up
        found["sync"].append(timed(lambda turn=turn: save(root, f"s{turn}", content, channel)))
        found["torch sync"].append(timed(lambda turn=turn: dcp.save(state, checkpoint_id=f"{folder}/torch{turn}")))
        found["stall"].append(timed(lambda turn=turn: saver.save(root, f"a{turn}", content)))
        saver.wait()
        futures: list[Any] = []
        path = f"{folder}/torch_a{turn}"
        found["torch stall"].append(
            timed(
                lambda path=path, to=futures: to.append(dcp.async_save(state, checkpoint_id=path, process_group=theirs))
            )
        )
        futures[0].result()
        dist.barrier()
        if rank == 0:
            for name in os.listdir(folder):
                shutil.rmtree(f"{folder}/{name}")
        dist.barrier()
    saver.close()
    if rank == 0:
        report({key: times[1:] for key, times in found.items()}, megabytes)
    dist.destroy_process_group()


def report(found: dict[str, list[float]], megabytes: int) -> None:
    middle = {key: statistics.median(times) for key, times in found.items()}
    print(
        f"{RANKS} ranks, {megabytes} MB replicated, checksums on, fsync on both sides; medians of {len(found['sync'])} rounds"
    )
    for name, ours, other in (
        ("synchronous save", "sync", "torch sync"),
        ("asynchronous stall", "stall", "torch stall"),
    ):
        ratio = middle[ours] / middle[other]
        print(f"{name:20}{middle[ours]:8.3f} s   torch {middle[other]:8.3f} s   ratio {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; by default a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as base:
        folder = f"{base}/run"
        os.mkdir(folder, 0o700)
        spawn = multiprocessing.get_context("spawn")
        settings = (f"{base}/rendezvous", folder, arguments.megabytes, arguments.rounds)
        ranks = [spawn.Process(target=measure, args=(rank, *settings)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
