"""Random kills while a training script saves a full checkpoint: what it resumes from then is of one step, the last that was whole.

Drawn from a printed seed: one rank or two, with other experts each or not, a new tag, the first of all, or a forced save of the last one,
in the foreground or background; who dies, and at which call of the checkpoint code into C (counted in a rehearsal). Then another job
resumes, and saves again.
"""

import os
import random
import shutil
import signal
import sys
import threading
import warnings

import pytest
import torch
from executor_harness import Launch, run_workers
from mixtures import Experts
from torch import nn

import smpc.v1 as smp
from smpc.checkpoint import Root

SEED = int(os.environ.get("SMPC_KILL_SEED", "20240"))
FOLDERS = ("/smpc/checkpoint/", "/smpc/v1/saving/")
REHEARSED = {}


class KillAtCall:
    """SIGKILL for this process at the n-th call of a C function that the checkpoint code makes."""

    def __init__(self, point):
        self.point, self.count = point, 0

    def __call__(self, frame, event, argument):
        if event == "c_call" and any(folder in frame.f_code.co_filename for folder in FOLDERS):
            if self.count == self.point:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1

    def arm(self):
        threading.setprofile(self)
        sys.setprofile(self)

    def disarm(self):
        sys.setprofile(None)
        threading.setprofile(None)


class Job:
    """Replicas whose every parameter and state of the optimizer has the number of the step. `degree`: ranks that divide experts."""

    def __init__(self, path, size, degree=1):
        degrees = {"pipeline_parallel_degree": 1, "expert_parallel_degree": degree}
        smp.init(degrees | {"ddp": size > 1, "checkpoint_timeout": 10.0})
        self.model = smp.DistributedModel(nn.Sequential(nn.Linear(30, 40), Experts(4, 40, 20)))
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters()))
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.path = str(path)

    @torch.no_grad()
    def set(self, step):
        for tensor in self.tensors():
            tensor.fill_(step)

    def tensors(self):
        return [*self.model.parameters(), *(s["exp_avg"] for s in self.optimizer.state.values())]

    def save(self, step, tag, **options):
        self.set(step)
        content = {"step": step}
        smp.save_checkpoint(self.path, tag, False, self.model, self.optimizer, user_content=content, **options)

    def resume(self):
        """The step that all of it is of; None if there was nothing."""
        self.set(-1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = smp.resume_from_checkpoint(self.path, partial=False)
        step = -1 if content is None else content["step"]
        assert all(bool((tensor == step).all()) for tensor in self.tensors())
        return None if content is None else step


def draw(seed):
    pick = random.Random(seed)
    size = pick.choice([1, 2])
    case = {
        "size": size,
        "variant": pick.choice(["new", "first", "forced"]),
        "asynchronous": pick.random() < 0.5,
        "victim": pick.choice([0, pick.randrange(size)]),  # rank 0 publishes, so it dies more often
    }
    fraction = pick.random()
    return case | {"degree": pick.choice([1, size])}, fraction


def save_and_die(rank, folder, path, case, point):
    job = Job(path, case["size"], case["degree"])
    if case["variant"] != "first":
        for step in (1, 2):
            job.save(step, f"t{step}")
    kill = KillAtCall(point if rank == case["victim"] else None)
    kill.arm()
    forced = case["variant"] == "forced"
    job.save(3, "t2" if forced else "t3", force=forced, asynchronous=case["asynchronous"])
    job.set(7)  # training goes on
    smp.shutdown()
    kill.disarm()
    return kill.count


def rehearse(case, folder):
    key = tuple(case.values())
    if key not in REHEARSED:
        place = folder / f"rehearsal{len(REHEARSED)}"
        place.mkdir()
        counts = run_workers(save_and_die, case["size"], place, place / "run", case, None)
        REHEARSED[key] = counts[case["victim"]]
    return REHEARSED[key]


def one_kill(seed, folder):
    case, fraction = draw(seed)
    point = int(fraction * rehearse(case, folder))
    place = folder / str(seed)
    place.mkdir()
    results = Launch(save_and_die, case["size"], place, place / "run", case, point).wait()
    assert results[case["victim"]][0] == -signal.SIGKILL, (seed, case, point, results)
    return case, place / "run"


def check_each(rank, folder, runs):
    """What each job that comes after a death finds; it saves, and leaves nothing of the dead one's."""
    job = Job(runs[0][1], 1)
    steps = []
    for case, path in runs:
        job.path = str(path)
        steps.append(job.resume())
        assert steps[-1] in {"first": (None, 3), "new": (2, 3), "forced": (2, 3)}[case["variant"]], (case, path, steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job.save(4, "t4")
            job.save(4, "t2", force=True)
        assert job.resume() == 4
        assert not [name for name in os.listdir(path) if name.startswith(".")], (case, path)
        assert Root(path / "user_content_t4").tags() == ["content_1"]
        assert len(Root(path / "user_content_t2").tags()) == 1
    return steps


def kill_and_check(seeds, folder):
    runs = [one_kill(seed, folder) for seed in seeds]
    (folder / "check").mkdir()
    (steps,) = run_workers(check_each, 1, folder / "check", runs)
    for _, path in runs:
        shutil.rmtree(path.parent)
    shutil.rmtree(folder / "check")
    return steps


@pytest.mark.long
def test_random_kills_while_a_full_checkpoint_is_saved(tmp_path):
    print(f"SMPC_KILL_SEED={SEED}")
    assert len(kill_and_check(range(SEED, SEED + 1), tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("piece", range(6))
def test_300_random_kills_of_full_checkpoints(piece, tmp_path):
    first = SEED + 1000 + 50 * piece
    steps = kill_and_check(range(first, first + 50), tmp_path)
    published = steps.count(3)
    print(f"50 kills from seed {first}: {published} after publication")
    assert 1 < published < 49  # kills hit both sides
