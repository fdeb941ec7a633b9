"""`smpc diff` as a user meets it: exit status, table, one clear line for whatever is wrong."""

import dataclasses
import json
import os

import pytest
from report_cases import HOSTILE, compilation

from smpc.cli import main
from smpc.partitioner.graph.plan import Plan


@pytest.fixture
def smpc(capsys):
    def smpc(*arguments):
        status = main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return smpc


@pytest.fixture
def plans(tmp_path, monkeypatch):
    """Files of two plans that differ, the second in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "a.json"
    first.write_text(compilation(3).plan.to_json())
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / "plan.json").write_text(compilation(2).plan.to_json())
    return "a.json", "b"


def test_equal_plans_print_nothing_and_exit_with_0(smpc, plans, tmp_path):
    copy = tmp_path / "copy.json"
    copy.write_text((tmp_path / "a.json").read_text())
    assert smpc("diff", plans[0], str(copy)) == (0, "", "")


def test_different_plans_are_a_table_and_exit_with_1(smpc, plans):
    status, out, err = smpc("diff", *plans)
    assert (status, err) == (1, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "a.json -> b"
    assert "plan stages 3 2 -33.3%" in lines
    assert any(line.startswith("schedule active microbatches") or "step time" in line for line in lines)
    assert "Modules Before After" in lines
    assert any(line.endswith("stage 2 stage 1") for line in lines)
    assert any(line.startswith("stage 2 rank 2, ") and line.endswith("- gone") for line in lines)
    assert any(line.startswith("edge 0 to 1 ") for line in lines)
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out
    assert HOSTILE in out


def test_one_number_is_one_row(smpc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = compilation(3).plan
    other = dataclasses.replace(
        plan, schedule=dataclasses.replace(plan.schedule, step_time=2 * plan.schedule.step_time)
    )
    for name, found in (("a", plan), ("b", other)):
        (tmp_path / f"{name}.json").write_text(found.to_json())
    status, out, _ = smpc("diff", "a.json", "b.json")
    assert status == 1
    assert len(out.splitlines()) == 5
    rows = [line.split() for line in out.splitlines()[-1:] if line.strip()]
    assert rows[0][:3] == ["schedule", "step", "time"]
    assert rows[0][-1] == "+100.0%"


def _edited(**changes):
    return json.dumps({**compilation(3).plan.to_dict(), **changes})


def _with_fingerprint(data):
    """The data with the fingerprint that goes with it: a forgery, not an accident."""
    data = {key: value for key, value in data.items() if key != "fingerprint"}
    stale = json.dumps({**data, "fingerprint": ""})
    try:
        Plan.from_json(stale)
    except ValueError as error:
        found = str(error).split("its fingerprint is ")[1].split(",")[0]
        return json.dumps({**data, "fingerprint": found})
    raise AssertionError


BAD = {
    "missing": (None, "cannot read it: No such file or directory"),
    "empty": (b"", "malformed JSON at line 1"),
    "no text": (b"\xff\xfe\x00", "not UTF-8 text at byte 0"),
    "other JSON": (b"[1, 2]", "expected a JSON object, found list"),
    "not a plan": (b'{"stages": 1}', "found other JSON"),
    "edited": (lambda: _edited(model_class="Other"), "plan.json was changed"),
    "another version": (lambda: _edited(version=99), "expected a plan of version 1, found version 99"),
    "wrong type": (lambda: _edited(model_class=3), "model_class: Input should be a valid string"),
    "wrong inner type": (
        lambda: _edited(stages=[{**compilation(3).plan.to_dict()["stages"][0], "rank": "x"}]),
        "stages.0.rank: Input should be a valid integer",
    ),
    "missing field": (
        lambda: json.dumps({k: v for k, v in compilation(3).plan.to_dict().items() if k != "objective"}),
        "objective: Field required",
    ),
    "unknown field": (lambda: _edited(more=1), "unexpected keyword argument 'more'"),
    "forged": (
        lambda: _with_fingerprint({**compilation(3).plan.to_dict(), "pipeline_parallel_degree": 2}),
        "stages.2: expected a rank from 0 to 1, found 2",
    ),
    "nothing": (
        lambda: _with_fingerprint({**compilation(3).plan.to_dict(), "stages": []}),
        "expected at least one stage, found none",
    ),
    "not a number": (lambda: _edited(memory_weight=float("nan")), "expected finite numbers, found nan"),
    "bottomless": (b"[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("command", [("diff", "{good}", "{bad}"), ("diff", "{bad}", "{good}"), ("simulate", "{bad}")])
def test_bad_plans_are_one_line_and_exit_with_2(smpc, plans, tmp_path, case, command):
    content, says = BAD[case]
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_bytes(content if isinstance(content, bytes) else content().encode())
    status, out, err = smpc(*(part.format(good=plans[0], bad=bad) for part in command))
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("smpc: error: ")
    assert says in line
    assert "bad.json" in line


def test_a_folder_without_a_plan_names_the_file(smpc, plans, tmp_path):
    status, _, err = smpc("diff", plans[0], str(tmp_path))
    assert status == 2
    assert str(tmp_path / "plan.json") in err


def test_a_path_that_is_no_utf8_works_and_is_shown_escaped(smpc, plans, tmp_path):
    odd = os.path.join(os.fsencode(tmp_path), b"\xff.json")
    name = os.fsdecode(odd)
    status, _, err = smpc("diff", plans[0], name)
    assert status == 2
    assert r"\udcff.json" in err
    with open(odd, "w") as file:
        file.write(compilation(2).plan.to_json())
    status, out, _ = smpc("diff", plans[0], name)
    assert status == 1
    assert r"\udcff.json" in out


@pytest.mark.parametrize("arguments", [("diff",), ("diff", "a.json"), ("diff", "a", "b", "c"), ("simulate",)])
def test_wrong_arguments(smpc, arguments):
    status, _, err = smpc(*arguments)
    assert status == 2
    assert len(err.splitlines()) == 1
