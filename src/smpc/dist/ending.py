"""The end of a process that has process groups: no thread of theirs may still run when Python takes itself down.

gloo runs a collective call in a thread of its own. The call may return before that thread has released the tensors; if it is the last
owner, it needs Python to free them. On a loaded machine, a process may end in between: Python is then gone, and the process aborts with
SIGABRT instead of status 0. So the process waits until those threads sleep.

    sleeping    two readings of /proc say so, and that it was never awake in between. A thread that waits for Python is awake while
                Reading /proc releases Python's lock.

`destroy_process_group` ends the threads of groups that nothing else refers to; device meshes and sharded models keep theirs.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # torch's own name for them
_THREADS = Path("/proc/self/task")
_POLL_SECONDS = 0.001
_MOST_SECONDS = 60.0


@functools.cache
def watch_end() -> None:
    """Have this process wait at its end for the threads of its process groups. Once is enough."""
    atexit.register(await_sleep)


def await_sleep(seconds: float = _MOST_SECONDS) -> bool:
    """Wait until the threads of gloo sleep, at most so long; whether they do. True where there is no /proc."""
    limit = time.monotonic() + seconds
    before = None
    while time.monotonic() < limit:
        now = _switches()
        if now is not None and now == before:
            return True
        before = now
        time.sleep(_POLL_SECONDS)
    return False


def _switches() -> dict[str, str] | None:
    """How often each of them has gone to sleep, by its number; None, if one is awake."""
    found = {}
    for thread in sorted(os.listdir(_THREADS)) if _THREADS.is_dir() else ():
        try:
            lines = (_THREADS / thread / "status").read_text(encoding="utf-8").splitlines()
        except OSError:  # it has ended
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] != _NAME:
            continue
        if not status["State"].startswith("S"):
            return None
        found[thread] = status["voluntary_ctxt_switches"]
    return found
