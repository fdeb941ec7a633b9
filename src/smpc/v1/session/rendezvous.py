"""How the processes of a job find each other: this process's place, the store they share, and which processes have arrived.

A process's place comes from its launcher (`smpc.places`): torchrun, `smpc run`, mpirun, srun, or variables set by hand. If nothing names
other processes, it is a job of one process.

The launcher serves the store (torchrun, `smpc run`), or else rank 0 does, at MASTER_ADDR and MASTER_PORT. On one host the address may be
left out, and also the port if mpirun or srun has a number for the job, from which all ranks derive the same port. Rank 0's store serves
the later sessions of the same processes too.
"""

from __future__ import annotations

import datetime
import os
import time

from torch._C._distributed_c10d import PrefixStore, Store

from smpc.errors import ConfigError, PeerError, TransportError
from smpc.launch.store import job_store, store_of_job
from smpc.places import Launch
from smpc.v1.session.process_state import state
from smpc.v1.session.wait_limits import ranks_that_ended

_HERE = "smpc_here"  # store key: which processes have called smp.init
_MANY = 8
_SHORTEST_LOOK, _LONGEST_LOOK = 0.01, 1.0  # seconds between two looks at who is here: a tenth of the wait so far


def meet(launch: Launch, timeout: datetime.timedelta) -> Store:
    """The store of this session, once all processes have arrived; for a job of several processes."""
    base = _connect(launch, timeout)
    store = PrefixStore(f"smpc_session_{state.session_number}", base)
    try:
        await_all(store, launch, timeout)
    except TransportError:
        if launch.rank == 0 and not launch.has_store:
            time.sleep(2 * _LONGEST_LOOK)  # the others notice by themselves, by reading this process's store
        raise
    return store


def _connect(launch: Launch, timeout: datetime.timedelta) -> Store:
    """The job's store. On one host, only that host can reach it: left to itself, TCPStore listens on every interface."""
    try:
        return job_store(launch, timeout)
    except RuntimeError as error:
        where = f"{launch.master_addr}:{launch.master_port}"
        whose = "the launcher" if launch.has_store else "rank 0"
        raise TransportError(
            f"smp.init: rank {launch.rank} ({launch.origin}) could not reach the store of the job at {where} within start_timeout = "
            f"{timeout.total_seconds():g} s; {whose} serves it, and has not come or cannot be reached: {str(error).splitlines()[0]}"
        ) from error


def await_all(store: Store, launch: Launch, timeout: datetime.timedelta) -> None:
    """Wait until all processes are here.

    Raises TransportError, naming missing processes; PeerError once the launcher says that one of them has ended with status 0;
    ConfigError if another process has this one's place.
    """
    if store.add(f"{_HERE}/{launch.rank}", 1) > 1:
        raise ConfigError(
            f"smp.init: another process says that it is rank {launch.rank} too ({launch.origin or 'process ' + str(os.getpid())}); give "
            "each process of the job a RANK of its own, and start every job with a MASTER_PORT of its own"
        )
    missing = list(range(launch.world_size))
    launcher, started = store_of_job(store), time.monotonic()
    while True:
        while missing and store.check([f"{_HERE}/{missing[0]}"]):
            del missing[0]
        if not missing:
            return
        gone_early = ranks_that_ended(launcher)
        waited = time.monotonic() - started
        if gone_early or waited > timeout.total_seconds():
            missing = [rank for rank in missing if not store.check([f"{_HERE}/{rank}"])]
        gone = [rank for rank in missing if rank in gone_early]
        if gone:
            raise PeerError(
                f"smp.init: expected {launch.world_size} processes, but {ranks(gone)} ended with status 0 before smp.init; every "
                "rank must call it, or none: look for what ends the script there"
            )
        if missing and waited > timeout.total_seconds():
            origin = f" ({launch.origin})" if launch.origin else ""
            raise TransportError(
                f"smp.init: expected {launch.world_size} processes{origin} within start_timeout = {timeout.total_seconds():g} s, but "
                f"{ranks(missing)} did not come: still importing, in what the script does before smp.init, stopped, or never started; "
                "look for what they do there, or raise start_timeout"
            )
        time.sleep(min(max(waited / 10, _SHORTEST_LOOK), _LONGEST_LOOK))


def ranks(numbers: list[int]) -> str:
    """For people: `ranks 1, 2`."""
    shown = ", ".join(map(str, numbers[:_MANY])) + (f" and {len(numbers) - _MANY} more" if len(numbers) > _MANY else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
