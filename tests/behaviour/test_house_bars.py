"""How long the ways through the house are, see benchmarks/house.py: whoever makes them longer sees it here.

At most 25 files and 130 functions of rank 0 in a steady step of a pipeline: decisions 83 and 198.
"""

import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[2] / "benchmarks" / "house.py"


@pytest.fixture(scope="module")
def rows():
    """The benchmark's table, by row."""
    done = subprocess.run([sys.executable, HOUSE], capture_output=True, text=True, check=True, timeout=300)
    return {line[:42].strip(): line[42:].strip() for line in done.stdout.splitlines()}


@pytest.mark.long
def test_a_step(rows):
    files, functions, _ = (int(part.split()[0]) for part in rows["a steady training step, rank 0"].split(", "))
    assert files <= 25
    assert functions <= 130
