"""`smpc compile` with schedules by name, with several pieces per rank, and from a file."""

import json
import sys

import pytest

from smpc.cli import main
from smpc.codegen.program import Instruction

FACTORY = """
import torch
from torch import nn

def build():
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)]), torch.zeros(8, 16)
"""


@pytest.fixture
def compiled(monkeypatch, tmp_path, capsys):
    """Runs `smpc compile` with the options given; (exit code, plan, ops of rank 0's program, stderr)."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "scheduled_factory.py").write_text(FACTORY)

    def run(*options):
        out = tmp_path / "out"
        target = f"{tmp_path / 'scheduled_factory.py'}:build"
        code = main(["compile", target, "-p", "2", "-m", "4", "--out", str(out), *options])
        error = capsys.readouterr().err
        if code:
            return code, None, None, error
        text = (out / "rank_0.py").read_text().partition("INSTRUCTIONS = (")[2]
        ops = [Instruction.parse(line.strip(' ",')).op for line in text.splitlines() if '"' in line]
        return code, json.loads((out / "plan.json").read_text()), ops, error

    return run


@pytest.mark.parametrize(
    ("options", "name", "ranks", "num_weights"),
    [
        (["--virtual-pipeline-degree", "2"], "interleaved-1f1b", [0, 1, 0, 1], 0),
        (["-v", "3", "--schedule", "1f1b"], "interleaved", [0, 1, 0, 1, 0, 1], 0),
        (["--schedule", "zb-h1"], "zb-h1", [0, 1], 4),
        (["--schedule", "zb-v"], "zb-v", [0, 1, 1, 0], 8),
        (["--schedule", "list"], "list", [0, 1], 4),
    ],
)
def test_named(compiled, options, name, ranks, num_weights):
    code, plan, ops, _ = compiled(*options)
    assert code == 0
    assert plan["schedule"]["name"] == name
    assert [stage["rank"] for stage in plan["stages"]] == ranks
    assert plan["pipeline_parallel_degree"] == 2
    assert ops.count("W") == num_weights


def test_from_a_file(compiled, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0F2,0F3,0B0,0B1,0I2,0B3,0W2\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    code, _, _, error = compiled("--schedule", str(path))
    assert code != 0
    assert "W s0 m2 comes after microbatch 3; expected ascending order" in error
    path.write_text(path.read_text().replace("0I2,0B3,0W2", "0I2,0W2,0B3"))
    code, plan, ops, _ = compiled("--schedule", str(path))
    assert (code, plan["schedule"]["name"], ops.count("W")) == (0, str(path), 1)


def test_what_cannot_be(compiled):
    assert "virtual_pipeline_degree: expected 2 for the zb-v schedule" in compiled("--schedule", "zb-v", "-v", "1")[3]
    assert "schedule: expected one of gpipe, 1f1b" in compiled("--schedule", "zb")[3]
