"""Starts the ranks of a job on this host: what `smpc run` does.

    launch(Job("train.py", ("--steps", "10"), num_ranks=2)) -> exit status

Every rank is a process that runs the script with the environment that `torchrun` would give it (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, ...): the same script runs under plain `torchrun`. What differs:

    - nothing listens outside loopback. `torchrun` opens its store on every interface, whatever MASTER_ADDR says;
      here the store takes over a socket that is already bound to 127.0.0.1, on a port that the system chose, so jobs
      do not collide. gloo and nccl are pointed to the loopback interface, unless GLOO_SOCKET_IFNAME or
      NCCL_SOCKET_IFNAME is set. A job of several hosts listens on the master's address;
    - when a rank fails, all end, on all hosts, with the processes that they started. The traceback shown is the
      first failed rank's. Ranks that smpc watches hear of it, and say so;
    - the status is that rank's: its own exit status, or 128 + the number of the signal that killed it. SIGTERM, SIGINT,
      SIGHUP (but under nohup) and SIGQUIT to the launcher are passed on, and the status is 128 + the signal;
    - a ConfigError that ends a rank is the user's mistake: its text, a line each, no traceback, status 2;
    - ranks die with the launcher, also when it is killed with SIGKILL;
    - `max_restarts`: after a failure, all ranks of a job of one node start again, with a new store. Not after status 2, which another try
      would not change, and not after a signal to the launcher. TORCHELASTIC_RESTART_COUNT counts the tries before this one.

OMP_NUM_THREADS is 1 when it is not set and there is more than one rank, as with `torchrun`.

`expanded` puts a rank's variables into the arguments of its script: what `--expand-args` asks for.

    $NAME, ${NAME}    the value of a variable in the rank's environment; one that is not set stays as it is written
    ~, ~/...          HOME of that environment, at the beginning of an argument alone

Nothing else is special, and no shell is involved: an argument stays one argument, whatever the value holds.

    >>> expanded(("--log", "${RANK}.txt", "~/data", "$NOWHERE"), {"RANK": "3", "HOME": "/home/me"})
    ('--log', '3.txt', '/home/me/data', '$NOWHERE')
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from smpc.config.numbers import MAX_LOCAL_RANKS, MAX_SECONDS, shown
from smpc.errors import ConfigError
from smpc.launch.failure_report import RankFailure, describe, headline_of_failure, readable
from smpc.launch.nodes import NodeOptions, NodePlace
from smpc.launch.output import OutputOptions, RankOutput
from smpc.launch.processes import Processes, RankCommand
from smpc.launch.rendezvous import Failure, Rendezvous, listen
from smpc.places import LOOPBACK, is_loopback

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)


def expanded(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The arguments of one rank."""
    return tuple(_expanded_argument(argument, environment) for argument in arguments)


def _expanded_argument(argument: str, environment: Mapping[str, str]) -> str:
    """One argument with the variables of an environment."""
    home = environment.get("HOME", "")
    if home and (argument == "~" or argument.startswith("~/")):
        argument = home.rstrip("/") + argument[1:]
    return _VARIABLE.sub(lambda found: environment.get(found[1] or found[2], found[0]), argument)


_WORKER = Path(__file__).with_name("worker.py")
_LAST_WORDS_SECONDS = 3.0  # for the other ranks' and hosts' launchers to read a failure from the store
MAX_RESTARTS = 1000
_USAGE_STATUS = 2  # of a user's mistake
_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class Job:
    """A script, its arguments, and how many ranks run it on this host.

    `is_module`: `script` is the name of a module, as for `python -m`. `is_command`: it is a program, which runs without Python; of a rank
    that fails there is its status alone then. `grace`: seconds that a rank has to end itself after a signal, before it is killed.
    `variables` are added to the environment of the ranks. `expands`: the arguments may name variables (`smpc.launch.job`).
    `is_verbose`: the start and the end of every rank is told on stderr.
    """

    script: str
    arguments: tuple[str, ...] = ()
    num_ranks: int = 1
    is_module: bool = False
    nodes: NodeOptions = field(default_factory=NodeOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    grace: float = 3.0
    variables: Mapping[str, str] = field(default_factory=dict)
    is_command: bool = False
    expands: bool = False
    is_verbose: bool = False
    max_restarts: int = 0

    def check(self, environ: Mapping[str, str]) -> NodePlace:
        """This host's place in the job. Raises ConfigError for a job that cannot start, all violations together."""
        violations = []
        if self.num_ranks < 1:
            violations.append(f"-n: expected at least 1 rank, found {shown(self.num_ranks)}")
        if self.num_ranks > MAX_LOCAL_RANKS:
            violations.append(f"-n: expected at most {MAX_LOCAL_RANKS} ranks on a node, found {shown(self.num_ranks)}")
        if not 0 <= self.grace <= MAX_SECONDS:
            bounds = "at least 0" if self.grace < 0 else f"0 to {MAX_SECONDS:.0f}"
            violations.append(f"--grace: expected {bounds} seconds, found {self.grace:g}")
        if self.is_module and self.is_command:
            violations.append("-c: expected no -m beside it: a command runs without Python")
        elif self.is_command:
            violations += _command_violations(self.script)
        else:
            violations += _script_violations(self.script, self.is_module)
        place = None
        try:
            place = self.nodes.place(min(max(self.num_ranks, 1), MAX_LOCAL_RANKS), environ)
        except ConfigError as error:
            violations.append(str(error))
        violations += self._restart_violations(place)
        if place is not None:
            violations += self.output.violations([place.fields(i) for i in range(place.num_ranks)])
        if not violations:
            violations += _device_violations(self.num_ranks)
        if violations or place is None:
            raise ConfigError("\n".join(violations))
        return place

    def _restart_violations(self, place: NodePlace | None) -> list[str]:
        if not 0 <= self.max_restarts <= MAX_RESTARTS:
            return [f"--max-restarts: expected 0 to {MAX_RESTARTS}, found {shown(self.max_restarts)}"]
        if self.max_restarts and place is not None and place.world_size > place.num_ranks:
            return [
                f"--max-restarts: expected a job of one node, found {place.num_nodes} nodes; torchrun --max-restarts "
                "starts jobs of several nodes again"
            ]
        return []


def launch(job: Job) -> int:
    """Run the job to its end and return its exit status; failures are described on stderr."""
    place = job.check(os.environ)
    for attempt in range(job.max_restarts):
        status, is_final = _attempt_job(job, place, attempt)
        if is_final:
            return status
        print(f"smpc: restart {attempt + 1} of {job.max_restarts}: all ranks start again", file=sys.stderr, flush=True)
    return _attempt_job(job, place, job.max_restarts)[0]


def _attempt_job(job: Job, place: NodePlace, attempt: int) -> tuple[int, bool]:
    """Run all ranks once: the exit status, and whether another attempt would change nothing or is not wanted."""
    listener = listen(place.master_addr, place.master_port) if place.hosts_store else None
    port = listener.getsockname()[1] if listener is not None else place.master_port
    output = RankOutput(job.output, sys.stdout, sys.stderr)
    inherit = job.output.is_inherited(job.num_ranks)
    processes = Processes(output, inherit=inherit, grace=job.grace, log=_tell_of_job if job.is_verbose else None)
    with processes.signals(), tempfile.TemporaryDirectory(prefix="smpc_run_") as folder:
        commands = _job_commands(job, place, port, Path(folder), attempt)
        rendezvous = Rendezvous(
            listener, place.master_addr, port, job.num_ranks, place.world_size, lambda: processes.left_early, attempt
        )

        def tell(failure: RankFailure) -> None:
            text = str(failure.report.get("py_callstack", ""))
            rendezvous.tell(
                Failure(failure.at_fault, headline_of_failure(failure), text, failure.status, failure.order)
            )

        def interruption() -> Failure | None:
            if not processes.has_signal() or place.world_size == job.num_ranks:
                return None
            number = processes.signal or 0
            return Failure(-1, f"node {place.node_rank} was ended by signal {number}", "", 128 + number)

        failures = processes.run(commands, lambda: rendezvous.remote is not None, tell)
        is_known = not failures or any(not failure.is_consequence for failure in failures)
        rendezvous.finish(_LAST_WORDS_SECONDS, interruption, processes.is_hastened, looks_for_cause=not is_known)
    output.close()
    status = _job_status(place, processes, failures, rendezvous.remote, output)
    return status, status in (0, _USAGE_STATUS) or processes.signal is not None


def _tell_of_job(text: str) -> None:
    print(readable(f"smpc: {text}"), file=sys.stderr, flush=True)


def _job_status(
    place: NodePlace, processes: Processes, failures: list[RankFailure], remote: Failure | None, output: RankOutput
) -> int:
    """Prints what ended the job and returns its exit status."""
    if processes.signal is not None:
        return 128 + processes.signal
    failures = sorted(failures, key=lambda failure: failure.order)
    if remote is not None and (not failures or remote.order < failures[0].order):
        print(readable(f"smpc: error: on another node, {remote.headline}"), file=sys.stderr)
        if remote.text:
            print(readable(remote.text.rstrip()), file=sys.stderr)
        return remote.status
    if not failures:
        return 0
    hidden = output.hidden(failures[0].rank)
    if hidden:
        print(hidden, file=sys.stderr)
    print(describe(failures, place.world_size, processes.left_early), file=sys.stderr)
    return failures[0].status


def _job_commands(job: Job, place: NodePlace, port: int, folder: Path, attempt: int = 0) -> list[RankCommand]:
    environment = _job_environment(job.num_ranks, place)
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
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    commands = []
    for local_rank in range(job.num_ranks):
        rank, report = place.base_rank + local_rank, folder / f"{local_rank}.json"
        own = {
            "RANK": str(rank),
            "ROLE_RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "TORCHELASTIC_ERROR_FILE": str(report),
        }
        whole = environment | own
        commands.append(
            RankCommand(_command_line(job, whole), not job.is_command, whole, place.fields(local_rank), report)
        )
    return commands


def _command_line(job: Job, environment: Mapping[str, str]) -> tuple[str, ...]:
    arguments = expanded(job.arguments, environment) if job.expands else job.arguments
    if job.is_command:
        return (job.script, *arguments)
    script = ("-m", job.script) if job.is_module else (job.script,)
    return (sys.executable, "-u", str(_WORKER), str(os.getpid()), *script, *arguments)


def _job_environment(num_ranks: int, place: NodePlace) -> dict[str, str]:
    """The environment of the ranks: this process's, with defaults for unset variables."""
    import socket

    environment = dict(os.environ)
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None and is_loopback(place.master_addr):
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environment.setdefault("NCCL_SOCKET_IFNAME", loopback)
    environment.setdefault("PYTHONUNBUFFERED", "1")  # for what the ranks start, and programs that are Python scripts
    if num_ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def default_num_ranks(environ: Mapping[str, str]) -> int:
    """How many ranks `smpc run` starts that is not told: LOCAL_WORLD_SIZE, else a rank for each GPU of this host, at least one.

    A LOCAL_WORLD_SIZE beside a LOCAL_RANK belongs to a job around the launcher; 0 comes from a scheduler that counts GPUs on a node
    without any. Raises ConfigError for one that is not a number.
    """
    text = environ.get("LOCAL_WORLD_SIZE", "").strip()
    if text and not environ.get("LOCAL_RANK", "").strip():
        if text.isascii() and text.isdigit() and int(text[:9]) <= MAX_LOCAL_RANKS:
            return max(1, int(text))
        raise ConfigError(
            f"LOCAL_WORLD_SIZE: expected a whole number from 0 to {MAX_LOCAL_RANKS}, found {shown(text)} in the environment; give -n"
        )
    return max(1, _num_devices())


def _command_violations(command: str) -> list[str]:
    if shutil.which(command) is None:
        return [
            f"-c: no program {shown(command)} that can be run; looked in PATH, and in {os.getcwd()} for names with a '/'"
        ]
    return []


def _script_violations(script: str, is_module: bool) -> list[str]:
    if is_module:
        return _module_violations(script)
    if not os.path.exists(script):
        return [f"script {shown(script)} does not exist (looked in {os.getcwd()})"]
    if not os.path.isfile(script):
        return [f"script {shown(script)} is not a file"]
    if not os.access(script, os.R_OK):
        return [f"script {shown(script)} is not readable"]
    return []


def _module_violations(name: str) -> list[str]:
    """The error of a module's name, as far as it can be known without importing its parent packages."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return [f"-m: {shown(name)} is no name of a module"]
    where = [os.getcwd(), *sys.path[1:]]
    importlib.invalidate_caches()
    try:
        spec = sys.modules[parts[0]].__spec__ if parts[0] in sys.modules else PathFinder.find_spec(parts[0], where)
        spec = spec or importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return [f"-m: no module {shown(name)} on the path or in {os.getcwd()}"]
    if len(parts) > 1 and spec.submodule_search_locations is None:
        return [f"-m: no module {shown(name)}: {parts[0]!r} is no package"]
    return []


def _num_devices() -> int:
    if not any(os.path.exists(device) for device in _DEVICES):
        return 0
    import torch  # takes a second or two, so not where there is nothing to count

    return torch.cuda.device_count()


def _device_violations(num_ranks: int) -> list[str]:
    available = _num_devices()
    if 0 < available < num_ranks:
        return [
            f"-n: {num_ranks} ranks need {num_ranks} devices, this host has {available}; "
            'run fewer ranks, or set CUDA_VISIBLE_DEVICES="" to run them on the CPU'
        ]
    return []
