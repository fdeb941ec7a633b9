"""Starts the ranks of a job on this host: what `smpc run` does.

    launch(Job("train.py", ("--steps", "10"), num_ranks=2)) -> exit status

Every rank is a process that runs the script with the environment that `torchrun` would give it (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, ...): the same script runs under plain `torchrun`. What differs:

    - nothing listens outside loopback. `torchrun` opens its store on every interface, whatever MASTER_ADDR says;
      here the store takes over a socket that is already bound to 127.0.0.1, on a port that the system chose, so jobs
      do not collide. gloo and nccl are pointed to the loopback interface, unless GLOO_SOCKET_IFNAME or
      NCCL_SOCKET_IFNAME is set. A job of several hosts listens on the master's address;
    - when a rank fails, all end, on all hosts, with the processes that they started, and the traceback shown is that of the rank
      that failed first. Ranks that smpc watches hear of it, and say so;
    - the status is that rank's: its own exit status, or 128 + the number of the signal that killed it. SIGTERM, SIGINT,
      SIGHUP (but under nohup) and SIGQUIT to the launcher are passed on, and the status is 128 + the signal;
    - a ConfigError that ends a rank is the user's mistake: its text, a line each, no traceback, status 2;
    - ranks die with the launcher, also when it is killed with SIGKILL.

OMP_NUM_THREADS is 1 when it is not set and there is more than one rank, as with `torchrun`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from smpc.errors import ConfigError
from smpc.launch_nodes import NodeOptions, Place
from smpc.launch_output import OutputOptions, RankOutput
from smpc.launch_processes import Processes, RankCommand
from smpc.launch_rendezvous import Failure, Rendezvous
from smpc.launch_report import RankFailure, describe, headline
from smpc.launch_store import LOOPBACK, is_loopback, listen

_WORKER = Path(__file__).with_name("launch_worker.py")
_LAST_WORDS_SECONDS = 3.0  # for the other ranks' and hosts' launchers to read a failure from the store
_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class Job:
    """A script, its arguments, and how many ranks run it on this host.

    `is_module`: `script` is the name of a module, as for `python -m`. `grace`: seconds that a rank has to end itself after a
    signal, before it is killed. `variables` are added to the environment of the ranks.
    """

    script: str
    arguments: tuple[str, ...] = ()
    num_ranks: int = 1
    is_module: bool = False
    nodes: NodeOptions = field(default_factory=NodeOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    grace: float = 3.0
    variables: Mapping[str, str] = field(default_factory=dict)

    def check(self, environ: Mapping[str, str]) -> Place:
        """This host's place in the job. Raises ConfigError for a job that cannot start, all violations together."""
        violations = []
        if self.num_ranks < 1:
            violations.append(f"-n: expected at least 1 rank, found {self.num_ranks}")
        if not self.grace >= 0:
            violations.append(f"--grace: expected at least 0 seconds, found {self.grace:g}")
        violations += _script_violations(self.script, self.is_module)
        place = None
        try:
            place = self.nodes.place(max(self.num_ranks, 1), environ)
        except ConfigError as error:
            violations.append(str(error))
        if place is not None:
            violations += self.output.violations([place.fields(i) for i in range(self.num_ranks)])
        if not violations:
            violations += _device_violations(self.num_ranks)
        if violations or place is None:
            raise ConfigError("\n".join(violations))
        return place


def launch(job: Job) -> int:
    """Run the job to its end and return its exit status; failures are described on stderr."""
    place = job.check(os.environ)
    listener = listen(place.master_addr, place.master_port) if place.hosts_store else None
    port = listener.getsockname()[1] if listener is not None else place.master_port
    output = RankOutput(job.output, sys.stdout, sys.stderr)
    processes = Processes(output, inherit=job.output.is_inherited(job.num_ranks), grace=job.grace)
    with processes.signals(), tempfile.TemporaryDirectory(prefix="smpc_run_") as folder:
        commands = _commands(job, place, port, Path(folder))
        rendezvous = Rendezvous(
            listener, place.master_addr, port, job.num_ranks, place.world_size, lambda: processes.left_early
        )

        def tell(failure: RankFailure) -> None:
            text = str(failure.report.get("py_callstack", ""))
            rendezvous.tell(Failure(failure.at_fault, headline(failure), text, failure.status, failure.order))

        def interruption() -> Failure | None:
            if not processes.has_signal() or place.world_size == job.num_ranks:
                return None
            number = processes.signal or 0
            return Failure(-1, f"node {place.node_rank} was ended by signal {number}", "", 128 + number)

        failures = processes.run(commands, lambda: rendezvous.remote is not None, tell)
        rendezvous.finish(_LAST_WORDS_SECONDS, interruption)
    output.close()
    return _verdict(job, place, processes, failures, rendezvous.remote)


def _verdict(job: Job, place: Place, processes: Processes, failures: list[RankFailure], remote: Failure | None) -> int:
    if processes.signal is not None:
        return 128 + processes.signal
    failures = sorted(failures, key=lambda failure: failure.order)
    if remote is not None and (not failures or remote.order < failures[0].order):
        print(f"smpc: error: on another node, {remote.headline}", file=sys.stderr)
        if remote.text:
            print(remote.text.rstrip(), file=sys.stderr)
        return remote.status
    if not failures:
        return 0
    print(describe(failures, place.world_size, processes.left_early), file=sys.stderr)
    return failures[0].status


def _commands(job: Job, place: Place, port: int, folder: Path) -> list[RankCommand]:
    environment = _environment(job.num_ranks, place)
    environment |= {
        **job.variables,
        "MASTER_ADDR": LOOPBACK if is_loopback(place.master_addr) else place.master_addr,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(job.num_ranks),
        "NODE_RANK": str(place.node_rank),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_NAME": "smpc",
        "ROLE_WORLD_SIZE": str(place.world_size),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    script = ("-m", job.script) if job.is_module else (job.script,)
    arguments = (sys.executable, "-u", str(_WORKER), str(os.getpid()), *script, *job.arguments)
    commands = []
    for local_rank in range(job.num_ranks):
        rank, report = place.base_rank + local_rank, folder / f"{local_rank}.json"
        own = {
            "RANK": str(rank),
            "ROLE_RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "TORCHELASTIC_ERROR_FILE": str(report),
        }
        commands.append(RankCommand(arguments, environment | own, place.fields(local_rank), report))
    return commands


def _environment(num_ranks: int, place: Place) -> dict[str, str]:
    """What the ranks inherit: this process's environment, and defaults where the user has set nothing."""
    import socket

    environment = dict(os.environ)
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None and is_loopback(place.master_addr):
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environment.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if num_ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _script_violations(script: str, is_module: bool) -> list[str]:
    if is_module:
        parts = script.split(".")
        return [] if all(part.isidentifier() for part in parts) else [f"-m: {script!r} is no name of a module"]
    if not os.path.exists(script):
        return [f"script {script!r} does not exist (looked in {os.getcwd()})"]
    if not os.path.isfile(script):
        return [f"script {script!r} is not a file"]
    if not os.access(script, os.R_OK):
        return [f"script {script!r} is not readable"]
    return []


def _device_violations(num_ranks: int) -> list[str]:
    if not any(os.path.exists(device) for device in _DEVICES):
        return []
    import torch  # takes a second or two, so not where there is nothing to count

    available = torch.cuda.device_count()
    if 0 < available < num_ranks:
        return [
            f"-n: {num_ranks} ranks need {num_ranks} devices, this host has {available}; "
            'run fewer ranks, or set CUDA_VISIBLE_DEVICES="" to run them on the CPU'
        ]
    return []
