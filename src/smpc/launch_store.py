"""The store that the ranks of a job meet at: a TCPStore that listens on one address and nowhere else.

torch's TCPStore binds to every interface, whatever host name it is given. It can however take over a listening
socket that somebody else has bound: one host's job binds 127.0.0.1, port 0 (the system picks a free one), several
hosts' job the master's address. The launcher hosts the store, the ranks are its clients
(TORCHELASTIC_USE_AGENT_STORE), so it outlives any rank.

The socket is there before torch is imported; clients that come early wait in its queue.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from smpc.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

LOOPBACK = "127.0.0.1"
STORE_PREFIX = "smpc_attempt_"  # of what the ranks and the launcher tell each other; the number of the attempt follows
ENDED = "smpc/ended"  # under that prefix: the ranks that have ended with status 0, each with a comma behind it
_BACKLOG = 1024
_LOCAL_NAMES = ("localhost", LOOPBACK, "::1")


def is_loopback(address: str) -> bool:
    """Whether an address is this host's own, seen from this host alone."""
    return address in _LOCAL_NAMES or address.startswith("127.")


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
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port") from None
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


def of_job(store: Store) -> Store:
    """What the ranks and the launcher tell each other in a store that torch.distributed gave.

    Not under torch's prefix, which changes between versions, but under one for every attempt that a launcher makes.
    """
    from torch._C._distributed_c10d import PrefixStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore(f"{STORE_PREFIX}{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
