"""The benchmarks still run; what they measure is for `make bench`."""

import subprocess
import sys

import pytest
from locations import REPOSITORY

LIMIT = 500  # seconds; a hang fails the test
FOLDER = REPOSITORY / "benchmarks"
PIPELINE = ["pipeline.py", "--steps", "1", "--sizes", "launch-bound", "--schedules", "1f1b", "zb-v"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [PIPELINE, ["interpreter.py"]], ids=lambda a: a[0])
def test_runs(arguments):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "us per microbatch and stage" in done.stdout


@pytest.mark.slow
def test_tensor_parallel_runs():
    done = subprocess.run(
        [sys.executable, "tensor_parallel.py", "--steps", "2", "--sizes", "launch-bound"],
        cwd=FOLDER, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("launch-bound") == 2


@pytest.mark.slow
def test_context_parallel_runs():
    done = subprocess.run(
        [sys.executable, "context_parallel.py", "--length", "128", "--rounds", "1", "--layers", "1"],
        cwd=FOLDER, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "work of ranks, zigzag: [4.0, 4.0]" in done.stdout


@pytest.mark.slow
def test_trace_time_runs():
    done = subprocess.run(
        [sys.executable, "trace_time.py", "--only", "lstm", "--runs", "1"],
        cwd=FOLDER, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "over 1 models that both record" in done.stdout


@pytest.mark.slow
def test_experts_run():
    done = subprocess.run(
        [sys.executable, "experts.py", "--steps", "2", "--sizes", "tiny"],
        cwd=FOLDER, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ratio") == 2
