"""Jobs that cannot start, which rank is blamed, and what the user reads."""

import signal

import pytest

from smpc.errors import ConfigError
from smpc.launch.failure_report import RankFailure, describe
from smpc.launch.job import Job, default_num_ranks, launch
from smpc.launch.nodes import NodeOptions


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_jobs_that_cannot_start(script, tmp_path):
    for job, says in (
        (Job(script, num_ranks=0), "-n: expected at least 1 rank, found 0"),
        (Job(script, num_ranks=-3), "-n: expected at least 1 rank, found -3"),
        (Job("missing.py"), "script 'missing.py' does not exist"),
        (Job(str(tmp_path)), "is not a file"),
    ):
        with pytest.raises(ConfigError) as caught:
            launch(job)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        launch(Job("missing.py", num_ranks=0))
    assert len(str(caught.value).splitlines()) == 2


def _raised(rank, time, kind="ValueError", text="boom", status=1, classes=(), is_exit=False, exit_code=1):
    report = {
        "type": kind,
        "text": text,
        "time": time,
        "status": status,
        "smpc_classes": list(classes),
        "is_exit": is_exit,
        "py_callstack": f"Traceback (most recent call last):\n{kind}: {text}\n",
    }
    return RankFailure(rank, exit_code, int(time), report)


def _died(rank, observed, exit_code, forced=False):
    return RankFailure(rank, exit_code, observed, {}, forced)


def _refusal(script, **options):
    """The one line that a job with these options is refused with."""
    with pytest.raises(ConfigError) as caught:
        Job(script, **options).check({})
    (line,) = str(caught.value).splitlines()
    return line


def test_modes_that_cannot_be(script):
    assert _refusal(script, is_command=True, is_module=True).startswith("-c: expected no -m beside it")
    assert _refusal("no_such_program", is_command=True).startswith("-c: no program 'no_such_program' that can be run")
    assert _refusal(script, max_restarts=-1) == "--max-restarts: expected 0 to 1000, found -1"
    two = NodeOptions(num_nodes=2, node_rank=0, master_addr="a", master_port=1)
    assert _refusal(script, max_restarts=1, nodes=two).startswith("--max-restarts: expected a job of one node, found 2")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}, 1),
        ({"LOCAL_WORLD_SIZE": ""}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_how_many_ranks_by_default(environ, expected, monkeypatch):
    monkeypatch.setattr("smpc.launch.job._DEVICES", ())
    assert default_num_ranks(environ) == expected


def test_a_default_that_is_no_number():
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE: expected a whole number from 0"):
        default_num_ranks({"LOCAL_WORLD_SIZE": "x"})


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([_raised(0, 10.5), _raised(1, 10.4)], 1),  # the first exception
        (
            [_raised(0, 10.4, "PeerError", classes=["PeerError"]), _raised(1, 10.5)],
            1,
        ),  # not one that says: a peer did it
        ([_raised(0, 10.2), _died(1, 10, -signal.SIGKILL)], 1),  # a killed rank, before those that lost it
        ([_raised(0, 9.97), _died(1, 10, -signal.SIGSEGV)], 1),  # ... observed in the next second
        ([_raised(0, 10.2), _died(1, 10, 42)], 1),  # os._exit(42)
        ([_raised(0, 10.2, "RuntimeError", "[gloo] Connection closed by peer"), _died(1, 15, 42)], 1),  # seen late
        ([_raised(0, 10.2, "DistBackendError"), _raised(1, 10.4)], 1),
        ([_died(0, 10, -signal.SIGTERM, forced=True), _raised(1, 10.5)], 1),  # the launcher ends ranks with SIGTERM
        ([_raised(0, 10.2), _died(1, 10, -signal.SIGTERM)], 1),  # ... but here somebody else did
        ([_died(0, 10, -signal.SIGABRT), _raised(1, 10.5)], 1),  # nccl's watchdog aborts when a peer is gone
        ([_died(0, 40, -signal.SIGKILL), _raised(1, 10.5)], 1),  # killed by the launcher, for it ignored SIGTERM
        ([_raised(0, 10.3, exit_code=-15), _raised(1, 10.4)], 0),  # terminated while it was reporting
    ],
)
def test_cause_comes_before_consequence(failures, expected):
    assert min(failures, key=lambda failure: failure.order).rank == expected


def test_status_is_that_of_the_rank():
    assert _raised(0, 1.0, exit_code=-15).status == 1
    assert _died(0, 1, 42).status == 42
    assert _died(0, 1, -signal.SIGKILL).status == 137


def test_description_of_an_exception():
    failures = [
        _raised(1, 10.4),
        _died(0, 10, -signal.SIGTERM, forced=True),
        _raised(2, 10.6, "RuntimeError", "lost\nit"),
    ]
    assert describe(failures, 3) == (
        "smpc: error: rank 1 failed, which ended the other ranks:\n"
        "Traceback (most recent call last):\n"
        "ValueError: boom\n"
        "smpc: after that, rank 2 failed: RuntimeError: lost"
    )


def test_description_of_other_ends():
    assert describe([_died(0, 1, -signal.SIGKILL)], 1) == "smpc: error: rank 0 was killed by signal 9 (SIGKILL)"
    assert describe([_raised(1, 1.0, "SystemExit", "42", 42, is_exit=True)], 2) == (
        "smpc: error: rank 1 exited with status 42, which ended the other ranks"
    )


def test_users_mistakes_are_told_without_a_traceback():
    wrong = _raised(0, 1.0, "ConfigTypeError", "first\nsecond", 2, ["ConfigTypeError", "ConfigError", "SmpcError"])
    assert describe([wrong, _raised(1, 1.1)], 2) == "smpc: error: first\nsmpc: error: second"


@pytest.mark.parametrize("kind", ["PeerError", "TransportError"])
def test_a_rank_that_ended_with_status_0_is_named(kind):
    """sys.exit(0) in the middle of a step: what the others say is true, but that they failed is not what was wrong."""
    lost = _raised(0, 1.0, kind, "Connection closed by peer, which has ended", 1, [kind, "SmpcError"])
    told, _, rest = describe([lost], 2, [1]).partition("\n")
    assert told == "smpc: error: rank 1 ended with status 0 while rank 0 still needed its peers:"
    assert rest.startswith("Traceback")
    assert describe([lost], 2).startswith("smpc: error: rank 0 failed")
    assert describe([_raised(0, 1.0)], 2, [1]).startswith("smpc: error: rank 0 failed")


def test_names_in_errors_do_not_steer_the_terminal():
    text = describe([_raised(0, 10.5, text="no module \x1b[2J\r\x9b1m\u202e")], 1)
    assert "no module \\x1b[2J\\r\\x9b1m\\u202e" in text
    assert all(c.isprintable() or c == "\n" for c in text)
