"""Names of schedules, their placements, and files."""

import pytest

from smpc.codegen.program import peaks
from smpc.codegen.schedules.csv_file import to_csv
from smpc.codegen.schedules.named import NAMES, Choice, choose
from smpc.codegen.simulate import Costs, chain, simulate
from smpc.config import SCHEDULES
from smpc.errors import ConfigError, ScheduleError


def build(choice):
    num_stages = len(choice.placement)
    return choice.build(chain(num_stages), Costs.uniform(num_stages))


def test_the_configuration_knows_the_same_names():
    assert SCHEDULES == NAMES


@pytest.mark.parametrize(
    ("settings", "name", "placement", "active"),
    [
        ({}, "interleaved", (0, 1, 2), 5),
        ({"pipeline": "simple"}, "simple", (0, 1, 2), 5),
        ({"pipeline": "simple", "num_pieces": 2}, "simple", (0, 1, 2, 0, 1, 2), 5),
        ({"num_pieces": 2}, "interleaved-1f1b", (0, 1, 2, 0, 1, 2), 5),
        ({"num_pieces": 1, "active_microbatches": 2}, "interleaved", (0, 1, 2), 2),
        ({"schedule": "1f1b", "num_pieces": 2}, "interleaved", (0, 1, 2, 0, 1, 2), 5),
        ({"schedule": "gpipe", "active_microbatches": 99}, "simple", (0, 1, 2), 6),
        ({"schedule": "interleaved-1f1b"}, "interleaved-1f1b", (0, 1, 2, 0, 1, 2), 5),
        ({"schedule": "zb-v"}, "zb-v", (0, 1, 2, 2, 1, 0), 5),
        ({"schedule": "zb-h1", "pipeline": "simple"}, "zb-h1", (0, 1, 2), 5),
        ({"schedule": "list", "num_pieces": 2}, "list", (0, 1, 2, 2, 1, 0), 5),
        ({"schedule": "list", "num_pieces": 3}, "list", (0, 0, 1, 1, 2, 2, 2, 1, 0), 5),
        ({"schedule": "list", "num_pieces": 4}, "list", (0, 1, 2, 2, 1, 0) * 2, 5),
    ],
)
def test_what_the_settings_choose(settings, name, placement, active):
    choice = choose(3, 6, **settings)
    assert choice == Choice(name, placement, 6, active)
    assert all(
        found <= bound for found, bound in zip(peaks(build(choice), len(placement)), choice.in_flight, strict=True)
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"schedule": "zb-h"}, "schedule: expected one of 'gpipe', .*, found 'zb-h'; did you mean 'zb-h"),
        ({"pipeline": "zb-h1"}, "pipeline: expected one of 'interleaved', 'simple', found 'zb-h1'"),
        ({"schedule": "zb-v", "num_pieces": 1}, "virtual_pipeline_degree: expected 2 for the zb-v schedule, found 1"),
        ({"schedule": "interleaved-1f1b", "num_pieces": 1}, "expected at least 2 for the interleaved-1f1b"),
        ({"schedule": "zb-h2", "num_pieces": 2}, "expected 1 for the zb-h2 schedule, found 2"),
    ],
)
def test_settings_that_cannot_be(settings, says):
    with pytest.raises(ConfigError, match=says):
        choose(2, 4, **settings)


def test_the_list_scheduler_runs_where_the_named_ones_do_not():
    choice = Choice("list", (1, 2, 1, 0), 4, 6)
    schedule = build(choice)
    assert simulate(schedule, chain(4), Costs.uniform(4)).makespan <= simulate(
        build(Choice("interleaved", (1, 2, 1, 0), 4, 6)), chain(4), Costs.uniform(4)
    ).makespan  # fmt: skip
    with pytest.raises(ScheduleError, match=r"zb-h1 schedule needs stages on ranks \(0, 1, 2\), found \(1, 2, 1, 0\)"):
        build(Choice("zb-h1", (1, 2, 1, 0), 4, 6))
    with pytest.raises(ConfigError, match="found 'gpipe'"):
        Choice("gpipe", (0, 1), 2, 2)


def test_a_file(tmp_path):
    path = tmp_path / "mine.csv"
    expected = build(choose(2, 4, schedule="zb-v"))
    path.write_text(to_csv(expected))
    choice = choose(2, 4, schedule=str(path))
    assert choice.placement == (0, 1, 1, 0)
    assert build(choice) == expected
    assert choice.in_flight == choose(2, 4, schedule="zb-v").in_flight
    assert choose(2, 4, schedule=str(path), num_pieces=2) == choice
    with pytest.raises(ConfigError, match=r"1 on 2 ranks needs 2 stages, but .* has 4; leave it out"):
        choose(2, 4, schedule=str(path), num_pieces=1)
    with pytest.raises(ConfigError) as caught:
        choose(3, 5, schedule=str(path))
    assert str(caught.value).splitlines() == [
        f"schedule: {path}: expected a row for each of 3 pipeline ranks, found 2",
        f"schedule: {path}: expected 5 microbatches, found 4",
    ]
    path.write_text("0F0,0B0,1F0\n1B0,3F0,3B0\n")
    with pytest.raises(ConfigError) as caught:
        choose(2, 1, schedule=str(path))
    assert str(caught.value).splitlines() == [
        f"schedule: {path}: expected the stages [0, 1, 2, 3], found [0, 1, 3]",
        f"schedule: {path}: expected stage 1 in row 2 alone, where it is found too",
    ]
