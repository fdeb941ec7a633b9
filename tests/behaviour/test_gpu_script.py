"""The script for one GPU: without one it says so, and its report has every part as it ended."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
import warm
from locations import REPOSITORY

PATH = REPOSITORY / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_script", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_without_a_gpu_one_line_and_status_2():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = warm.python(PATH, 240)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.splitlines() == ["make gpu: expected a CUDA device, found none; run it on a machine with a GPU"]


def test_the_report_has_every_part_as_it_ended(script, tmp_path):
    python = (sys.executable, "-P", "-c")
    parts = (
        script.Part("Good", (*python, "print('all is well')"), 60),
        script.Part("Bad", (*python, "raise SystemExit(3)"), 60),
        script.Part("Slow", (*python, "import time; print('begun', flush=True); time.sleep(600)"), 2),
    )
    report = tmp_path / "report.md"
    assert not script.write(report, parts, 120.0)
    text = report.read_text()
    assert "## Good\n\nok" in text
    assert "all is well" in text
    assert "## Bad\n\nexit status 3" in text
    assert "## Slow\n\nnot done in its time" in text
    assert script.write(report, parts[:1], 120.0)


def test_what_no_time_is_left_for_is_said(script, tmp_path):
    report = tmp_path / "report.md"
    assert not script.write(report, (script.Part("Late", ("false",), 60),), 0.0)
    assert "the time is up" in report.read_text()


def test_every_part_names_a_file_that_is_there(script):
    for part in script.PARTS:
        for word in part.command:
            if word.startswith(("benchmarks/", "tests/")):
                assert (REPOSITORY / word).exists()
