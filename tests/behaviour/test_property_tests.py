"""How property tests draw their examples: the same ones in every run, others by a seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from locations import TESTS

DRAWS = """
from hypothesis import given, settings
from hypothesis import strategies as st

@settings(max_examples=20)
@given(st.integers())
def test_draws(number):
    with open("drawn", "a") as file:
        print(number, file=file)
"""


def drawn(folder, *arguments, seed=None):
    """What the test above draws in a process of its own, and what pytest prints."""
    (folder / "test_draws.py").write_text(DRAWS)
    (folder / "drawn").unlink(missing_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    environment.pop("SMPC_TEST_SEED", None)
    if seed is not None:
        environment["SMPC_TEST_SEED"] = seed
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "test_draws.py", *arguments]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    examples = (folder / "drawn").read_text() if (folder / "drawn").exists() else ""
    return examples, run.stdout + run.stderr


@pytest.mark.long
def test_the_same_examples_unless_a_seed_is_given(tmp_path):
    fixed, header = drawn(tmp_path)
    assert "examples: the same in every run" in header
    assert drawn(tmp_path)[0] == fixed != ""
    seven, header = drawn(tmp_path, seed="7")
    assert "SMPC_TEST_SEED=7 draws the same again" in header
    assert seven != fixed
    assert drawn(tmp_path, "--hypothesis-seed=7")[0] == seven


def test_a_seed_that_is_none(tmp_path):
    examples, text = drawn(tmp_path, seed="seven")
    assert not examples
    assert "SMPC_TEST_SEED: expected a whole number, found 'seven'" in text


def test_no_test_chooses_for_itself():
    """One that fixes its own examples draws nothing new in `make test-all`, one that does not could fail by chance."""
    others = [path for path in sorted(TESTS.rglob("*.py")) if path.name not in ("conftest.py", Path(__file__).name)]
    assert not [path.name for path in others if "derandomize" in path.read_text()]
