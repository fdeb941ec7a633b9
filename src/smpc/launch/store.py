"""The store that the ranks of a job meet at: a TCPStore that listens on one address and nowhere else.

torch's TCPStore binds to every interface, whatever host name it is given. It can however take over a listening
socket that somebody else has bound: one host's job binds 127.0.0.1, port 0 (the system picks a free one), several
hosts' job the master's address. The launcher hosts the store, the ranks are its clients
(TORCHELASTIC_USE_AGENT_STORE), so it outlives any rank.

The socket exists before torch is imported; early clients wait in its queue.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from smpc.errors import ConfigError, printable
from smpc.places import LOOPBACK, Launch, is_loopback

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

STORE_PREFIX = "smpc_attempt_"  # of what the ranks and the launcher tell each other; the number of the attempt follows
ENDED = "smpc/ended"  # under that prefix: the ranks that have ended with status 0, each with a comma behind it
_BACKLOG = 1024
_STORES: dict[tuple[str, int], Store] = {}  # of this process, by address and port
_SHORTEST_LOOK, _LONGEST_LOOK = 0.01, 1.0  # seconds between two looks at a port: a tenth of the wait so far


def listen(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A socket that listens on that address alone; port 0: the system picks one.

    Raises ConfigError where that cannot be. An address that this host reaches but does not have, behind a translated network
    say, falls back to all interfaces.
    """
    host = LOOPBACK if is_loopback(address) else address
    listener: socket.socket | None = None
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(target)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen(_BACKLOG)
    except (OSError, ValueError) as error:  # a name that is none of a host is a UnicodeError
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {printable(host[:200])}:{port}: {reason}; choose another port") from None
    return listener


def serve(listener: socket.socket, timeout: timedelta) -> TCPStore:
    """The store behind a listening socket, which it takes over. `timeout`: of this process's own reads."""
    from torch._C._distributed_c10d import TCPStore

    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def job_store(launch: Launch, timeout: timedelta) -> Store:
    """The store of this process's job: the launcher's, where it serves one; otherwise rank 0 serves it, and the others wait for it.

    `timeout`: of this, and of every wait in it from now on. A process has one store for its life, which serves all its later sessions: an
    early rank would otherwise reach a store that rank 0 is about to close. On one host, only that host can reach it. Raises RuntimeError,
    or a torch subclass of it, if the store is not served in time.
    """
    assert launch.master_port is not None, "a job of one process needs no store"
    place = (launch.master_addr, launch.master_port)
    if place not in _STORES:
        _STORES[place] = _connect_store(launch, launch.master_port, timeout)
    _STORES[place].set_timeout(timeout)
    return _STORES[place]


def store_of_call(store: Store, name: str, rank: int) -> Store:
    """The keys for one call of `name`: ranks meet in their n-th calls of it.

    Each rank counts its own calls, in the store itself: a late rank must not meet keys of an earlier call.
    """
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(f"{name}/{store.add(f'{name}/calls/{rank}', 1)}", store)


def _connect_store(launch: Launch, port: int, timeout: timedelta) -> Store:
    """The job's store, served or reached."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.rendezvous import rendezvous

    if launch.has_store:
        store: Store = next(rendezvous("env://", rank=launch.rank, world_size=launch.world_size, timeout=timeout))[0]
        return store
    address = LOOPBACK if launch.single_host and is_loopback(launch.master_addr) else launch.master_addr
    if launch.rank != 0:
        left = _await_listener(address, port, timeout)
        return TCPStore(address, port, launch.world_size, is_master=False, timeout=left)
    try:
        return serve(listen(address, port), timeout)
    except ConfigError as error:
        raise ConfigError(
            f"MASTER_PORT: {error}; or another process says that it is rank 0 too ({launch.origin})"
        ) from None


def _await_listener(address: str, port: int, timeout: timedelta) -> timedelta:
    """Wait until somebody listens there, and say how much time is left: a TCPStore would wait twice as long, and print pages on the way."""
    started = time.monotonic()
    while True:
        try:
            socket.create_connection((address, port), timeout=timeout.total_seconds()).close()
            return max(timeout - timedelta(seconds=time.monotonic() - started), timedelta(seconds=1))
        except OSError as error:
            waited = time.monotonic() - started
            if waited > timeout.total_seconds():
                raise RuntimeError(str(error)) from error
            time.sleep(min(max(waited / 10, _SHORTEST_LOOK), _LONGEST_LOOK))


def store_of_job(store: Store) -> Store:
    """Messages between the ranks and the launcher in torch.distributed's store.

    Not under torch's prefix, which changes between versions, but under one for every attempt that a launcher makes.
    """
    from torch._C._distributed_c10d import PrefixStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore(f"{STORE_PREFIX}{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
