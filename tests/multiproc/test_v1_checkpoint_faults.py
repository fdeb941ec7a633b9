"""What goes wrong with checkpoints in training scripts: deaths, full disks, damage, mistakes."""

import contextlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import signal
import sys
import threading

import pytest
import torch
from checkpoint_jobs import Job, resume, same
from executor_harness import Launch, run_workers

import smpc.v1 as smp
from smpc.checkpoint import Root
from smpc.errors import CheckpointError, ConfigError, ConfigTypeError

PP2 = (2, 1, 1)


@pytest.fixture(scope="module", autouse=True)
def server():
    multiprocessing.get_context("forkserver").set_forkserver_preload(["smpc.v1"])
    multiprocessing.forkserver.ensure_running()


def die_while_saving(rank, folder, path, victim, there):
    """The first save stands if there is one; the second never ends: the victim is killed among its writes."""
    job = Job(PP2, checkpoint_timeout=3.0)
    job.steps(0)
    if there:
        job.save(path, "first")
    state = job.state()
    job.steps(1)
    torch.save(state, folder / f"state{rank}.pt")
    if rank == victim:
        sys.setprofile(KillAtWrite())
    job.save(path, "second")


class KillAtWrite:
    """SIGKILL for this process at the second write to a file of tensors: its header is there, its first tensor not."""

    def __init__(self):
        self.count = 0

    def __call__(self, frame, event, argument):
        if event == "c_call" and argument is os.write and frame.f_code.co_filename.endswith("/tensorfile.py"):
            self.count += 1
            if self.count == 2:
                os.kill(os.getpid(), signal.SIGKILL)


def continue_after_death(rank, folder, path, there, draft):
    job = Job(PP2, seed=2)
    content, texts = resume(path)
    assert content is None
    expected = [text for text, given in (("a save under way", draft), ("training starts anew", not there)) if given]
    assert rank != 0 or all(any(part in text for text in texts) for part in expected), texts
    tags = Root(path).tags()
    job.step(1)
    if there:
        resume(path)
    state = job.state()
    job.save(path, "second")  # cleans up
    return tags, [name for name in os.listdir(path) if name.startswith(".")], state


@pytest.mark.parametrize(
    ("victim", "there"),
    [(0, True), pytest.param(0, False, marks=pytest.mark.slow), pytest.param(1, True, marks=pytest.mark.slow)],
)
def test_a_rank_killed_while_saving_leaves_what_there_was(tmp_path, victim, there):
    path = tmp_path / "run"
    for name in ("dying", "next"):
        (tmp_path / name).mkdir()
    codes = [code for code, _ in Launch(die_while_saving, 2, tmp_path / "dying", path, victim, there).wait(60)]
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] != 0
    draft = any(name.startswith(".second") for name in os.listdir(path))
    assert draft == (victim == 0)  # another rank's death is noticed, and the draft removed
    tags, hidden, state = run_workers(continue_after_death, 2, tmp_path / "next", path, there, draft)[0]
    assert tags == (["first_partial"] if there else [])
    assert hidden == []
    if there:
        assert same(state, torch.load(tmp_path / "dying" / "state0.pt")) == []


def misuse(rank, folder, path):
    job = Job(PP2)
    job.steps(0)
    for options, error, text in [
        ({"num_kept_partial_checkpoints": 0}, ConfigError, "at least 1, or None to keep all, found 0"),
        ({"partial": False, "asynchronous": True}, ConfigError, "asynchronous: for partial"),
        ({"pickle": ["args"]}, CheckpointError, "has no 'args'"),
        ({"force": rank == 0}, CheckpointError, "expected the same arguments on all ranks"),
        ({"user_content": {"args": object()}}, CheckpointError, "ask for pickle by name"),
    ]:
        if "args" in options.get("user_content", {}) and rank:
            options = {}
        with pytest.raises(error, match=text):
            job.save(path, "a", **options)
    with pytest.raises(ConfigTypeError, match=r"model: expected the smp.DistributedModel"):
        smp.save_checkpoint(str(path), "a", model=job.model.get_module())
    assert not Root(path).tags()
    job.save(path, "a", user_content={"step": 1, "type": slice(1, 2)}, pickle=["type"])
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        job.save(path, "a")
    job.save(path, "a", force=True, user_content={"step": 1, "type": slice(1, 2)}, pickle=["type"])
    assert smp.resume_from_checkpoint(str(path)) == {"step": 1}
    assert smp.resume_from_checkpoint(str(path), unpickle=["type"]) == {"step": 1, "type": slice(1, 2)}
    for tag in ("b", "c"):
        job.save(path, tag, num_kept_partial_checkpoints=2)
    assert Root(path).tags() == ["b_partial", "c_partial"]
    smp.barrier()
    if rank == 0:
        (path / "newest").write_text("junk\n")
    smp.barrier()
    before = job.state()
    _, texts = resume(path)
    assert rank != 0 or any("names 'junk'" in text for text in texts)
    smp.barrier()
    if rank == 0:
        damage(Root(path).find("c_partial"))
    smp.barrier()
    job.steps(1)
    before = job.state()
    with pytest.raises(CheckpointError, match=r"model_0000\d.safetensors"):
        smp.resume_from_checkpoint(str(path), "c")
    assert same(job.state(), before) == []
    with pytest.raises(CheckpointError, match="no checkpoint d_partial in"):
        smp.resume_from_checkpoint(str(path), "d")
    return True


def damage(folder):
    """Flip a bit in the last tensor of a file."""
    name = sorted(name for name in os.listdir(folder) if name.startswith("model"))[-1]
    with open(os.path.join(folder, name), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 4]))


def test_mistakes_and_damage_are_errors_on_all_ranks(tmp_path):
    assert run_workers(misuse, 2, tmp_path, tmp_path / "run") == [True, True]


def background(rank, folder, path):
    """What is saved in the background is what was there; a failure comes up in the next step, and at the end."""
    job = Job(PP2)
    job.steps(0)
    state = job.state()
    job.save(path, "a", asynchronous=True)
    with torch.no_grad():
        for parameter in job.model.local_parameters():
            parameter.zero_()
    for tag in ("b", "c"):  # one after the other
        job.save(path, tag, asynchronous=True)
    smp.barrier()
    smp.resume_from_checkpoint(str(path), "a")
    assert same(job.state(), state) == []
    big = {"big": torch.zeros(3_000_000)}  # more than fits
    with full_disk(rank):
        job.save(path, "d", asynchronous=True, user_content=big)
        for thread in [each for each in threading.enumerate() if each.name.startswith("smpc checkpoint")]:
            thread.join()
        with pytest.raises(CheckpointError, match=r"(?s)in the background failed: rank 0: .*d_partial"):
            job.step(1)
        job.save(path, "e", asynchronous=True, user_content=big)
        with pytest.raises(CheckpointError, match=r"(?s)in the background failed: rank 0: .*e_partial"):
            smp.shutdown()
    assert not smp.is_initialized()
    assert Root(path).tags() == ["a_partial", "b_partial", "c_partial"]
    return True


@contextlib.contextmanager
def full_disk(rank):
    """Writes of rank 0 beyond 8 MB of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_saving_in_the_background(tmp_path):
    assert run_workers(background, 2, tmp_path, tmp_path / "run") == [True, True]


def alone(rank, folder, path):
    """A rank that saves or gathers alone is told so, in time."""
    job = Job((1, 2, 1), checkpoint_timeout=1.5)
    job.steps(0)
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"rank 1 ended, or did not come within 1.5 s"):
            job.save(path, "a")
        with pytest.raises(CheckpointError, match=r"state_dict must be called on all 2 ranks"):
            job.model.state_dict()
    smp.barrier()
    return True


def test_a_rank_that_saves_alone_is_told(tmp_path):
    assert run_workers(alone, 2, tmp_path, tmp_path / "run") == [True, True]


def another_partition(rank, folder, path):
    """The same ranks, cut elsewhere by hand; then that cut taken up where nothing is said by hand."""
    job = Job(PP2)
    job.steps(0)
    job.save(path, "a")
    state, automatic = job.state(), assignment(job)
    smp.shutdown()
    job = Job(PP2, seed=2, auto_partition=False, default_partition=0)
    smp.set_partition(job.model.get_module().head, 1)
    smp.set_partition(job.model.get_module().norm, 1)
    resume(path)
    job.step(1)
    by_hand = assignment(job)
    assert by_hand != automatic
    resume(path)
    assert same(job.state(), state) == []
    job.save(path, "b")
    smp.shutdown()
    job = Job(PP2, seed=2)
    resume(path)
    job.step(1)
    assert assignment(job) == by_hand
    smp.shutdown()
    return True


def assignment(job):
    return json.loads(job.model.plan_json)["assignment"]


def test_another_partition_of_the_same_ranks(tmp_path):
    assert run_workers(another_partition, 2, tmp_path, tmp_path / "run") == [True, True]
