"""The failure monitor of a process whose script does unusual things: streams without a file, forked children."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from smpc.codegen.program import Instruction
from smpc.executor import FailureMonitor, Interpreter
from smpc.executor.failure.process_reports import find
from smpc.runtime import Runtime

# Forks a child for each, so that torch is imported once. The main thread of a child stalls; its watcher must end it.
STALLS = """
import os, sys, time
from torch.distributed import HashStore
from smpc.executor import FailureMonitor

class Log:
    def write(self, text):
        raise NotImplementedError

for spoil in (lambda: None, sys.stderr.close, lambda: setattr(sys, "stderr", None), lambda: setattr(sys, "stderr", Log())):
    child = os.fork()
    if child == 0:
        spoil()
        monitor = FailureMonitor(HashStore(), 0, 1, step_timeout=0.1, poll_interval=0.02)
        with monitor.watch(lambda: "a step", position=lambda: 0):
            time.sleep(20)
        os._exit(0)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.long
def test_a_stall_ends_whatever_stderr_is():
    """With sys.stderr = None the watcher used to die of a RuntimeError, and the job hung for ever."""
    done = subprocess.run([sys.executable, "-c", STALLS], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.count("status 1\n") == 4, done.stdout + done.stderr
    assert "rank 0 ends: rank 0 stalled" in done.stderr


def test_a_forked_child_does_not_end_the_step():
    """A child of the script that exits inside a step used to be reported to all ranks as this rank's failure."""
    store, closed = HashStore(), []
    monitor = FailureMonitor(store, 0, 1)
    try:
        own = os.getpid()
        monitor._pid = own + 1  # what a child sees
        with pytest.raises(SystemExit), monitor.step(lambda: "a step", lambda: closed.append(True)):
            sys.exit(3)
        assert find(store) is None
        assert not closed
        monitor._pid = own
        with pytest.raises(SystemExit), monitor.step(lambda: "a step", lambda: closed.append(True)):
            sys.exit(3)
        assert find(store) is not None
        assert closed
    finally:
        monitor.stop()


def test_the_watcher_looks_while_a_step_ends():
    """Between two looks of the watcher's thread the main thread may end the step: an IndexError or AttributeError ended the watcher."""
    interpreter, runtime = object.__new__(Interpreter), object.__new__(EndingRuntime)
    instruction = Instruction.parse("F s0 m0")
    interpreter.program = SimpleNamespace(rank=0)
    interpreter._position = 0
    interpreter._handlers = EndingHandlers(interpreter, [SimpleNamespace(instruction=instruction)])
    assert interpreter.where().startswith("pipeline rank 0, instruction")
    assert interpreter.where() == "pipeline rank 0, after the last instruction"
    runtime.looks = []
    assert (runtime.where(), runtime.where()) == ("running", "")
    runtime.looks = []
    assert (runtime.position(), runtime.position()) == (1, 0)


class EndingHandlers(list):
    """The step ends when their number is asked for."""

    def __init__(self, interpreter, handlers):
        super().__init__(handlers)
        self.interpreter = interpreter

    def __len__(self):
        self.interpreter._position = super().__len__()
        return super().__len__()


class EndingRuntime(Runtime):
    """The step has ended at the second look."""

    @property
    def _running(self):
        self.looks.append(True)
        return SimpleNamespace(where=lambda: "running", position=1) if len(self.looks) == 1 else None
