"""The process that `smpc run` starts for every rank: runs the user's script as `__main__` and reports its failure.

    python launch/worker.py LAUNCHER_PID SCRIPT [ARGUMENT ...]
    python launch/worker.py LAUNCHER_PID -m MODULE [ARGUMENT ...]

`smpc.launch.job` runs this file by path, so the script's environment is the one that `python SCRIPT` (`python -m MODULE`) would see: this
file imports nothing of smpc or torch before the script does, but for the finder of `smpc.aliasing` where SMPC_ALIAS asks for it, which
imports neither. It adds three things:

    - the rank dies with its launcher, even when that is killed with SIGKILL (Linux: PR_SET_PDEATHSIG), and what it has started dies, too:
      it tells the launcher's guard of its process group before the script runs;
    - an exception becomes a report, one JSON object in the file named by TORCHELASTIC_ERROR_FILE, in torch elastic's
      format plus the fields of `_worker_report`: the launcher learns which rank failed first, and shows that traceback alone;
    - a rank that has failed exits within GRACE_SECONDS, whatever its threads and exit handlers wait for.

A child that the script forks is no rank: how it ends is the script's business.

Under plain `torchrun`, or with no error file, none of this is used: scripts do not depend on it.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

GRACE_SECONDS = 3.0
LEFT = ".left"  # after the name of the error file: what is there when the script has ended with status 0
GUARD_VARIABLE = "SMPC_LAUNCH_GUARD"  # the descriptor of the pipe to the guard of `smpc.launch.processes`; the script does not see it
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PLAIN_HOOKS = ("sys", "torch.distributed.distributed_c10d")  # modules of exception hooks that only print


def main(launcher_pid: int, command: list[str]) -> int:
    """Run the script or module; the exit status of this rank."""
    _die_with(launcher_pid)
    _tell_guard()
    own_pid = os.getpid()
    try:
        _install_aliases()
        _run_script(command)
    except SystemExit as error:
        status = _exit_status(error)
        if os.getpid() == own_pid:
            if status:
                _write_report(_worker_report(error, status))
                _exit_soon(status)
            else:
                _tell_launcher_of_end()
        raise
    except BaseException as error:
        if os.getpid() != own_pid:
            raise
        try:
            return _report_failure(error)
        except BaseException as later:  # of a signal's handler, as torch has one for data loaders whose workers die
            return _report_failure(later)
    if os.getpid() == own_pid:
        _tell_launcher_of_end()
    return 0


def _report_failure(error: BaseException) -> int:
    """Report what ends this rank; its exit status."""
    status = _error_status(error)
    error.__traceback__ = _user_part(error.__traceback__)
    if getattr(sys.excepthook, "__module__", "") not in _PLAIN_HOOKS:  # a crash reporter, for instance
        sys.excepthook(type(error), error, error.__traceback__)
    if not _write_report(_worker_report(error, status)):
        traceback.print_exception(error)
    _exit_soon(status)
    return status


def _install_aliases() -> None:
    """With SMPC_ALIAS set, imports of the packages that it stands for give smpc (`smpc.aliasing`)."""
    if os.environ.get("SMPC_ALIAS", "").strip() not in ("", "0"):
        from smpc.aliasing import install

        install()


def _run_script(command: list[str]) -> None:
    """Runs the script or module in this process."""
    if command[0] == "-m":
        sys.argv = command[1:]
        _begin_path_with(os.getcwd())
        try:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        except ImportError as error:
            if _user_part(error.__traceback__) is not None:
                raise
            raise _NoModule(f"-m: {error}") from None
        return
    sys.argv = command
    _begin_path_with(str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


def _begin_path_with(folder: str) -> None:
    """Put the script's folder where this file's is. Under PYTHONSAFEPATH Python puts neither there."""
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        sys.path[0] = folder


class _NoModule(Exception):
    """The module to run does not exist, or is a package that cannot be run: the user's mistake, as smpc's ConfigError is."""


def write_report(headline: str, text: str, rank: int) -> bool:
    """Leave the report of global rank `rank`'s failure, which is not an exception of this process's script.

    For whoever ends the process from another thread. Returns whether there was a place for it.
    """
    extra = {
        "py_callstack": text,
        "timestamp": str(int(time.time())),
        "time": time.time(),
        "status": 1,
        "type": "",
        "text": headline,
        "smpc_classes": [],
        "is_exit": False,
        "rank": rank,
    }
    return _write_report({"message": {"message": headline, "extraInfo": extra}})


def _die_with(launcher_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher_pid:  # it died before the call above
            os.kill(os.getpid(), signal.SIGKILL)


def _tell_guard() -> None:
    """The pipe must be closed then: the guard waits for its last writer."""
    descriptor = os.environ.pop(GUARD_VARIABLE, "")
    if descriptor:
        with suppress(BrokenPipeError), open(int(descriptor), "w") as pipe:
            pipe.write(f"{os.getpgrp()}\n")


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _error_status(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 2 if _is_user_error(error) else 1


def _is_user_error(error: BaseException) -> bool:
    return isinstance(error, Exception) and "ConfigError" in _smpc_classes(error)


def _smpc_classes(error: BaseException) -> list[str]:
    # By name: importing smpc here would import torch, which may be what failed.
    if isinstance(error, _NoModule):
        return ["ConfigError"]
    return [cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "smpc.errors"]


def _user_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    own = (__file__, "<frozen runpy>", runpy.__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def _worker_report(error: BaseException, status: int) -> dict[str, Any]:
    """Fields beside torch's own: `time` in seconds with fractions, `status`, `smpc_classes`, `is_exit` (SystemExit).

    `rank` is the global rank at fault, this one's.
    """
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as broken:
        text = f"<{type(broken).__name__} while formatting it>"
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
        "time": time.time(),
        "status": status,
        "type": name,
        "text": text,
        "smpc_classes": _smpc_classes(error),
        "is_exit": isinstance(error, SystemExit),
        "rank": int(os.environ.get("RANK", "0")),
    }
    return {"message": {"message": f"{name}: {text}", "extraInfo": extra}}


def _write_report(report: dict[str, Any]) -> bool:
    """Writes the report of an error for the launcher; False if it does not ask for one, or it cannot be written."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    try:
        draft = f"{path}.draft"  # renamed when complete: the launcher never reads half a report
        Path(draft).write_text(json.dumps(report), encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        return False
    return True


def _tell_launcher_of_end() -> None:
    """Tell the launcher that the script has ended well: exit handlers may take so long that a peer misses this rank before it is gone."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with suppress(OSError):
            Path(f"{path}{LEFT}").touch()


def _exit_soon(status: int) -> None:
    # Exit handlers of a failed rank may wait for peers that wait for it.
    timer = threading.Timer(GRACE_SECONDS, os._exit, (status,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
