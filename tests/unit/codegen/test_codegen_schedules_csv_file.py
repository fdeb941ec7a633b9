"""CSV files: what we write torch.distributed.pipelining accepts, and what it writes we read."""

import pytest
import torch.distributed.pipelining.schedules as theirs
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.codegen.program import Action
from smpc.codegen.schedules.csv_file import parse_csv, read_csv, to_csv
from smpc.codegen.schedules.named import choose
from smpc.codegen.simulate import Costs, chain
from smpc.errors import ConfigError

NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "list")


def built(name, p, m):
    choice = choose(p, m, schedule=name)
    num_stages = len(choice.placement)
    return choice, choice.build(chain(num_stages), Costs.uniform(num_stages))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 5), (4, 4), (4, 8)])
def test_torch_accepts_our_schedules(name, p, m):
    choice, schedule = built(name, p, m)
    rows = {
        rank: [theirs._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(to_csv(schedule).splitlines())
    }
    num_stages = len(choice.placement)
    mapping = theirs._validate_schedule(rows, p, num_stages, m)
    assert mapping == dict(enumerate(choice.placement))
    with_messages = theirs._add_send_recv(rows, lambda stage: mapping[stage], num_stages)
    theirs._simulate_comms_compute(with_messages, lambda stage: mapping[stage], num_stages)


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 6))
def test_a_schedule_survives_a_file(name, p, m):
    _, schedule = built(name, p, m)
    assert parse_csv(to_csv(schedule), "text") == schedule


def test_what_torch_writes():
    text = "0F0,,0F1,(0F2;0B0)OVERLAP_F_B,0I1,0W1,,0B2\n"
    (found,) = parse_csv(text, "text")
    assert [str(action) for action in found] == [
        "F s0 m0", "F s0 m1", "F s0 m2", "B s0 m0", "B s0 m1", "W s0 m1", "B s0 m2",
    ]  # fmt: skip
    communication = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
    assert parse_csv(communication, "text") == ((Action.parse("F s0 m0"), Action.parse("B s0 m0")),)


def test_everything_wrong_is_listed(tmp_path):
    with pytest.raises(ConfigError) as caught:
        parse_csv("0F0,F1,0W0\n1F0,1I0,0B0x\n", "some.csv")
    assert str(caught.value).splitlines() == [
        "schedule: some.csv, row 1, cell 2: expected an action such as 0F3, 0B3, 0I3 or 0W3, found 'F1'",
        "schedule: some.csv, row 2, cell 3: expected an action such as 0F3, 0B3, 0I3 or 0W3, found '0B0x'",
        "schedule: some.csv, row 1, cell 3: expected both parts of a split backward, found 0W0 without 0I0",
        "schedule: some.csv, row 2, cell 2: expected both parts of a split backward, found 1I0 without 1W0",
    ]
    with pytest.raises(ConfigError, match="expected a row of actions"):
        parse_csv("\n", "some.csv")
    with pytest.raises(ConfigError, match=r"none.csv: cannot read it: No such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "odd.csv").write_bytes(b"0F0,\xff")
    with pytest.raises(ConfigError, match="not UTF-8 text at byte 4"):
        read_csv(tmp_path / "odd.csv")
