"""This process's place in its job, read from the environment variables of its launcher.

    Place.find(os.environ) -> Place(rank=3, world_size=8, ...)      None: nothing says that this is one process of several

These sets are read, and the first complete one counts

    torch       RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: torchrun, `smpc run`, or by hand
    Open MPI    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    MVAPICH     MV2_COMM_WORLD_RANK, ...
    PMI         PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS: mpiexec of MPICH and Intel MPI
    Slurm       SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID: a task of srun

The order is from the inner to the outer launcher: srun starts torchrun, sbatch starts mpirun. Numbers set by hand that contradict a
launcher's are an error, since several processes would then take the same place.

A process's place together with where its job meets: the address and the port of the store.

    Launch.read(os.environ) -> Launch(rank=3, world_size=8, local_rank=3, local_size=8, master_port=29500, ...)

MASTER_ADDR and MASTER_PORT give the address of the store. On one host the address may be left out; under Slurm it is the step's first
host; where mpirun or srun number their jobs, the port may be left out too, and follows from the number, so that all processes take the
same one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from smpc.errors import ConfigError

_AGENT = "TORCHELASTIC_RUN_ID"  # torchrun's and smpc run's: they have set torch's variables for this process


@dataclass(frozen=True, slots=True)
class _Names:
    """The variables of one launcher, and the variables that identify its jobs; the first of these that is set counts."""

    launcher: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...] = ()


_TORCH = _Names("torch", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_SLURM = _Names(
    "Slurm",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    ("SLURM_LOCALID",),
    (),
    ("SLURM_JOB_ID", "SLURM_JOBID"),
)
_MPI = (
    _Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    ),
    _Names(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Names(
        "PMI", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "SLURM_LOCALID"), ("MPI_LOCALNRANKS",), ("SLURM_JOB_ID",)
    ),
)


_OUTER = [name for names in (*_MPI, _SLURM) for name in (names.rank, *names.world_size)]


@dataclass(frozen=True, slots=True)
class Place:
    """`local_rank`, `local_size`: None if the launcher does not say. `job`: identifies the launcher's job, "" if nothing does.

    `first_host`: the host of rank 0, if it is known. `origin`: the variables that were read, with their values.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None
    launcher: str
    origin: str
    job: str = ""
    first_host: str = ""

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Place | None:
        """This process's place. Raises ConfigError for sets that are incomplete, senseless, or contradict each other."""
        own = _place_from(_TORCH, environ)
        if own is not None and (_AGENT in environ or not any(environ.get(name) for name in _OUTER)):
            return own
        found = (_place_from(names, environ) for names in _MPI)
        outer = next((place for place in found if place is not None), None) or _place_in_slurm(
            environ, has_place=own is not None
        )
        if own is None:
            _check_rest(outer, environ)
            return outer
        if outer is not None:
            _check_agree(own, outer)
        return own


def _place_from(names: _Names, environ: Mapping[str, str]) -> Place | None:
    """The place from one set of variables; None if none is set. ConfigError for an incomplete set."""
    rank = _given_place_variable(environ, (names.rank,))
    size = _given_place_variable(environ, names.world_size)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        if names is _TORCH and any(_given_place_variable(environ, (other.rank,)) for other in (*_MPI, _SLURM)):
            return None  # a leftover beside a complete set, which is checked against it
        missing = names.rank if rank is None else names.world_size[0]
        found = "=".join(size or rank or ())
        raise ConfigError(
            f"{missing}: expected a whole number, found '' in the environment, which has {found}; {_launcher_advice(names)}"
        )
    local_rank, local_size = (
        _given_place_variable(environ, names.local_rank),
        _given_place_variable(environ, names.local_size),
    )
    problems = [
        f"{name}: expected a whole number, found {text!r} in the environment"
        for name, text in (pair for pair in (rank, size, local_rank, local_size) if pair is not None)
        if not (text.isascii() and text.isdigit() and len(text) < 10)
    ]
    if problems:
        raise ConfigError("\n".join([*problems, _launcher_advice(names)]))
    job = _given_place_variable(environ, names.job)
    place = Place(
        int(rank[1]),
        int(size[1]),
        None if local_rank is None else int(local_rank[1]),
        None if local_size is None else int(local_size[1]),
        names.launcher,
        f"{rank[0]}={rank[1]}, {size[0]}={size[1]}",
        "" if job is None else job[1],
    )
    _check_bounds(place, names)
    return place


def _given_place_variable(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str] | None:
    """The first of the variables that is set, and its text."""
    return next(((name, environ[name].strip()) for name in names if environ.get(name, "").strip()), None)


def _check_bounds(place: Place, names: _Names) -> None:
    local_size = place.world_size if place.local_size is None else place.local_size
    local_rank = place.local_rank or 0
    if place.rank < place.world_size and local_rank < local_size <= place.world_size:
        return
    words = (
        names.rank,
        names.world_size[0],
        (*names.local_rank, "LOCAL_RANK")[0],
        (*names.local_size, "LOCAL_WORLD_SIZE")[0],
    )
    rank, size, local, locals_ = words
    raise ConfigError(
        f"expected {rank} < {size} and {local} < {locals_} <= {size}, found {place.origin}"
        + ("" if place.local_rank is None else f", {local}={place.local_rank}")
        + ("" if place.local_size is None else f", {locals_}={place.local_size}")
        + f"\n{_launcher_advice(names)}"
    )


def _launcher_advice(names: _Names) -> str:
    """What to do about variables of a launcher."""
    if names is _TORCH:
        return "start the script with smpc run or torchrun, which set them"
    return (
        f"start the script with smpc run, torchrun or the launcher of {names.launcher}, which set them, or unset them"
    )


def _place_in_slurm(environ: Mapping[str, str], *, has_place: bool) -> Place | None:
    """The place of a task that srun has started; None in a batch script or an allocation's shell, which is one process.

    `has_place`: torch's variables already give this process a place.
    """
    rank, size = _given_place_variable(environ, (_SLURM.rank,)), _given_place_variable(environ, _SLURM.world_size)
    is_task = bool(environ.get("SLURM_STEP_ID"))
    if rank is None or (not is_task and (has_place or (size is None and rank[1] == "0"))):
        return None
    place = _place_from(_SLURM, environ)
    assert place is not None, "there is a rank"
    if place.world_size > 1 and not is_task and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        raise ConfigError(
            f"found {place.origin} in the environment, but this process is in no step of Slurm (SLURM_STEP_ID is not set): start it "
            "with srun, one task for each process; for a job of one process, unset SLURM_PROCID"
        )
    local_size = _tasks_here(environ)
    if (
        local_size is None
        and (_given_place_variable(environ, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")) or ("", ""))[1] == "1"
    ):
        local_size = place.world_size
    hosts = _given_place_variable(environ, ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"))
    step = environ.get("SLURM_STEP_ID", "")
    return Place(
        place.rank,
        place.world_size,
        place.local_rank,
        local_size,
        place.launcher,
        place.origin,
        f"{place.job}.{step}" if place.job else "",
        "" if hosts is None else _first_host(hosts[1]),
    )


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """The tasks of this node, from a list like `4(x2),3`; None if it does not say."""
    counts, node = (
        _given_place_variable(environ, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")),
        environ.get("SLURM_NODEID", "0"),
    )
    if counts is None or not node.isdigit():
        return None
    left = int(node)
    for text in counts[1].split(","):
        found = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", text.strip())
        if found is None:
            return None
        if left < int(found[2] or 1):
            return int(found[1])
        left -= int(found[2] or 1)
    return None


def _first_host(hosts: str) -> str:
    """The first of a list like `gpu[03-07,9],login1`, or `rack[1-2]n[01-16]`."""
    found = re.match(r"(?:[^,\[\]]|\[\d+[^\[\]]*\])+", hosts)
    return "" if found is None else re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0])


def _check_rest(outer: Place | None, environ: Mapping[str, str]) -> None:
    """Some of torch's variables may be set beside another launcher's complete set; they must agree with it."""
    if outer is None:
        return
    expected = {"RANK": outer.rank, "WORLD_SIZE": outer.world_size}
    for name, value in expected.items():
        text = environ.get(name, "").strip()
        if text and text != str(value):
            raise ConfigError(
                f"{name}: found {text!r} in the environment, but {outer.launcher} says {outer.origin}; unset {name}"
            )


def _check_agree(own: Place, outer: Place) -> None:
    """Torch's variables, set by hand, beside a launcher's: several of its processes must not take the same place."""
    shares = own.world_size < outer.world_size
    if shares or (own.world_size == outer.world_size and own.rank != outer.rank):
        raise ConfigError(
            f"found {own.origin} in the environment, but {outer.launcher} says {outer.origin}: unset RANK and WORLD_SIZE, or let them say "
            "the same"
        )


LOOPBACK = "127.0.0.1"
_LOCAL_NAMES = ("localhost", LOOPBACK, "::1")
_NO_ADDRESS = "MASTER_ADDR: expected the address of rank 0's host, found nothing in the environment"
_FIRST_PORT, _NUM_PORTS = 20000, 10000  # below Linux's ephemeral ports


def is_loopback(address: str) -> bool:
    """Whether an address belongs to this host and is reachable only from it."""
    return address in _LOCAL_NAMES or address.startswith("127.")


def meeting_port(job: str) -> int:
    """The port that all processes of a numbered job take where MASTER_PORT is not set."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place in the job, as its launcher describes it."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    master_port: int | None  # None: a job of one process, which needs no rendezvous
    single_host: bool
    has_store: bool  # whether the launcher serves the rendezvous store itself
    master_addr: str = field(default=LOOPBACK, compare=False)
    origin: str = field(default="", compare=False)  # the variables with these values

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Launch:
        """Read a launcher's environment variables. ConfigError names every one that is missing or wrong."""
        problems: list[str] = []
        address = environ.get("MASTER_ADDR", "").strip()
        try:
            place = Place.find(environ)
        except ConfigError as error:
            *lines, advice = str(error).splitlines()
            if lines:  # of single variables: then the master's are named too
                _port_of_job(environ, "", lines)
                lines += [] if address else [_NO_ADDRESS]
            raise ConfigError("\n".join([*lines, advice])) from None
        has_master = bool(address or environ.get("MASTER_PORT", "").strip())
        if place is None or (place.world_size == 1 and (place.launcher != "torch" or not has_master)):
            return cls(0, 1, 0, 1, None, single_host=True, has_store=False)
        port = _port_of_job(environ, place.job and f"{place.launcher} {place.job}", problems)
        on_one_host = place.local_size == place.world_size and place.launcher != "torch"
        if not address:
            address = LOOPBACK if on_one_host else place.first_host
        local_master = is_loopback(address)
        local_rank = _local_number("LOCAL_RANK", place.local_rank, place.rank if local_master else None, problems)
        local_size = _local_number(
            "LOCAL_WORLD_SIZE", place.local_size, place.world_size if local_master else None, problems
        )
        problems += [] if address else [_NO_ADDRESS]
        if problems:
            raise ConfigError("\n".join([*problems, _address_advice(place)]))
        return cls(
            place.rank,
            place.world_size,
            local_rank,
            local_size,
            port,
            single_host=local_size == place.world_size,
            has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            master_addr=address,
            origin=place.origin,
        )


def _address_advice(place: Place) -> str:
    """What to do without MASTER_ADDR and MASTER_PORT."""
    if place.launcher == "torch":
        return "start the script with smpc run or torchrun, which set them"
    return (
        f"{place.launcher} says {place.origin}; let it pass MASTER_ADDR and MASTER_PORT (a free port) to all processes"
    )


def _local_number(name: str, found: int | None, default: int | None, problems: list[str]) -> int:
    """A number of this host that the launcher has set, or its default."""
    value = default if found is None else found
    if value is None:
        problems.append(f"{name}: expected a whole number, found '' in the environment")
        return 0
    return value


def _port_of_job(environ: Mapping[str, str], job: str, problems: list[str]) -> int:
    """MASTER_PORT; if it is not set, the port of the numbered `job`, unless `job` is ""."""
    text = environ.get("MASTER_PORT", "").strip()
    if not text and job:
        return meeting_port(job)
    if text.isascii() and text.isdigit() and int(text[:9]) < 65536:
        return int(text)
    problems.append(
        f"MASTER_PORT: expected a whole number{' below 65536' if text.isdigit() else ''}, found {text!r} in the environment"
    )
    return 0
