"""`smpc run --report` and `--trace`: options that cannot be, what reaches the ranks, and what is made of what they leave."""

from __future__ import annotations

import json

import pytest

from smpc.cli.run import ObserveOptions, observed
from smpc.errors import ConfigError
from smpc.observe.observer import RankRecord, StepRecord
from smpc.observe.window import Observation, Window


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": "1:2"}, "--trace-steps: expected --trace or --report as well"),
        ({"trace": "here", "steps": "8:5"}, "--trace-steps: steps: expected FIRST:LAST"),
        ({"report": True, "steps": "x"}, "--trace-steps: steps: expected FIRST:LAST"),
        ({"trace": "a.txt"}, "--trace: expected a folder, found the file"),
        ({"report_to": "."}, "--report-to: expected the name of a file, found '.'"),
        ({"report_to": "no/where/at.txt"}, "--report-to: cannot write 'no/where/at.txt'"),
    ],
)
def test_options_that_cannot_be(tmp_path, monkeypatch, options, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match=text), observed(ObserveOptions(**options), is_first_node=True):
        pytest.fail("nothing starts")


def test_all_violations_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        ObserveOptions(report_to=".", trace=None, steps="3").check()
    assert len(str(caught.value).splitlines()) == 2


def test_what_reaches_the_ranks(tmp_path, capsys):
    with observed(ObserveOptions(), is_first_node=True) as variables:
        assert variables == {}
    with observed(ObserveOptions(trace=str(tmp_path / "t")), is_first_node=True) as variables:
        assert Observation.read(variables) == Observation(str(tmp_path / "t"), Window(2, 5))
    assert "no rank has left a record" in capsys.readouterr().err
    with observed(ObserveOptions(report=True, steps="5:8"), is_first_node=True) as variables:
        asked = Observation.read(variables)
        assert asked.window == Window(5, 8)


@pytest.mark.parametrize("is_first_node", [True, False])
def test_what_they_leave(tmp_path, capsys, is_first_node):
    """Files of an earlier job go, unless another node of this one may have written them."""
    steps = (StepRecord(2, True, 0, 1_000_000, 3_000_000, ()),)
    (tmp_path / "rank5.json").write_text(RankRecord(5, 0, 0, 6, steps).to_json())
    report = tmp_path / "report.txt"
    options = ObserveOptions(report=True, report_to=str(report), trace=str(tmp_path))
    with observed(options, is_first_node=is_first_node):
        (tmp_path / "rank0.json").write_text(RankRecord(0, 0, 0, 6, steps, 1024).to_json())
    shown = capsys.readouterr()
    assert "rank 0: step 2 ms (median of 1), peak 1.0 KiB" in shown.out
    assert report.read_text() == shown.out
    assert ("rank 5" in shown.out) == (not is_first_node)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["ranks"] == ([0] if is_first_node else [0, 5])
