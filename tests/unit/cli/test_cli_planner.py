"""`smpc compile` with a device, an optimizer and a memory limit: the same bytes every time, and one line for what is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from smpc.cli import main

FACTORY = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.extra = nn.Parameter(torch.zeros(extra))  # memory that takes no time

    def forward(self, x):
        return self.linear(x)

def build():
    return nn.Sequential(*(Layer(extra) for extra in (10000, 10000, 10000, 1, 1, 1))), torch.zeros(64, 16)
"""


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "planner_factory.py"
    path.write_text(FACTORY)
    return f"{path}:build"


@pytest.fixture
def compile_plan(target, capsys, monkeypatch):
    """Runs `smpc compile --json` in this process; returns status, plan (or None) and stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*options):
        try:
            status = main(["compile", target, "-p", "2", "-m", "4", "--memory-weight", "0", "--json", *options])
        except SystemExit as ended:
            status = ended.code
        out, err = capsys.readouterr()
        return status or 0, json.loads(out) if out else None, err

    return run


def peak(plan):
    return max(stage["peak_memory_bytes"] for stage in plan["stages"])


def test_the_optimizer_and_the_device_are_in_the_plan(compile_plan):
    _, plan, _ = compile_plan("--device", "a100", "--optimizer", "sgd")
    assert (plan["device"], plan["optimizer"]) == ("A100 SXM 80GB", "sgd")
    assert all(stage["optimizer_bytes"] == 0 for stage in plan["stages"])


def test_a_limit_moves_the_cut(compile_plan):
    _, free, _ = compile_plan()
    limit = int(0.8 * peak(free))
    status, plan, err = compile_plan("--memory-limit", str(limit))
    assert status == 0, err
    assert peak(plan) <= limit
    assert plan["assignment"] != free["assignment"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--memory-limit", "1KB"), "the least that would do is"),
        (("--memory-limit", "much"), "memory_limit: expected a size such as 80GB"),
        (("--device", "h10"), "did you mean 'h100'?"),
        (("--device", "nowhere.toml"), "device 'nowhere.toml': cannot read it"),
        (("--optimizer", "adamm"), "did you mean 'adam'?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(compile_plan, options, text):
    status, plan, err = compile_plan(*options)
    assert status != 0
    assert plan is None
    assert text in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.slow
def test_the_same_bytes_under_every_hash_seed(target, compile_plan):
    _, free, _ = compile_plan()
    limit = str(int(0.8 * peak(free)))
    script = "import sys; from smpc.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "compile", target, "-p", "2", "-m", "4", "--memory-weight", "0", "--json"]
    digests = set()
    for seed in ("0", "7"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [*command, "--memory-limit", limit], env=environment, capture_output=True, cwd="/", timeout=120
        )
        assert done.returncode == 0, done.stderr.decode()
        digests.add(hashlib.sha256(done.stdout).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_configuration_in_half_precision_is_planned_as_it_trains(target, tmp_path, capsys, precision):
    settings = tmp_path / "config.json"
    settings.write_text(f'{{"pipeline_parallel_degree": 2, "microbatches": 4, "{precision}": true}}')

    def run(*options):
        assert main(["compile", target, "--config", str(settings), *options]) == 0
        return capsys.readouterr().out

    elements = 3 * 10000 + 3 + 6 * (16 * 16 + 16)
    plan = json.loads(run("--json"))
    assert plan["optimizer"] == "adamw-fp32-master"
    totals = {key: sum(stage[key] for stage in plan["stages"]) for key in ("parameter_bytes", "optimizer_bytes")}
    assert totals == {"parameter_bytes": 2 * elements, "optimizer_bytes": 12 * elements}
    assert json.loads(run("--json", "--optimizer", "sgd"))["optimizer"] == "sgd"
    assert "adamw-fp32-master" in run()


def test_a_configuration_file_can_cut_by_hand(tmp_path, capsys):
    script = tmp_path / "by_hand.py"
    script.write_text(
        "import torch\nfrom torch import nn\nimport smpc.v1 as smp\n"
        "def build():\n"
        "    with smp.partition(1):\n        first = nn.Linear(4, 4)\n"
        "    return nn.Sequential(first, nn.Linear(4, 4)), torch.zeros(2, 4)\n"
    )
    settings = tmp_path / "config.json"
    settings.write_text('{"pipeline_parallel_degree": 2, "auto_partition": false, "default_partition": 0}')
    assert main(["compile", f"{script}:build", "--config", str(settings), "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [(stage["modules"], stage["rank"]) for stage in stages] == [(["0"], 1), (["1"], 0)]
