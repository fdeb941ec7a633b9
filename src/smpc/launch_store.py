"""The store that the ranks of one host meet at: a TCPStore that listens on loopback and nowhere else.

torch's TCPStore binds to every interface, whatever host name it is given. It can however take over a listening
socket that somebody else has bound; this rendezvous binds one to 127.0.0.1, port 0 (the system picks a free one).
The launcher hosts the store, the ranks are its clients (TORCHELASTIC_USE_AGENT_STORE), so it outlives any rank.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(minutes=10)  # of the launcher's own reads; the ranks' timeout is that of init_process_group


def loopback_store() -> TCPStore:
    """A store that other processes of this host reach at `LOOPBACK`, `store.port`."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class LoopbackRendezvous(RendezvousHandler):
    """One node, one attempt: the agent's only rendezvous."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Name, for logs."""
        return "smpc-loopback"

    @property
    def use_agent_store(self) -> bool:
        """The ranks connect to the agent's store instead of opening one on rank 0."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, and this node's place: the only one."""
        self._store = loopback_store()
        address = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, address)

    def is_closed(self) -> bool:
        """Never: the job ends with its processes."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """No other node can join."""
        return 0

    def get_run_id(self) -> str:
        """Unique for every job."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store closes with this object."""
        self._store = None
        return True
