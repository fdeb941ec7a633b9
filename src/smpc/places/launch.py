"""A process's place together with where its job meets: the address and the port of the store.

    Launch.read(os.environ) -> Launch(rank=3, world_size=8, local_rank=3, local_size=8, master_port=29500, ...)

MASTER_ADDR and MASTER_PORT give the address of the store. On one host the address may be left out; under Slurm it is the step's first
host; where mpirun or srun number their jobs, the port may be left out too, and follows from the number, so that all processes take the
same one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from smpc.errors import ConfigError
from smpc.places.place import Place

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
