"""What the ranks of a job know of each other before the first step."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import HashStore

from smpc.executor.failure.process_reports import SIGNATURE, Process, ProcessSignature, sign_process, signature
from smpc.executor.failure.stall import Activity, Standing, report_of
from smpc.executor.failure.start import Start, StartPhase


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-S", "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def of(pid):
    """The process as it would describe itself."""
    with open(f"/proc/{pid}/stat") as stat:
        born = int(stat.read().rpartition(")")[2].split()[19])
    return Process(pid, born, Process.own().host)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_fate_of_a_process(child):
    found = of(child.pid)
    assert (found.has_ended, found.fate) == (False, f"process {child.pid} lives, so native code holds Python's lock")
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert (found.has_ended, found.fate) == (False, f"process {child.pid} is stopped (by SIGSTOP, or a debugger)")
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (found.has_ended, found.fate) == (True, f"process {child.pid} has ended")
    child.wait()
    assert found.has_ended
    assert Process(os.getpid(), 1, Process.own().host).has_ended, "a later process of the same number is another one"
    elsewhere = Process(child.pid, found.born, "another host")
    assert (elsewhere.has_ended, elsewhere.fate) == (False, "")


@pytest.mark.parametrize(
    "payload", [b"", b"1", b"{}", b'{"process": 3, "place": ""}', b"[" * 5000, b"\x80\x04", b"\xff"]
)
def test_junk_is_no_signature(payload):
    store = HashStore()
    assert signature(store, 0) is None
    sign_process(store, 0, "in smp.init")
    assert signature(store, 0) == ProcessSignature(Process.own(), "in smp.init")
    store.set(f"{SIGNATURE}/0", payload)
    assert signature(store, 0) is None


def test_phases_are_told_at_once_and_only_go_on():
    store = HashStore()
    start = Start(store, 1, 10.0)

    def told():
        return signature(store, 1).place

    assert told() == "in smp.init"
    start.enter(StartPhase.MODEL)
    start.enter(StartPhase.SCRIPT)
    assert told() == "in smp.DistributedModel"
    start.enter(StartPhase.STEP, "recording the model")
    assert told() == "in its first step: recording the model"
    with start.within("smp.barrier(WORLD)", seconds=100.0):
        assert start.place == "in its first step: smp.barrier(WORLD)"
        assert 99.0 < start.allowed <= 100.0
    assert start.allowed == 0.0
    start.end()
    start.enter(StartPhase.STEP)
    assert told() == start.place == "after its first step"


def test_only_one_and_the_same_call_is_a_wait():
    """A rank that computes, or makes one call after another, is not late."""
    start, inside, done = Start(HashStore(), 0, 0.0), threading.Event(), threading.Event()
    waiting = threading.Thread(target=lambda: (inside.set(), done.wait()))
    waiting.start()
    inside.wait()
    now = time.monotonic() - 5.0
    try:
        for moment in (now, now + 1.0):
            start.look(blocked(waiting), True, moment)
            assert start.is_late
            assert start.waited >= 5.0, "since the first look"
        start.look(sys._getframe(), True, time.monotonic())
        assert start.waited < 1.0, "another call"
        start.look(blocked(waiting), False, now)
        assert (start.waited, start.is_late) == (0.0, False)
    finally:
        done.set()
        waiting.join()


def blocked(thread):
    """The frame of a thread, once it waits for good."""
    while True:
        frame = sys._current_frames()[thread.ident]
        if frame.f_code.co_name == "wait" and frame.f_back.f_code.co_name == "wait":
            return frame


def test_who_is_gone():
    store, ended = HashStore(), []
    start = Start(store, 0, 100.0, lambda: ended)
    assert start.all_gone() == []
    store.set("smpc/left", "2,x,,0,-1,\xb2,")
    ended.append(3)
    start.know({4: Process(os.getpid(), 1, Process.own().host), 5: Process.own()})
    assert start.all_gone() == [2, 3, 4]
    assert start.gone() == [], "this rank does not wait"
    start.look(sys._getframe(), True, time.monotonic() - 5.0)
    assert start.gone() == [2, 3, 4]
    assert start.gone() == [], "nor ask again at once"


def test_reports_of_the_start():
    standings = [
        Standing(0, Activity.COLLECTIVE, "there", stack="call 0"),
        Standing(1, Activity.WAITING, "here", stack="call 1"),
    ]
    text = str(report_of(standings, 30.0, key="start_timeout"))
    assert text.startswith("rank 0 stalled, nothing moved for 30 s (start_timeout): there")
    assert "every rank waits, so they wait in different calls" in text
    assert "call 0" in text
    assert "call 1" in text
    assert "raise start_timeout" in text
    silent = Standing(2, Activity.SILENT, "in smp.init", fate="process 5 has ended")
    report = report_of([*standings, silent], 5.0, gone=[2])
    assert (report.rank, report.headline) == (
        2,
        "rank 2 is gone, while all others wait: no answer; process 5 has ended; it was last in smp.init",
    )
