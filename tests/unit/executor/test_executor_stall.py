"""Where ranks are when a job stalls, and which one is blamed."""

import itertools
import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from smpc.executor.failure import stall
from smpc.executor.failure.process_reports import FOREIGN, REPORT, ProcessReport, find, publish
from smpc.executor.failure.stall import (
    Activity,
    Standing,
    activity_of,
    find_stalled,
    frame_of,
    last_collectives,
    report_of,
    stack_of,
)


def standing(rank, activity, progress=(3, 5), seconds=10.0, **more):
    return Standing(rank, Activity(activity), f"place of {rank}", progress, seconds, **more)


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        # All wait for the one that computes, wherever it is in the list.
        ([standing(0, "waiting"), standing(1, "busy"), standing(2, "waiting")], 1),
        # A stopped process cannot answer.
        ([standing(0, "busy"), Standing(1, Activity.SILENT)], 1),
        # Replicas: one has reached the reduction, the other one has not.
        ([standing(0, "reducing", (3, 9)), standing(1, "busy", (3, 2)), standing(2, "waiting")], 1),
        ([standing(0, "reducing", (3, 9)), standing(1, "reducing", (3, 8)), standing(2, "waiting")], 1),
        # The rank that blocks in a collective of the user's own is further on than a replica that waits for it in its backward.
        ([standing(0, "reducing", (3, 4)), standing(1, "collective", (3, 9)), standing(2, "waiting")], 1),
        # A barrier in the middle of one rank's forward: it is not the collective of the program, in which the others wait for it.
        ([standing(0, "exchanging", seconds=11.0), standing(1, "collective")], 1),
        # Two that do something: the one that is behind.
        ([standing(0, "busy", (4, 0)), standing(1, "busy", (3, 7))], 1),
        # ... and at the same place, the one that has been there longer.
        ([standing(0, "busy", seconds=3.0), standing(1, "busy", seconds=9.0)], 1),
        # A barrier between steps, of ranks that are ahead, is no reason.
        ([standing(0, "collective", (3, 1 << 40)), standing(1, "collective", (3, 6))], 1),
    ],
)
def test_who_is_blamed(standings, expected):
    for order in itertools.permutations(standings):
        assert find_stalled(order).rank == expected


def test_the_report_names_place_and_stack():
    standings = [
        standing(0, "waiting"),
        standing(1, "busy", stack="  File x, line 1, in f\n", flight="gloo:all_reduce"),
    ]
    report = report_of(standings, 30.0)
    assert (report.rank, report.is_stall) == (1, True)
    assert str(report).splitlines() == [
        "rank 1 stalled, nothing moved for 30 s: place of 1, busy for 10 s:",
        "the ranks are at",
        "  rank 0: place of 0, waiting for 10 s",
        "  rank 1: place of 1, busy for 10 s",
        "the Python stack of rank 1, innermost call last",
        "  File x, line 1, in f",
        "last collectives of rank 1: gloo:all_reduce",
    ]
    silent = report_of([standing(0, "waiting"), Standing(1, Activity.SILENT)], 30.0)
    assert silent.headline.startswith("rank 1 stalled, nothing moved for 30 s: no answer")


def test_standings_survive_the_store():
    found = standing(2, "collective", (7, 1 << 40), 1.5, allowed=3.0, stack="s", flight="f")
    assert Standing.read(2, found.to_json().encode()) == found


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_junk_is_no_standing_and_no_report(payload):
    assert Standing.read(4, payload) == Standing(4, Activity.SILENT)
    report = ProcessReport.read(payload)
    assert report.rank == FOREIGN
    assert "no rank of the job wrote" in report.headline
    assert "\n" not in report.headline


@pytest.mark.parametrize("change", [{"rank": "1"}, {"headline": 3}, {"more": 1}, {"is_stall": None}, {"rank": 1.5}])
def test_a_report_has_the_right_fields_and_types(change):
    fields = {"rank": 1, "headline": "h", "text": "t", "is_stall": False}
    assert ProcessReport.read(json.dumps(fields).encode()) == ProcessReport(1, "h", "t")
    assert ProcessReport.read(json.dumps(fields | change).encode()).rank == FOREIGN


def test_the_first_report_counts():
    store = dist.HashStore()
    assert find(store) is None
    publish(store, ProcessReport(1, "first", "text"))
    publish(store, ProcessReport(2, "second"))
    assert find(store) == ProcessReport(1, "first", "text")
    store.set(REPORT, b"\x80\x04cos\nsystem\n")
    assert find(store).rank == FOREIGN


def _look(run, **options):
    """Activity and stack of a thread that runs this."""
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (run(ended), None), daemon=True)
    thread.start()
    time.sleep(0.2)
    frame = frame_of(thread.ident)
    found = activity_of(frame, options.get("waits", ()), options.get("reduces", False)), stack_of(frame)
    ended.set()
    thread.join()
    return found


def test_what_a_thread_does():
    activity, stack = _look(lambda ended: ended.wait(5))
    assert activity is Activity.BUSY
    assert "test_executor_stall.py" in stack
    code = compile("def run(ended): ended.acquire(True, 5)", dist.distributed_c10d.__file__, "exec")
    space = {}
    exec(code, space)

    def collective(ended):
        lock = threading.Lock()
        lock.acquire()
        threading.Timer(0.6, lock.release).start()
        space["run"](lock)

    assert _look(collective)[0] is Activity.COLLECTIVE
    assert _look(collective, waits=(__file__,))[0] is Activity.WAITING
    assert activity_of(None, (), False) is Activity.BUSY
    assert activity_of(sys._getframe(), (__file__,), False) is Activity.WAITING


@pytest.mark.parametrize(
    "name", ["collectives.py", "sequence/ring.py", "host_memory/shared_slots.py", "transport/rings.py"]
)
def test_a_collective_of_the_program_is_none_of_the_script(name):
    """Ring attention, whose waits are calls of C++ from its own file, was taken for a rank that computes."""
    path = Path(stall.__file__).parents[1] / name
    assert path.exists()
    inner, outer = {}, {}
    exec(compile("def run(find): return find()", dist.distributed_c10d.__file__, "exec"), inner)
    exec(compile("def run(call, find): return call(find)", str(path), "exec"), outer)

    def find():
        return activity_of(sys._getframe(1), (), False)

    assert outer["run"](lambda find: find(), find) is Activity.BUSY  # code of the model that the program calls
    assert outer["run"](inner["run"], find) is Activity.EXCHANGING
    assert inner["run"](find) is Activity.COLLECTIVE


@pytest.mark.parametrize(
    ("caller", "expected"), [("sequence/ring.py", Activity.EXCHANGING), ("transport/gloo.py", Activity.WAITING)]
)
def test_messages_through_memory_are_their_sender_s(caller, expected):
    """A rank in ring attention was taken for one that waits in its pipeline, and the other way round the wrong rank could be named."""
    calls = []
    for name in (caller, "transport/rings.py", "host_memory/shared_peers.py"):
        space = {}
        path = Path(stall.__file__).parents[1] / name
        exec(compile("def run(calls): return calls[0](calls[1:])", str(path), "exec"), space)
        calls.append(space["run"])
    assert calls[0]([*calls[1:], lambda _: activity_of(sys._getframe(1), (), False)]) is expected


def test_the_collectives_of_nccl_are_shown_beside_those_of_gloo(monkeypatch):
    """NCCL's have a recorder of their own; only the other one was asked, so that on GPUs nothing of what had stalled was seen."""

    def dump(name):
        entries = [
            {"profiling_name": f"{name}:{i}", "input_sizes": [[i]], "process_group": ["7", ""], "state": "started"}
            for i in range(5)
        ]
        return lambda include_collectives, only_active: json.dumps({"entries": entries}).encode()

    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", dump("gloo"))
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", dump("nccl"), raising=False)
    shown = last_collectives()
    assert shown.split("; ")[0] == "nccl:2 [[2]] in group 7, started"
    assert shown.split("; ")[-1] == "gloo:4 [[4]] in group 7, started"
    monkeypatch.delattr(c10d, "_dump_nccl_trace_json")
    assert "nccl" not in last_collectives()
