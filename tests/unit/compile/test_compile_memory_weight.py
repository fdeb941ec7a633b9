"""What is planned where nobody weighs memory: the fastest plan that fits the device, and what is said where none does."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

import smpc
from smpc.cli.app import main
from smpc.partitioner.costs.device_file import find_device

SETTINGS = {"pipeline_parallel_degree": 2, "microbatches": 4}
TABLE = 40_000


class Lopsided(nn.Module):
    """A large table that costs no time, then layers that all take as long: balanced time and balanced memory are far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TABLE, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def planned(**options):
    with torch.device("meta"):
        model, ids = Lopsided(), torch.zeros(64, 512, dtype=torch.long)
    return smpc.partition(model, ids, **SETTINGS, **options)


def peaks(plan):
    return [stage.peak_memory_bytes for stage in plan.stages]


def h100(memory):
    return dataclasses.replace(find_device("h100"), memory_bytes=memory)


def test_the_fastest_plan_that_fits_is_the_default():
    default = planned()
    assert default.to_json() == planned(memory_weight=0.0).to_json()
    assert default.objective.memory_weight == 0.0
    assert max(peaks(default)) > max(peaks(planned(memory_weight=0.8)))


def test_where_the_fastest_does_not_fit_the_fastest_within_is_taken_and_said():
    fastest, least = planned(), planned(memory_weight=1.0)
    room = (max(peaks(fastest)) + max(peaks(least))) // 2
    found = planned(device=h100(room))
    assert max(peaks(found)) <= room < max(peaks(fastest))
    assert "the fastest plan needs" in found.objective.note
    assert "the fastest found that fits" in found.objective.note
    asked = planned(device=h100(room), memory_weight=0.0)
    assert max(peaks(asked)) == max(peaks(fastest))


def test_where_nothing_fits_memory_is_balanced_and_the_least_said():
    least = planned(memory_weight=1.0)
    found = planned(device=h100(TABLE * 64))
    assert found.assignment == least.assignment
    assert found.objective.memory_weight == 1.0
    assert "no plan fits: the least memory is" in found.objective.note
    with pytest.raises(smpc.errors.MemoryLimitError, match="expected a plan within"):
        planned(memory_limit=TABLE * 64)


def test_a_configuration_keeps_its_own_default(tmp_path, capsys):
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def build():\n    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.zeros(4, 8)\n"
    )
    (tmp_path / "smp.json").write_text(json.dumps({"pipeline_parallel_degree": 2, "microbatches": 2}))
    target, found = f"{tmp_path}/model.py:build", []
    for more in (["-p", "2", "-m", "2"], ["--config", f"{tmp_path}/smp.json"], ["-p", "2", "--memory-weight", "0.4"]):
        assert main(["compile", target, "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["objective"]["memory_weight"])
    assert found == [0.0, 0.8, 0.4]
