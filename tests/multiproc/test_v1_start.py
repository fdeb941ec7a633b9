"""Before the first step: who waits for a rank that does not come ends within `start_timeout`, and names that rank and where it is."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import forked_launch
import pytest
import server
import start_script
from start_script import CASES, START_TIMEOUT

from smpc.launch.job import Job

LIMIT = 90.0  # seconds, on a loaded machine, to start two ranks, and to end them
FAST = ["barrier", "groups in another order", "no model, replicas", "no loading", "no step, replicas"]


def drive(cases, folder):
    """Run cases one after another; one line of JSON for each."""
    with open(folder / "results.jsonl", "w") as results:
        for number, case in enumerate(cases):
            own = folder / str(number)
            own.mkdir()
            os.environ["TMPDIR"] = str(own)
            tempfile.tempdir = None
            started = time.time()
            status, shown, _, _, ended = forked_launch.run(Job(start_script.__file__, (case,), 2), own)
            logs = [(own / f"{rank}.log").read_text() for rank in range(2)]
            results.write(json.dumps([status, shown, logs, ended - started]) + "\n")


def run_cases(cases, folder):
    """What became of each case; two at a time."""
    context = server.context()
    drivers = []
    for number in range(2):
        (folder / f"driver{number}").mkdir()
        drivers.append(context.Process(target=drive, args=(cases[number::2], folder / f"driver{number}")))
        drivers[-1].start()
    limit = time.monotonic() + LIMIT * len(cases)
    found = {}
    for number, driver in enumerate(drivers):
        driver.join(max(0.0, limit - time.monotonic()))
        if driver.is_alive():
            driver.kill()
            driver.join()
        results = folder / f"driver{number}" / "results.jsonl"
        found |= dict(zip(cases[number::2], map(json.loads, results.read_text().splitlines()), strict=False))
    return found


def check(cases, folder):
    found = run_cases(cases, folder)
    assert sorted(found) == sorted(cases), "the others hung"
    for case, (status, shown, logs, took) in found.items():
        told = "\n".join([case, shown, *logs])
        assert status == 1, told
        assert took < START_TIMEOUT + LIMIT, told
        if case != "groups in another order":  # there both are at fault
            assert shown.startswith("smpc: error: rank 1 stalled, nothing moved for 3 s (start_timeout)"), told
            assert "rank 1" in logs[0], told
        else:
            assert "every rank waits, so they wait in different calls" in shown, told
            assert "in main" in shown, told
        assert CASES[case] in shown, told


@pytest.mark.long
def test_who_does_not_come_is_named(tmp_path):
    """Rank 0 waited for the longest of three timeouts, or for seven days."""
    check(FAST, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_who_does_not_come_is_named_in_every_case(tmp_path):
    check([case for case in CASES if case not in FAST], tmp_path)


@pytest.mark.long
def test_a_slow_start_is_no_stall(tmp_path):
    """One rank takes its time to build the model, and `start_timeout` is not over; in the other case, for the end of its last step."""
    found = run_cases(["slow", "late"], tmp_path)
    for case, (status, shown, logs, _) in found.items():
        assert (status, [log.splitlines()[-1:] for log in logs]) == (0, [["trained"], ["trained"]]), (case, shown, logs)


PLACES = """
import pathlib, sys
import smpc.v1 as smp
smp.init({"pipeline_parallel_degree": 2})
place = f"rank {smp.rank()} of {smp.size()} {smp.local_rank()} {smp.local_size()} {smp.allgather(smp.rank(), smp.WORLD)}"
pathlib.Path(sys.argv[1], str(smp.rank())).write_text(place)
smp.shutdown()
"""
JOINED = ["rank 0 of 2 0 2 [0, 1]", "rank 1 of 2 1 2 [0, 1]"]


def follow_srun(folder, variables):
    os.environ |= variables
    sys.argv = ["", str(folder)]
    exec(PLACES, {})


def test_srun_makes_one_job(tmp_path):
    """It made two jobs of one process. Its variables, in real processes."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    processes = [
        server.context().Process(
            target=follow_srun,
            args=(tmp_path, {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}),
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT * 3)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == JOINED


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")
def test_mpirun_makes_one_job(tmp_path):
    """It made two jobs of one process."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-c", PLACES, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT * 3, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == JOINED
