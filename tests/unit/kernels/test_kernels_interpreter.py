"""Runs tests/kernels in a process with Triton's interpreter switched on; see the conftest there."""

import os
import subprocess
import sys

import pytest
from locations import TESTS

FOLDER = TESTS / "kernels"


def check_folder(marks: str, timeout: float) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, str(FOLDER)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=FOLDER.parents[1], check=False
    )
    assert child.returncode == 0, child.stdout[-8000:] + child.stderr[-2000:]
    assert " passed" in child.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    check_folder("not slow", timeout=880)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kernels_in_the_interpreter_exhaustively():
    pytest.importorskip("triton")
    check_folder("slow", timeout=3500)
