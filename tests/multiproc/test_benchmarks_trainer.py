"""The Trainer's benchmark still runs, and what it compares has the same bits."""

import subprocess
import sys

import pytest
from locations import REPOSITORY


@pytest.mark.slow
def test_trainer_runs():
    done = subprocess.run(
        [sys.executable, "trainer.py", "--rounds", "1", "--batches", "2", "--width", "32"],
        cwd=REPOSITORY / "benchmarks", capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same bits: True") == 2
