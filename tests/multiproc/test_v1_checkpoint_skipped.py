"""A rank that has gone on without a collective call on state: the ranks that wait are told in seconds, by name, and not by a timeout."""

import time

import pytest
from checkpoint_jobs import Job
from executor_harness import run_workers

import smpc.v1 as smp
from smpc.errors import CheckpointError

TIMEOUT = 200.0  # of checkpoints; what is told must not wait for it


def on_one_tensor_parallel_rank(rank, folder, path):
    """As scripts have it that were written before tensor parallelism: `if smp.dp_rank() == 0`."""
    job = Job((1, 2, 1), checkpoint_timeout=TIMEOUT)
    job.steps(0)
    if smp.dp_rank() == 0:
        calls = {
            "state_dict": job.model.state_dict,
            "saving and loading": lambda: job.save(path, "a"),
        }
        begin = time.monotonic()
        for what, call in calls.items():
            with pytest.raises(
                CheckpointError, match=rf"{what} must be called on all 2 ranks.*rank 1 has gone on to step 2"
            ):
                call()
        took = time.monotonic() - begin
    job.steps(1)  # rank 1 has waited here
    return took if smp.dp_rank() == 0 else 0.0


@pytest.mark.long
def test_a_rank_that_has_begun_the_next_step_is_told(tmp_path):
    took = run_workers(on_one_tensor_parallel_rank, 2, tmp_path, tmp_path / "run")
    assert max(took) < TIMEOUT / 4


def while_the_others_wait(rank, folder, path):
    """No step follows: the other rank is in a barrier that nobody else enters."""
    job = Job((1, 2, 1), checkpoint_timeout=TIMEOUT)
    job.steps(0)
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"(?s)state_dict must be .*, and rank 1 waits elsewhere, .*barrier"):
            job.model.state_dict()
    smp.barrier()
    found = job.model.state_dict()  # the ranks have not lost each other
    return time.monotonic() - begin, len(found) > 0


@pytest.mark.slow  # ten seconds in which nothing moves
def test_a_rank_that_waits_elsewhere_is_told(tmp_path):
    for took, is_there in run_workers(while_the_others_wait, 2, tmp_path, tmp_path / "run"):
        assert is_there
        assert took < TIMEOUT / 4


def at_the_end(rank, folder, path):
    """The last lines of a script: the other rank has nothing left to do."""
    job = Job((1, 2, 1), checkpoint_timeout=TIMEOUT)
    job.steps(0)
    begin = time.monotonic()
    if smp.dp_rank() == 0:
        with pytest.raises(
            CheckpointError, match=r"state_dict must be called on all 2 ranks .*, and one has ended without it"
        ):
            job.model.state_dict()
    return time.monotonic() - begin


@pytest.mark.long
def test_a_rank_that_has_ended_is_told(tmp_path):
    assert max(run_workers(at_the_end, 2, tmp_path, tmp_path / "run")) < TIMEOUT / 4


def late(rank, folder, path):
    """A rank that computes for longer than any of these times is waited for."""
    job = Job((1, 2, 1), checkpoint_timeout=TIMEOUT)
    job.steps(0)
    if rank == 1:
        end = time.monotonic() + 15.0
        while time.monotonic() < end:  # data loading, evaluation
            pass
    return len(job.model.state_dict()) > 0


@pytest.mark.slow
def test_a_rank_that_comes_late_is_waited_for(tmp_path):
    assert run_workers(late, 2, tmp_path, tmp_path / "run") == [True, True]
