"""The processes of a job on this host: starts them, waits for them, ends them.

    all run ----> one fails ----> the others end by themselves, told by the store ----> SIGTERM ----> SIGKILL
                                  LINGER_SECONDS                                         grace

A rank has failed when its worker has left a report, or its process has ended with another status than 0. Every rank leads a process group
of its own, and what it has started ends with it. A signal to the launcher is passed on to the ranks, which then have the grace; a second
one kills them.

A launcher that is killed with SIGKILL can do nothing: the kernel ends its ranks then (see `smpc.launch.worker`), and a guard, a small
process that waits for the end of a pipe from the launcher, ends their groups and removes the folder of their reports. The launcher tells it
of every rank, and every worker does so itself before the script's first line: the launcher may be killed before it comes to that.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from smpc.launch.failure_report import RankFailure, read_report
from smpc.launch.output import RankOutput
from smpc.launch.worker import GUARD_VARIABLE, LEFT

LINGER_SECONDS = 1.5
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_SECONDS = 0.03
_GUARD = """
import os, shutil, signal, sys
groups = []
for line in sys.stdin:
    if line == "done\\n":
        sys.exit()
    groups.append(int(line))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


@dataclass(frozen=True, slots=True)
class RankCommand:
    """How to start one rank. `place` has the fields of log templates; `report` is the file that the worker reports into.

    `is_worker`: it is `worker.py` that runs; a program without Python otherwise.
    """

    arguments: tuple[str, ...]
    is_worker: bool
    environment: Mapping[str, str]
    place: Mapping[str, int]
    report: Path


@dataclass(slots=True)
class _Rank:
    command: RankCommand
    process: subprocess.Popen[bytes]
    failure: RankFailure | None = None
    has_ended: bool = False
    left_early: bool = False  # with status 0, by itself


class Processes:
    """The ranks of this host. `inherit`: they have the launcher's own streams, `output` theirs otherwise. `log` gets starts and ends."""

    def __init__(
        self, output: RankOutput, *, inherit: bool, grace: float, log: Callable[[str], None] | None = None
    ) -> None:
        self._output, self._inherit, self._grace = output, inherit, grace
        self._log = log or _say_nothing
        self._ranks: list[_Rank] = []
        self._caught: list[int] = []
        self._first_failure: float | None = None
        self._terminated: float | None = None
        self._is_hastened = False
        self.signal: int | None = None  # the one that ended the job

    def run(
        self,
        commands: Sequence[RankCommand],
        is_over: Callable[[], bool],
        on_failure: Callable[[RankFailure], None],
    ) -> list[RankFailure]:
        """Start all and wait until all have ended; what failed. Inside `signals`.

        `is_over`: the job has failed elsewhere. `on_failure` gets the first failure.
        """
        with _start_guard(commands[0].report.parent) as watch:
            try:
                for command in commands:
                    self._start(command, watch)
                self._wait(is_over, on_failure)
            finally:
                self._kill()
        return [rank.failure for rank in self._ranks if rank.failure is not None]

    @property
    def left_early(self) -> list[int]:
        """The ranks that ended with status 0 by themselves, not in the end that a failure brings."""
        return [rank.command.place["rank"] for rank in self._ranks if rank.left_early]

    def _start(self, command: RankCommand, watch: _Guard) -> None:
        stream = None if self._inherit else subprocess.PIPE
        process = subprocess.Popen(
            command.arguments,
            env={**command.environment, **({GUARD_VARIABLE: str(watch.descriptor)} if command.is_worker else {})},
            pass_fds=(watch.descriptor,) if command.is_worker else (),
            stdin=None if self._inherit else subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        watch.tell(process.pid)
        self._ranks.append(_Rank(command, process))
        place = command.place
        self._log(
            f"rank {place['rank']} of {place['world_size']} (local rank {place['local_rank']} of {place['local_world_size']}, node "
            f"{place['node_rank']}) is process {process.pid}: {shlex.join(command.arguments)}"
        )
        self._output.attach((process.stdout, process.stderr), command.place)

    def _wait(self, is_over: Callable[[], bool], on_failure: Callable[[RankFailure], None]) -> None:
        while not all(rank.has_ended for rank in self._ranks):
            self._pass_signals_on()
            for rank in self._ranks:
                self._look(rank)
            failed = [rank.failure for rank in self._ranks if rank.failure is not None]
            now = time.monotonic()
            if self._first_failure is None and (failed or is_over()):
                self._first_failure = now
                if failed and self.signal is None:
                    on_failure(min(failed, key=lambda failure: failure.order))
            if (
                self._terminated is None
                and self._first_failure is not None
                and now > self._first_failure + LINGER_SECONDS
            ):
                self._terminate(signal.SIGTERM)
            if self._terminated is not None and now > self._terminated + self._grace:
                self._kill()
            time.sleep(_POLL_SECONDS)

    def _look(self, rank: _Rank) -> None:
        """Take note of a rank's end, or of the report that comes before it."""
        if rank.has_ended:
            return
        code = rank.process.poll()
        if code is None and rank.failure is not None:
            return
        report = read_report(rank.command.report)
        forced = self._terminated is not None
        has_left = rank.command.report.with_name(f"{rank.command.report.name}{LEFT}").exists()
        if report or (code and not (forced and has_left)):
            rank.failure = RankFailure(rank.command.place["rank"], code, time.time(), report, forced)
        if code is not None:
            rank.has_ended = True
            self._log(f"rank {rank.command.place['rank']} (process {rank.process.pid}) {_end_process(code)}")
            rank.left_early = rank.failure is None and (has_left or not forced)
            _kill_group(rank.process.pid)

    def has_signal(self) -> bool:
        """Whether a signal has ended the job, after its ranks too."""
        self._pass_signals_on()
        return self.signal is not None

    def is_hastened(self) -> bool:
        """Whether a signal has come after the failure, or another one after the first."""
        self._pass_signals_on()
        return self._is_hastened

    def _pass_signals_on(self) -> None:
        while self._caught:
            number = self._caught.pop(0)
            for rank in self._ranks:
                self._look(rank)  # at what was before the signal
            has_failed = self._first_failure is not None or any(rank.failure is not None for rank in self._ranks)
            self._is_hastened = has_failed or self.signal is not None
            if self.signal is not None or (has_failed and self._terminated is not None):
                self._kill()
                continue
            if not has_failed:  # or the job ends with its failure, only sooner
                self.signal = number
            self._terminate(number)

    def _terminate(self, number: int) -> None:
        self._terminated = time.monotonic()
        for rank in self._ranks:
            if not rank.has_ended:
                rank.process.send_signal(number)

    def _kill(self) -> None:
        for rank in self._ranks:
            if not rank.has_ended:
                _kill_group(rank.process.pid)
                rank.process.wait()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take note of signals to this process: `run` passes them on, and who waits after it asks `has_signal`."""

        def note(number: int, frame: FrameType | None) -> None:
            self._caught.append(number)

        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in SIGNALS if not (is_nohup and number == signal.SIGHUP)]
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _say_nothing(text: str) -> None:
    """The log of a launcher without `-v`."""


def _end_process(code: int) -> str:
    return f"ended with status {code}" if code >= 0 else f"was killed by signal {-code}"


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class _Guard:
    """Tells the guard, through its standard input."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.descriptor = stream.fileno()

    def tell(self, line: object) -> None:
        """The state of a process group, or "done"."""
        with suppress(BrokenPipeError):
            self._stream.write(f"{line}\n")
            self._stream.flush()


@contextmanager
def _start_guard(folder: Path) -> Iterator[_Guard]:
    """A process that kills the process groups it was told of, and removes the folder, when this process dies."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(folder)],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    stream = guard.stdin
    assert stream is not None, "it was asked for"
    told = _Guard(stream)
    try:
        yield told
    finally:
        told.tell("done")
        with suppress(BrokenPipeError):
            stream.close()
        guard.wait()
