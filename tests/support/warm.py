"""The command `smpc` without the seconds in which it and every rank import torch: it is forked from the server, and forks its ranks.

    job = warm.Command("run", "-n", "2", script)      as `subprocess.Popen` of the command; its streams are files
    done = warm.run("run", "-n", "2", script)         as `subprocess.run`
    done = warm.python(script, timeout)               a script by itself, in a process with torch and smpc imported

Launcher, guard, pipes and store are the product's own. Only how a Python begins is replaced: flags and variables that an interpreter reads
as it starts have no effect, and scripts find torch and smpc imported. Tests of those start the command itself.
"""

import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path

import forked_launch
import server

from smpc.launch import job, processes
from smpc.launch.processes import Processes
from smpc.launch.rendezvous import Rendezvous

_all_forked = threading.Event()


class Command:
    """What tests use of a Popen."""

    def __init__(self, *arguments, cwd=None, env=None, main=None):
        """`main`: what is called with the arguments in place of the command, and gives the status."""
        folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, folder)
        self._streams = [folder / name for name in ("stdout", "stderr")]
        for path in self._streams:
            path.touch()
        given = (arguments, cwd or os.getcwd(), dict(os.environ if env is None else env), self._streams, main)
        self._process = server.context().Process(target=_main, args=given, daemon=True)  # it ends with the tests
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self._process.terminate()

    def communicate(self, timeout):
        self._process.join(timeout)
        texts = tuple(path.read_text() for path in self._streams)
        if self.poll() is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired("smpc", timeout, *texts)
        return texts


def run(*arguments, timeout, cwd=None, env=None, main=None):
    command = Command(*arguments, cwd=cwd, env=env, main=main)
    texts = command.communicate(timeout)
    return subprocess.CompletedProcess(arguments, command.returncode, *texts)


def python(script, timeout, env=None, arguments=()):
    return run(str(script), *arguments, timeout=timeout, env=env, main=_script)


def _script(arguments):
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _main(arguments, cwd, environment, streams, main):
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    multiprocessing.current_process()._config["daemon"] = False  # scripts may have children
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR is another one
    sys.argv = ["smpc", *arguments]
    job.Processes, job.Rendezvous = _Processes, _Rendezvous
    processes.subprocess = types.SimpleNamespace(Popen=_popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    if main is None:
        from smpc.cli import main
    forked_launch.end_with(lambda: main(list(arguments)))


class _Processes(Processes):
    """Lets the store begin when all ranks are forked."""

    def __init__(self, *arguments, **options):
        _all_forked.clear()
        super().__init__(*arguments, **options)

    def _wait(self, *arguments):
        _all_forked.set()
        super()._wait(*arguments)


class _Rendezvous(Rendezvous):
    """A rank that is forked while torch makes the store may find a lock of torch's held, by a thread that it does not have."""

    def _run(self):
        _all_forked.wait()
        super()._run()


def _popen(arguments, **options):
    is_rank = list(arguments[1:3]) == ["-u", str(job._WORKER)]
    return _Rank(arguments, **options) if is_rank else subprocess.Popen(arguments, **options)


class _Rank(forked_launch.ForkedProcess):
    """A rank that is forked from its launcher, with the streams that a Popen of these options has."""

    def __init__(self, arguments, env, stdin, stdout, stderr, **_):
        pipes = [os.pipe() if stream == subprocess.PIPE else None for stream in (stdout, stderr)]
        ends = {number: pipe[1] for number, pipe in enumerate(pipes, start=1) if pipe is not None}
        if stdin == subprocess.DEVNULL:
            ends[0] = os.open(os.devnull, os.O_RDONLY)
        super().__init__(arguments, env, ends)
        for end in ends.values():
            os.close(end)
        self.stdout, self.stderr = (None if pipe is None else os.fdopen(pipe[0], "rb") for pipe in pipes)
