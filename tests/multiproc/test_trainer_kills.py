"""A job that is killed while it saves a sharded checkpoint: what was there before stays, or the new one is whole; never a mixture."""

import os
import signal
import sys
import time
import warnings

import pytest
import torch
from support.executor_harness import Launch, run_workers
from support.trainer_cases import everything, trainer
from torch import distributed

from smpc.errors import CheckpointError

SHARDED = {"state_dict_type": "sharded", "sharded_ckpt_prefix_dir": "ba{batch}"}


def _place(rank):
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(distributed.get_world_size()), "NODE_RANK": "0"}
    warnings.simplefilter("ignore")


class Killer:
    """Ends this process at its n-th call of a function within a save, of Python or C; counts them without n."""

    def __init__(self, made, point):
        self.point, self.count, self.save = point, 0, made.save_checkpoint
        made.save_checkpoint = self.watched

    def watched(self):
        sys.setprofile(self)
        try:
            return self.save()
        finally:
            sys.setprofile(None)

    def __call__(self, frame, event, argument):
        self.count += event in ("call", "c_call")
        if self.count == self.point:
            os.kill(os.getpid(), signal.SIGKILL)


def save(rank, folder, run, victim, point):
    """Two batches with a checkpoint after each; a rank is killed in the second one."""
    _place(rank)
    made = trainer(4, fsdp_config=SHARDED, save_folder=str(run), save_interval="1ba", max_duration="1ba")
    made.fit()
    first = everything(made)
    torch.save(first, folder / f"first{rank}")
    killer = Killer(made, point if rank == victim else None)
    made.fit("1ba")
    return first, everything(made), killer.count


def load(rank, folder, run):
    _place(rank)
    found = {}
    for name in ("latest-rank0.pt", "ba1", "ba2"):
        try:
            found[name] = everything(trainer(4, fsdp_config=SHARDED, load_path=str(run / name)))
        except CheckpointError as error:
            found[name] = str(error)
    return found


def _check(tmp_path, points):
    """`points`: how many to try, spread over all of a save, on one rank after the other."""
    (tmp_path / "whole").mkdir()
    whole = run_workers(save, 2, tmp_path / "whole", tmp_path / "whole" / "run", None, None)
    first, second, _ = whole[0]
    counts = [count for *_, count in whole]
    assert min(counts) > 100
    for index in range(points):
        victim = index % 2
        point = 1 + index * (counts[victim] - 1) // max(points - 1, 1)
        place = tmp_path / str(index)
        place.mkdir()
        job = Launch(save, 2, place, place / "run", victim, point)
        deadline = time.monotonic() + 120
        while job.processes[victim].is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for process in job.processes:
            process.kill()
            process.join()
        (place / "load").mkdir()
        (found,) = run_workers(load, 1, place / "load", place / "run")
        assert torch.equal(found["ba1"], first), (victim, point)
        newest = found["latest-rank0.pt"]
        assert torch.equal(newest, first) or torch.equal(newest, second), (victim, point)
        assert (
            "no checkpoint at" in found["ba2"] if isinstance(found["ba2"], str) else torch.equal(found["ba2"], second)
        ), (victim, point)


@pytest.mark.long
def test_a_few_points(tmp_path):
    _check(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_points(tmp_path):
    _check(tmp_path, 50)
