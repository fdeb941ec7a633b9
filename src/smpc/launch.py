"""Starts the ranks of a job on this host: what `smpc run` does.

    launch(Job("train.py", ("--steps", "10"), num_ranks=2)) -> exit status

Every rank is a process that runs the script with the environment that `torchrun` would give it (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, ...), under torch's own elastic agent: the same script runs under plain `torchrun`.
What differs:

    - nothing listens outside loopback. `torchrun` opens its store on every interface, whatever MASTER_ADDR says;
      here the store takes over a socket that is already bound to 127.0.0.1, on a port that the system chose, so jobs
      do not collide. gloo and nccl are pointed to the loopback interface, unless GLOO_SOCKET_IFNAME or
      NCCL_SOCKET_IFNAME is set;
    - when a rank fails, all end, with the processes that they started, and the traceback shown is that of the rank that
      failed first;
    - the status is that rank's: its own exit status, or 128 + the number of the signal that killed it. SIGTERM, SIGINT,
      SIGHUP and SIGQUIT to the launcher are passed on, and the status is 128 + the signal;
    - a ConfigError that ends a rank is the user's mistake: its text, a line each, no traceback, status 2;
    - ranks die with the launcher, also when it is killed with SIGKILL.

OMP_NUM_THREADS is 1 when it is not set and there is more than one rank, as with `torchrun`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smpc.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_WORKER = Path(__file__).with_name("launch_worker.py")
_STOP_SECONDS = 5  # a rank that a signal was passed on to has this long before SIGKILL


@dataclass(frozen=True, slots=True)
class Job:
    """A script, its arguments, and how many ranks run it."""

    script: str
    arguments: tuple[str, ...] = ()
    num_ranks: int = 1

    def check(self) -> None:
        """Raise ConfigError for a job that cannot start, all violations together. Nothing has been started then."""
        violations = []
        if self.num_ranks < 1:
            violations.append(f"-n: expected at least 1 rank, found {self.num_ranks}")
        if not os.path.exists(self.script):
            violations.append(f"script {self.script!r} does not exist (looked in {os.getcwd()})")
        elif not os.path.isfile(self.script):
            violations.append(f"script {self.script!r} is not a file")
        elif not os.access(self.script, os.R_OK):
            violations.append(f"script {self.script!r} is not readable")
        if not violations:
            violations += _device_violations(self.num_ranks)
        if violations:
            raise ConfigError("\n".join(violations))


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank ended. `report` has the fields that the worker wrote; it is empty when the process just died."""

    rank: int
    exit_code: int  # negative: killed by that signal
    observed: float  # seconds since the epoch
    report: Mapping[str, Any]

    @property
    def status(self) -> int:
        """The exit status that tells this failure."""
        if self.report:
            return int(self.report["status"])
        return self.exit_code if self.exit_code > 0 else 128 - self.exit_code

    @property
    def order(self) -> tuple[int, float, int]:
        """Failures sort by cause first, consequences last."""
        if self.report:
            return (2 if "PeerError" in self.report["smpc_classes"] else 0, self.report["time"], self.rank)
        # Deaths without a report: SIGTERM is the launcher's own way to end the others, SIGABRT is how communication
        # libraries end a process whose peer is gone. Any other comes before the peers that saw the connection break;
        # it was observed up to one poll later than it happened, in whole seconds.
        kind = {-signal.SIGTERM: 3, -signal.SIGABRT: 1}.get(self.exit_code, 0)
        return (kind, self.observed - 1, self.rank)

    @property
    def summary(self) -> str:
        """One line: what happened to the rank."""
        if self.report and not self.report["is_exit"]:
            return f"failed: {self.report['type']}: {self.report['text']}".splitlines()[0]
        if self.report or self.exit_code > 0:
            return f"exited with status {self.status}"
        return f"was killed by signal {-self.exit_code} ({signal.Signals(-self.exit_code).name})"


def launch(job: Job) -> int:
    """Run the job to its end and return its exit status; failures are described on stderr."""
    job.check()
    # Imported here: torch takes seconds, and a job that cannot start need not wait for it.
    from torch.distributed.elastic.multiprocessing import SignalException

    with tempfile.TemporaryDirectory(prefix="smpc_run_") as folder, _environment(job.num_ranks), _quiet():
        try:
            failures = _run_agent(job, folder)
        except SignalException as stop:
            return 128 + int(stop.sigval)
    if not failures:
        return 0
    failures.sort(key=lambda failure: failure.order)
    print(describe(failures, job.num_ranks), file=sys.stderr)
    return failures[0].status


def describe(failures: list[RankFailure], num_ranks: int) -> str:
    """What the user reads when a job failed: the first failure in full, then a line for each that followed."""
    first, *others = failures
    if first.report and "ConfigError" in first.report["smpc_classes"]:
        return "\n".join(f"smpc: error: {line}" for line in first.report["text"].splitlines())
    consequence = ", which ended the other ranks" if num_ranks > 1 else ""
    lines = [f"smpc: error: rank {first.rank} {first.summary}{consequence}"]
    if first.report and not first.report["is_exit"]:
        lines = [f"smpc: error: rank {first.rank} failed{consequence}:", first.report["py_callstack"].rstrip()]
    stopped = -signal.SIGTERM  # by the launcher: not worth a line
    lines += [f"smpc: after that, rank {other.rank} {other.summary}" for other in others if other.exit_code != stopped]
    return "\n".join(lines)


def _run_agent(job: Job, folder: str) -> list[RankFailure]:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from smpc.launch_store import LoopbackRendezvous

    spec = WorkerSpec(
        role="smpc",
        local_world_size=job.num_ranks,
        rdzv_handler=LoopbackRendezvous(run_id=uuid.uuid4().hex),
        entrypoint=sys.executable,
        args=tuple(_verbatim(a) for a in ("-u", str(_WORKER), str(os.getpid()), job.script, *job.arguments)),
        max_restarts=0,
        monitor_interval=0.1,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=folder), shutdown_timeout=_STOP_SECONDS)
    result = agent.run()
    for failure in result.failures.values():
        with suppress(ProcessLookupError):
            os.killpg(failure.pid, signal.SIGKILL)  # a rank leads its process group: what it has started ends with it
    return [_failure(rank, failure) for rank, failure in sorted(result.failures.items())]


def _verbatim(argument: str) -> str:
    return argument.replace("$", "$$")  # the agent substitutes ${local_rank} in arguments


def _failure(rank: int, failure: ProcessFailure) -> RankFailure:
    message = failure.error_file_data.get("message")
    report = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return RankFailure(rank, failure.exitcode, failure.timestamp, report if "smpc_classes" in report else {})


def _device_violations(num_ranks: int) -> list[str]:
    import torch

    available = torch.cuda.device_count()
    if 0 < available < num_ranks:
        return [
            f"-n: {num_ranks} ranks need {num_ranks} devices, this host has {available}; "
            'run fewer ranks, or set CUDA_VISIBLE_DEVICES="" to run them on the CPU'
        ]
    return []


@contextmanager
def _environment(num_ranks: int) -> Iterator[None]:
    """Defaults that the ranks inherit; what the user has set stays."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    defaults: dict[str, str | None] = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    if num_ranks > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    added = {name: value for name, value in defaults.items() if value and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the agent's log: `describe` says the same with the cause first."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
