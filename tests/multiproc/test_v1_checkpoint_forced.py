"""A full checkpoint that replaces another, killed at every point at which names change: model and content are of one step, old or new."""

import os
import signal
import sys
import threading
import warnings

import pytest
import torch
import zoo
from executor_harness import Launch, run_workers
from torch import nn

import smpc.v1 as smp
from smpc.checkpoint import Root

CALLS = (os.rename, os.replace, os.link, os.unlink, os.rmdir, os.mkdir)


class KillAtName:
    """SIGKILL for this process at the n-th change of a name in a folder."""

    def __init__(self, point):
        self.point, self.count = point, 0

    def __call__(self, frame, event, argument):
        if event == "c_call" and argument in CALLS:
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
    """One process; every parameter and every state of the optimizer has the number of the step."""

    def __init__(self, path, hugging_face):
        smp.init({"pipeline_parallel_degree": 1})
        module = zoo.build("gpt2")[0] if hugging_face else nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.model = smp.DistributedModel(module)
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

    def save(self, step, **options):
        self.set(step)
        smp.save_checkpoint(
            self.path, "t", False, self.model, self.optimizer, user_content={"step": step}, force=step > 1, **options
        )

    def resume(self):
        """The step that all of it is of."""
        self.set(-1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = smp.resume_from_checkpoint(self.path, partial=False)["step"]
        assert all(bool((tensor == step).all()) for tensor in self.tensors())
        return step


def replace_and_die(rank, folder, path, hugging_face, asynchronous, point):
    job = Job(path, hugging_face)
    job.save(1)
    kill = KillAtName(point)
    kill.arm()
    job.save(2, asynchronous=asynchronous)
    job.set(7)  # training goes on
    smp.shutdown()
    kill.disarm()
    return kill.count


def resume_each(rank, folder, paths, hugging_face):
    """What is there after each death; then a save that succeeds, and leaves nothing else."""
    job = Job(paths[0], hugging_face)
    steps = []
    for path in paths:
        job.path = str(path)
        steps.append(job.resume())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job.save(3)
        assert job.resume() == 3
        assert sorted(os.listdir(path)) == ["newest_full", "t", "user_content_t"]
        assert len(Root(path / "user_content_t").tags()) == 1
        assert not [name for name in os.listdir(path / "user_content_t") if name.startswith(".")]
    return steps


@pytest.mark.parametrize(
    ("hugging_face", "asynchronous", "points"),
    [
        (True, False, (-7, -6)),  # between the two renames of the folder, and after them
        (False, True, (-6,)),
        pytest.param(True, True, None, marks=pytest.mark.slow),
        pytest.param(False, False, None, marks=pytest.mark.slow),
    ],
)
def test_a_forced_full_save_that_dies_leaves_one_step(tmp_path, hugging_face, asynchronous, points):
    def run(name, point):
        folder = tmp_path / name
        folder.mkdir()
        launch = Launch(replace_and_die, 1, folder, folder / "run", hugging_face, asynchronous, point)
        ((status, log),) = launch.wait()
        assert status == (0 if point is None else -signal.SIGKILL), log
        return folder

    count = torch.load(run("rehearsal", None) / "0.pt")
    points = range(count) if points is None else [count + point for point in points]
    paths = [run(str(point), point) / "run" for point in points]
    (tmp_path / "resume").mkdir()
    steps = run_workers(resume_each, 1, tmp_path / "resume", paths, hugging_face)[0]
    print(f"{count} changes of names; steps found after each death: {dict(zip(points, steps, strict=True))}")
    assert set(steps) <= {1, 2}
    assert steps == sorted(steps)  # a later death never finds an older one
    assert len(steps) < 4 or set(steps) == {1, 2}
