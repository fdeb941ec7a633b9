"""What goes wrong with checkpoints in training scripts: deaths, full disks, damage, mistakes."""

import contextlib
import json
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


def die_while_saving(rank, folder, path, victim, there, call):
    """The first save, if there is one, is complete; the second never ends: the victim is killed at a call."""
    job = Job(PP2, checkpoint_timeout=3.0)
    job.steps(0)
    if there:
        job.save(path, "first")
    state = job.state()
    job.steps(1)
    torch.save(state, folder / f"state{rank}.pt")
    if rank == victim:
        sys.setprofile(KillAt(call))
    job.save(path, "second")


class KillAt:
    """SIGKILL for this process: "write", at the second write to a file of tensors, whose header is there and its first tensor not;
    "commit", at the first rename, when all files and the manifest are there."""

    def __init__(self, call):
        self.call, self.count = call, 0

    def __call__(self, frame, event, argument):
        if event == "c_call" and "/smpc/checkpoint/" in frame.f_code.co_filename:
            self.count += argument is os.write
            if (self.count == 2) if self.call == "write" else argument is os.rename:
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


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("victim", "there", "call"),
    [
        (0, True, "commit"),
        (0, False, "write"),
        *(pytest.param(v, True, "write", marks=pytest.mark.slow) for v in (0, 1)),
    ],
)
def test_a_rank_killed_while_saving_leaves_what_there_was(tmp_path, victim, there, call):
    path = tmp_path / "run"
    for name in ("dying", "next"):
        (tmp_path / name).mkdir()
    codes = [code for code, _ in Launch(die_while_saving, 2, tmp_path / "dying", path, victim, there, call).wait()]
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
        ({"pickle": ["args"]}, CheckpointError, "has no 'args'"),
        ({"force": rank > 0}, CheckpointError, "expected the same arguments on all ranks"),
    ]:
        with pytest.raises(error, match=text):
            job.save(path, "a", **options)
    with pytest.raises(ConfigTypeError, match=r"model: expected the smp.DistributedModel"):
        smp.save_checkpoint(str(path), "a", model=job.model.get_module())
    assert not Root(path).tags()
    job.save(path, "a", user_content={"step": 1, "type": slice(1, 2)}, pickle=["type"])
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        job.save(path, "a", force=False)
    job.save(path, "a", user_content={"step": 1, "type": slice(1, 2)}, pickle=["type"])
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


@pytest.mark.long
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
        job.save(path, "whole", partial=False, asynchronous=True, user_content=big)
        with pytest.raises(CheckpointError, match=r"(?s)in the background failed: rank 0: .*user_content_whole"):
            job.save(path, "x")
        job.save(path, "e", asynchronous=True, user_content=big)
        with pytest.raises(CheckpointError, match=r"(?s)in the background failed: rank 0: .*e_partial"):
            smp.shutdown()
    assert not smp.is_initialized()
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


@pytest.mark.long
def test_saving_in_the_background(tmp_path):
    assert run_workers(background, 2, tmp_path, tmp_path / "run") == [True, True]
    assert sorted(os.listdir(tmp_path / "run")) == ["a_partial", "b_partial", "c_partial", "newest"]


def misfit(rank, folder, path):
    """Another model than the one that was saved: all that does not fit is said together, on all ranks, and nothing changes."""
    job = Job(PP2)
    job.steps(0)
    job.save(path, "a", data=Position(10 + rank))
    smp.shutdown()
    job = Job((1, 2, 1), seed=2)
    module = job.model.get_module()
    module.scale = torch.ones(2)
    module.norm.double()
    module.register_parameter("more", torch.nn.Parameter(torch.ones(1)))
    before = {name: value.clone() for name, value in job.model.named_parameters()}
    position = Position(0)
    with pytest.raises(CheckpointError) as caught:
        smp.resume_from_checkpoint(str(path), load_optimizer=False, data=position)
    assert sorted(line.split(";")[0] for line in str(caught.value).splitlines()[1:]) == [
        "dtype of model norm.bias: expected torch.float64, found torch.float32",
        "dtype of model norm.weight: expected torch.float64, found torch.float32",
        "missing: model more",
        "shape of model scale: expected [2], found [1]",
    ]
    assert all(torch.equal(value, before[name]) for name, value in job.model.named_parameters())
    module.scale = torch.ones(1)
    assert position.at == 0
    resume(path, load_optimizer=False, strict=False, data=position)
    assert position.at == 10
    assert module.norm.weight.dtype == torch.float64
    assert not torch.equal(module.norm.weight, before["norm.weight"])
    with pytest.raises(ConfigTypeError, match=r"data: expected an object with state_dict\(\)"):
        smp.resume_from_checkpoint(str(path), load_optimizer=False, data=3)
    return True


class Position:
    """Where a data loader is."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at, "order": torch.arange(3) + self.at}

    def load_state_dict(self, state):
        assert torch.equal(state["order"], torch.arange(3) + state["at"])
        self.at = state["at"]


def test_all_that_does_not_fit_is_listed_on_all_ranks(tmp_path):
    assert run_workers(misfit, 2, tmp_path, tmp_path / "run") == [True, True]


def positions(rank, folder, path):
    """Each data-parallel rank takes up its own position, whatever the other degrees; pipeline rank 0's counts."""
    job = Job((2, 1, 1))
    job.steps(0)
    job.save(path, "one", data=Position(7 if smp.pp_rank() == 0 else -1))
    smp.shutdown()
    job, position, found = Job((1, 2, 1), seed=2), Position(0), []
    resume(path, data=position)  # one position for all that there are now
    found.append(position.at)
    for tag, own in (("two", 20 + smp.dp_rank()), ("three", None)):
        job.save(path, tag, data=None if own is None else Position(own))
    _, texts = resume(path, data=position)
    assert rank != 0 or any("no data position was saved" in text for text in texts)
    resume(path, tag="two", data=position)
    found.append(position.at)
    smp.shutdown()
    job = Job((2, 1, 1), seed=2)
    _, texts = resume(path, tag="two", data=position)
    assert rank != 0 or any("2 data-parallel ranks" in text for text in texts), texts
    return [*found, position.at]


def test_positions_in_the_data(tmp_path):
    assert run_workers(positions, 2, tmp_path, tmp_path / "run") == [[7, 20, 20], [7, 21, 21]]


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


@pytest.mark.long
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


@pytest.mark.long
def test_another_partition_of_the_same_ranks(tmp_path):
    assert run_workers(another_partition, 2, tmp_path, tmp_path / "run") == [True, True]
