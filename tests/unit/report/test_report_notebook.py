"""A plan of `smpc.partition` in a notebook, as text, on disk; equal to the plan of a compilation."""

import copy
import html
import pickle
import re

import pytest
import torch
from documented import blocks
from torch import nn

import smpc
from smpc.errors import ConfigError, ConfigTypeError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, x):
        return self.layers(x)


OPTIONS = {"pipeline_parallel_degree": 2, "microbatches": 4}


@pytest.fixture(scope="module")
def plan():
    return smpc.partition(Net(), torch.zeros(8, 64), **OPTIONS)


def test_it_is_the_plan(plan):
    expected = smpc.compile_model(Net(), torch.zeros(8, 64), **OPTIONS).plan
    assert plan == expected
    assert expected == plan
    assert hash(plan) == hash(expected)
    assert plan.to_json() == expected.to_json()
    for copied in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), smpc.Plan.from_json(plan.to_json())):
        assert copied == plan
    assert plan != smpc.partition(Net(), torch.zeros(8, 64), pipeline_parallel_degree=3, microbatches=4)


def test_its_repr_has_five_lines(plan):
    lines = repr(plan).splitlines()
    assert len(lines) == 5
    assert lines[0] == f"Plan of Net, {plan.fingerprint[:16]}"
    assert lines[1].startswith("  2 stages on 2 ranks: layers")
    assert all(len(line) < 120 for line in lines)


def test_a_cell_shows_the_page_and_loads_nothing(plan):
    cell = plan._repr_html_()
    assert re.findall(r"<(\w+)", cell) == ["iframe"]
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', cell)[1])
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=[\"']?https?:", page)
    assert "Net" in page


def test_it_prints_and_explains_itself(plan, capsys):
    plan.show()
    shown, said = capsys.readouterr().out, plan.explain()
    assert "rank 0" in shown
    assert "rank 1" in shown
    for label, value in (("Objective", f"gap {plan.objective.gap:.2%}"), ("Schedule", "4 microbatches"), ("Plan", "")):
        assert any(line.startswith(f"{label}:") and value in line for line in said.splitlines()), label


def test_it_saves_what_the_command_writes(plan, tmp_path):
    plan.save(tmp_path / "plan")
    names = {path.name for path in (tmp_path / "plan").iterdir()}
    assert names == {"plan.json", "report.html", "timeline.json", "schedule.txt", "rank_0.py", "rank_1.py"}
    assert smpc.Plan.from_json((tmp_path / "plan" / "plan.json").read_text()) == plan
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"plan.save: .*file"):
        plan.save(tmp_path / "file" / "below")
    with pytest.raises(ConfigTypeError, match="expected the name of a folder"):
        plan.save(3)


def test_the_page_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec("\n".join(blocks("reports.md")), names)
    assert (tmp_path / "plan" / "report.html").is_file()
    assert names["plan"].explain() in capsys.readouterr().out
