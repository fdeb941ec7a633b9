"""`smpc simulate` as a user meets it."""

import json

import pytest
from report_cases import compilation

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
def path(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(compilation(3).plan.to_json())
    return str(path)


def test_without_options_the_plan_comes_back_byte_for_byte(smpc, path):
    with open(path) as file:
        assert smpc("simulate", path, "--json") == (0, file.read(), "")


def test_more_microbatches_make_longer_steps_and_smaller_bubbles(smpc, path):
    before = compilation(3).plan.schedule
    status, out, _ = smpc("simulate", path, "--microbatches", "32", "--json")
    after = Plan.from_json(out).schedule
    assert status == 0
    assert after.num_microbatches == 32
    assert after.step_time > 4 * before.step_time
    assert after.bubble_fraction < before.bubble_fraction


def test_other_schedules(smpc, path):
    _, out, _ = smpc("simulate", path, "--pipeline", "simple", "-m", "8", "--json")
    assert [stage["num_in_flight"] for stage in json.loads(out)["stages"]] == [8, 8, 8]
    _, out, _ = smpc("simulate", path, "--active-microbatches", "1", "--json")
    assert [stage["num_in_flight"] for stage in json.loads(out)["stages"]] == [1, 1, 1]
    status, out, _ = smpc("simulate", path, "--schedule", "zb-h1", "-m", "8")
    assert status == 0
    assert "zb-h1, 8 microbatches" in out


def test_report_ends_with_before_and_after(smpc, path):
    status, out, err = smpc("simulate", path, "-m", "8")
    assert (status, err) == (0, "")
    assert out.startswith("Net: 3 stages on 3 ranks, 8 microbatches\n")
    rows = [line.split() for line in out.splitlines() if line.split()[1:2] == ["1F1B"]][-2:]
    assert [row[0] for row in rows] == ["plan", "here"]
    assert rows[0][1:6] == ["1F1B", "(SMP:", "interleaved),", "4", "microbatches,"]
    assert rows[1][1:6] == ["1F1B", "(SMP:", "interleaved),", "8", "microbatches,"]
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-m", "0"), "microbatches: expected at least 1, found 0"),
        (("-m", "x"), "Invalid value for '-m'"),
        (("--active-microbatches", "-3"), "active_microbatches: expected at least 1, found -3"),
        (("--pipeline", "simpel"), "did you mean 'simple'?"),
        (("--schedule", "zb-h9"), "did you mean 'zb-h"),
        (("--schedule", "zb-v"), "virtual_pipeline_degree"),
        (("--schedule", "missing.csv"), "missing.csv"),
    ],
)
def test_bad_settings_are_one_line(smpc, path, arguments, says):
    status, out, err = smpc("simulate", path, *arguments)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("smpc: error: ")
    assert says in line
