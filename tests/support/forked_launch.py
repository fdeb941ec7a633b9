"""`smpc run` without the seconds that every rank takes to import torch: ranks are forked from a process that has done so.

The launcher's own classes start, watch and end them, and serve the store; only `Popen` is replaced.
"""

import atexit
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from smpc.launch import worker
from smpc.launch.failure_report import describe, headline_of_failure
from smpc.launch.job import Job, _job_commands
from smpc.launch.output import OutputOptions, RankOutput
from smpc.launch.processes import Processes, _Rank
from smpc.launch.rendezvous import Failure, Rendezvous, listen
from smpc.places import LOOPBACK


class ForkedProcess:
    """What `Processes` needs of a Popen."""

    stdout = stderr = None

    def __init__(self, arguments, environment, streams):
        """The worker of these arguments. `streams`: by its number, what each stream that it does not have of this process is."""
        launcher = os.getpid()
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            end_with(lambda: _rank(arguments, environment, streams, launcher))

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def _rank(arguments, environment, streams, launcher):
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for number, stream in streams.items():
        os.dup2(stream, number)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
    sys.excepthook = sys.__excepthook__  # typer has another one in the launcher
    os.environ.clear()
    os.environ.update(environment)
    start = arguments.index(str(launcher))
    atexit._clear()  # what the launcher and its parent wanted
    try:
        return worker.main(launcher, list(arguments[start + 1 :]))
    finally:
        atexit._run_exitfuncs()


def end_with(run):
    """Ends the process with the status that `run` returns or exits with, and 1 after a traceback."""
    status = 1
    try:
        status = run()
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class ForkedProcesses(Processes):
    def __init__(self, folder, grace):
        output = RankOutput(OutputOptions(), sys.stdout, sys.stderr)
        super().__init__(output, inherit=True, grace=grace)
        self._folder = folder

    def _start(self, command, watch):
        log = os.open(self._folder / f"{command.place['rank']}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        process = ForkedProcess(command.arguments, command.environment, {1: log, 2: log})
        os.close(log)
        self._ranks.append(_Rank(command, process))


def run(job: Job, folder: Path):
    """Like `smpc.launch.job.launch`, for one node; (exit status, what it would print, port, ranks' process ids)."""
    place = job.check({})
    listener = listen(LOOPBACK, 0)
    port = listener.getsockname()[1]
    reports = folder / "reports"
    reports.mkdir()
    commands = _job_commands(job, place, port, reports)
    processes = ForkedProcesses(folder, job.grace)
    made = []

    def rendezvous():  # its threads begin when all ranks are forked
        if not made:
            place_in_job = (job.num_ranks, place.world_size, lambda: processes.left_early)
            made.append(Rendezvous(listener, LOOPBACK, port, *place_in_job))
        return made[0]

    def tell(failure):
        text = str(failure.report.get("py_callstack", ""))
        rendezvous().tell(Failure(failure.at_fault, headline_of_failure(failure), text, failure.status))

    failures = processes.run(commands, lambda: rendezvous().remote is not None, tell)
    ended = time.time()
    rendezvous().finish(3.0, lambda: None)
    failures.sort(key=lambda failure: failure.order)
    status = failures[0].status if failures else 0
    text = describe(failures, place.world_size, processes.left_early) if failures else ""
    return status, text, port, [rank.process.pid for rank in processes._ranks], ended
