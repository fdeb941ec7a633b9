"""One rank of two fails: both processes are gone soon, and the first error is what they show."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from executor_harness import Launch, Stage, layer, microbatches, two_stage_program

from smpc.executor import FailureMonitor, Interpreter
from smpc.executor.transport import GlooTransport

LIMIT = 60.0  # seconds after the fault, on a loaded machine


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("bomb")


def explode():
    raise ArithmeticError("bomb")


def step(rank, folder, failing, place, lingers):
    """Train a step that succeeds, and one in which `failing` raises at `place` in microbatch 2."""
    store = dist.FileStore(str(folder / "failures"), 2)
    monitor = FailureMonitor(store, rank, 2, step_timeout=5.0 if place == "sleep" else 60.0)
    state = {"armed": False, "calls": 0}

    def spoiled(self, h):
        state["calls"] += 1
        if state["armed"] and rank == failing and state["calls"] == 7:
            moment(folder)
            if place == "forward":
                explode()
            if place == "backward":
                return (Bomb.apply(layer(self, h)[0]),)
            if place == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if place == "sleep":
                time.sleep(1000)
        return layer(self, h)

    def on_output(m, outputs):
        if state["armed"] and place == "on_output" and m == 2:
            moment(folder)
            explode()
        return [(outputs[0].sum(), None)]

    stage = Stage(spoiled, rank)
    interpreter = Interpreter(two_stage_program(rank), {rank: stage}, GlooTransport(dist.new_group()))
    for armed in (False, True, True):  # a rank that is done with the bad step notices in the next
        state["armed"] = armed
        try:
            with monitor.step(interpreter.where, interpreter.close, lambda: interpreter.position):
                interpreter.run(microbatches(0) if rank == 0 else None, on_output)
        except ArithmeticError:
            if lingers:
                time.sleep(1000)  # does not end by itself: the others must not wait for that
            raise


def moment(folder):
    (folder / "moment").write_text(str(time.time()))


def assert_stopped_in_time(folder):
    assert time.time() - float((folder / "moment").read_text()) < LIMIT


@pytest.mark.matrix(2)
@pytest.mark.parametrize("place", ["forward", "backward", "on_output"])
@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_stop_with_the_first_traceback(tmp_path, failing, place):
    if place == "on_output":
        failing = 1
    results = Launch(step, 2, tmp_path, failing, place, False).wait(120)
    assert_stopped_in_time(tmp_path)
    for status, log in results:
        assert status == 1, log
        assert "ArithmeticError: bomb" in log
        assert "microbatch 2" in log
        assert f"pipeline rank {failing}, instruction '{'B' if place == 'backward' else 'F'} s{failing} m2'" in log
    assert "PeerError: another rank failed first" in results[1 - failing][1]
    assert "PeerError" not in results[failing][1]


def test_a_peer_that_does_not_end_is_not_waited_for(tmp_path):
    launch = Launch(step, 2, tmp_path, 1, "forward", True)
    launch.processes[0].join(120)
    assert launch.processes[0].exitcode not in (None, 0)
    assert_stopped_in_time(tmp_path)
    launch.processes[1].kill()
    (_, log), _ = launch.wait(60)
    assert "PeerError: another rank failed first" in log


@pytest.mark.long
def test_a_killed_rank(tmp_path):
    results = Launch(step, 2, tmp_path, 1, "kill", False).wait(120)
    assert_stopped_in_time(tmp_path)
    assert results[1][0] == -signal.SIGKILL
    assert results[0][0] == 1
    assert "TransportError" in results[0][1]
    assert "pipeline rank 1" in results[0][1]


@pytest.mark.long
def test_a_stalled_rank_is_named(tmp_path):
    results = Launch(step, 2, tmp_path, 0, "sleep", False).wait(120)
    for status, log in results:
        assert status == 1, log
        assert "rank 0 stalled, nothing moved for 5 s: step 2, pipeline rank 0, instruction 'F s0 m2' (stage 0" in log
        assert "rank 1: step 2, pipeline rank 1, instruction 'RECV e1 m2 from r0' (edge 1, microbatch 2" in log
        assert "in spoiled" in log  # the stack


ENDS_WHILE_WATCHED = """
import datetime, threading
from torch.distributed import HashStore
from smpc.executor import FailureMonitor

asked, never = threading.Event(), HashStore()

class SlowStore:
    def check(self, keys):
        asked.set()
        try:
            never.wait(["never"], datetime.timedelta(milliseconds=1))  # native code, without Python's lock
        except RuntimeError:
            return False

monitor = FailureMonitor(SlowStore(), 0, 2, poll_interval=0.0)
asked.wait()
"""


@pytest.mark.long
def test_a_process_may_end_while_its_watcher_asks_the_store():
    """A rank whose script had ended well aborted now and then on a busy host ("terminate called without an active exception").

    The interpreter ended while the watcher was inside the store's native code. Python ends such a thread as it comes back for
    the lock, which C++ takes for an exception that nobody catches.
    """
    done = subprocess.run([sys.executable, "-P", "-c", ENDS_WHILE_WATCHED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
