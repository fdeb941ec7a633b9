"""Subcommands that are imported when they are called: what the list says of them, and what answers without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from smpc.cli.lazy import COMMANDS, load

SCRIPT = "import sys; from smpc.cli import main; status = main(sys.argv[1:]); print(status, 'torch' in sys.modules)"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_list_says_what_the_command_says(name):
    command = load(name)
    assert command.name == name
    assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name][2]


@pytest.mark.matrix(8)
@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "checkpoint"),
        ([], 0, "compile"),
        (["bogus"], 2, "No such command 'bogus'"),
        (["--bogus"], 2, "No such option: --bogus"),
        (["run"], 2, "Missing argument 'script'"),
        (["run", "--help"], 0, "--nproc"),
        (["diff", "x"], 2, "Missing argument 'B'"),
        (["simulate", "x", "--bogus"], 2, "No such option: --bogus"),
        (["checkpoint", "bogus"], 2, "No such command 'bogus'"),
        (["compile", "--bogus"], 2, "No such option: --bogus"),
        (["compile", "--help"], 0, "--microbatches"),
        (["compile"], 2, "Missing argument 'target'"),
        (["compile", "x.py:f"], 2, "-p/--pipeline-parallel-degree: required"),
        (["compile", "x.py:f", "-p", "0"], 2, "expected at least 1"),
        (["compile", "x.py:f", "-p", "2"], 2, "does not exist"),
        (["compile", "x.py:f", "-p", "2", "--device", "bogus"], 2, "device: expected one of"),
        (["compile", "x.py:f", "-p", "2", "--optimizer", "bogus"], 2, "optimizer: expected one of"),
        (["compile", "x.py:f", "-p", "2", "--schedule", "bogus"], 2, "schedule: expected one of"),
        (["compile", "x.py:f", "-p", "2", "--memory-limit", "bogus"], 2, "memory_limit: expected"),
        (["compile", "x.py:f", "-p", "2", "--tensor-parallel-plan", "bogus"], 2, "tensor_parallel_plan: expected"),
        (["compile", "x.py:f", "-p", "2", "-c", "2", "--context-parallel-layout", "bogus"], 2, "expected one of auto"),
        (["compile", "x.py:f", "-p", "2", "--input", "bogus"], 2, "--input 'bogus': expected NAME=DTYPE"),
        (["compile", "x.py:f", "--auto", "--world-size", "2", "-p", "2"], 2, "--auto: chooses these itself"),
        (["simulate", "no-such-plan"], 2, "cannot read it"),
        (["diff", "no-such-plan", "another"], 2, "cannot read it"),
    ],
)
def test_help_and_wrong_usage_need_no_torch(arguments, status, text):
    found = subprocess.run([sys.executable, "-P", "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    assert text.lower() in (found.stdout + found.stderr).lower()
    assert found.stdout.splitlines()[-1] == f"{status} False"
