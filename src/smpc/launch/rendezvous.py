"""The launcher's side of the store: hosts it, tells the ranks and the other hosts' launchers of failures, hears of theirs.

Terms
    node    what one launcher started; several on one host in tests. The launcher of node 0 hosts the store
    order   failures sort by it: causes before consequences, then by time. Hosts' clocks need not agree to better than a second, for
            a death that left no report comes before the reports of the ranks that noticed it
    beat    a number that every launcher of several nodes raises all the time; if it stops, the launcher is gone

All of it happens on a thread of its own, because importing torch takes longer than the ranks need to start, and a connection to another
host may not come about. The keys begin with `smpc_run/`; what is read from them is parsed as text, never unpickled.

The store that the ranks of a job meet at: a TCPStore that listens on one address and nowhere else.

torch's TCPStore binds to every interface, whatever host name it is given. It can however take over a listening
socket that somebody else has bound: one host's job binds 127.0.0.1, port 0 (the system picks a free one), several
hosts' job the master's address. The launcher hosts the store, the ranks are its clients
(TORCHELASTIC_USE_AGENT_STORE), so it outlives any rank.

The socket exists before torch is imported; early clients wait in its queue.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING

from smpc.errors import ConfigError, printable
from smpc.places import LOOPBACK, Launch, is_loopback

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore


_POLL_SECONDS = 0.25
_CONNECT_TIMEOUT = timedelta(minutes=30)  # the ranks' own timeout for the start is shorter
_SILENCE_SECONDS = 15.0
_PREFIX = "smpc_run"
_LEAVE_SECONDS = 60.0  # that the end of the process waits for the thread, which may have to import torch first
_PUBLISH_SECONDS = (
    60.0  # importing torch, on a loaded machine, and the launchers of the other nodes that have just been started
)
_NO_RANK_AT_FAULT = 1.0  # comes after the failures of ranks, before their consequences


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure that ends a job, in a line and with more text; `rank`: -1 if none is at fault; `status`: of all launchers."""

    rank: int
    headline: str
    text: str
    status: int
    order: tuple[float, float, int] = (_NO_RANK_AT_FAULT, 0.0, -1)


class Rendezvous:
    """`listener`: the socket to serve the store on, None on the other nodes. `num_ranks`: of this node; `world_size`: of all.

    `left_early` tells the ranks of this node that have ended with status 0, for those that wait for them. `attempt`: how often the job
    has been started before.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        address: str,
        port: int,
        num_ranks: int,
        world_size: int,
        left_early: Callable[[], Sequence[int]],
        attempt: int = 0,
    ) -> None:
        self._listener = listener
        self._address, self._port = address, port
        self._num_ranks, self._world_size = num_ranks, world_size
        self._left_early = left_early
        self._attempt = attempt
        self._told_ends: list[int] = []
        self._own: Failure | None = None
        self._remote: Failure | None = None
        self._heard: list[int] = []  # nodes whose failure is known
        self._is_done = False
        self._has_told = False
        self._others_know = False
        self._is_connecting = False
        self._must_leave = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smpc rendezvous", daemon=True)
        self._thread.start()

    @property
    def remote(self) -> Failure | None:
        """The first failure that other nodes have reported."""
        return self._remote

    def tell(self, failure: Failure) -> None:
        """Tell all ranks, and the other nodes; only the first call counts."""
        if self._own is None:
            self._own = failure
            self._wake.set()

    def finish(
        self,
        patience: float,
        interruption: Callable[[], Failure | None],
        is_hastened: Callable[[], bool] = lambda: False,
        *,
        looks_for_cause: bool = False,
    ) -> None:
        """This node's ranks have ended. After a success it waits for the other nodes' ranks. After a failure, or if the wait is
        interrupted, it waits at most `patience`, but until the other launchers can know this node's failure: at most a minute, and not if a
        signal shortens the end. `looks_for_cause`: this node's failures follow from one on another node, whose launcher gets time to report
        it before it counts as gone.
        """
        while True:
            stopped = interruption()
            if stopped is not None:
                self.tell(stopped)
            self._is_done = True
            self._wake.set()
            if self._own is not None or self._remote is not None or not self._thread.is_alive():
                break
            self._thread.join(_POLL_SECONDS)
        limit = time.monotonic() + _PUBLISH_SECONDS
        while self._own is not None and self._num_ranks < self._world_size and not self._others_know:
            if time.monotonic() > limit or is_hastened() or not self._thread.is_alive():
                break
            self._thread.join(_POLL_SECONDS)
        limit = time.monotonic() + (_SILENCE_SECONDS if looks_for_cause else 0.0)
        while self._num_ranks < self._world_size and not self._knows_cause() and self._thread.is_alive():
            if time.monotonic() > limit or is_hastened():
                break
            self._thread.join(_POLL_SECONDS)
        self._thread.join(patience)
        if self._thread.is_alive():
            self._must_leave = True
            atexit.register(self._await_thread)

    def _await_thread(self) -> None:
        """The process ends. A thread that Python stops in the midst of torch, its import or its store, would abort it, with a status of its
        own. One that waits for a store which is not there sleeps on, and is left alone.
        """
        limit = time.monotonic() + _LEAVE_SECONDS
        while self._thread.is_alive() and not self._is_connecting and time.monotonic() < limit:
            self._wake.set()
            self._thread.join(_POLL_SECONDS)

    def _knows_cause(self) -> bool:
        """Whether another node has told of something that is no consequence of yet another rank's end."""
        return self._remote is not None and (self._remote.rank < 0 or self._remote.order[0] == 0)

    def _run(self) -> None:
        try:
            store = self._open()
            self._serve(store)
        except RuntimeError as error:  # all of torch's store errors
            if not self._is_done:
                self._remote = Failure(
                    -1,
                    f"lost the store at {self._address}:{self._port}, which the launcher of node 0 hosts",
                    str(error).splitlines()[0] if str(error) else "",
                    1,
                )

    def _open(self) -> Store:
        from torch._C._distributed_c10d import TCPStore

        if self._listener is not None:
            return serve(self._listener, _CONNECT_TIMEOUT)
        self._is_connecting = True
        try:
            return TCPStore(self._address, self._port, is_master=False, timeout=_CONNECT_TIMEOUT)
        finally:
            self._is_connecting = False

    def _serve(self, store: Store) -> None:
        if self._num_ranks < self._world_size:
            import_module(
                "smpc.executor.failure.process_reports"
            )  # takes seconds, in which `_publish` would not hear what another node says
        number = store.add(f"{_PREFIX}/nodes", 1) - 1
        beats: dict[int, tuple[int, float]] = {}
        has_counted = False
        while True:
            is_done = self._is_done
            if self._own is not None and not self._has_told:
                self._has_told = True
                self._publish(store, self._own, number)
                self._others_know = self._listener is None
            self._tell_ends(store)
            if self._num_ranks < self._world_size:
                self._listen_to_others(store, number, beats)
            if is_done and not has_counted:
                store.add(f"{_PREFIX}/ended", self._num_ranks)
                has_counted = True
            if is_done and self._may_leave(store):
                if self._num_ranks < self._world_size:
                    self._listen_to_others(store, number, beats)  # what they have told before they left
                return
            if self._must_leave:
                return
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()

    def _may_leave(self, store: Store) -> bool:
        """Whether this thread is done: a failed launcher waits for the others' reports, the store's host until they have left."""
        all_ended = store.add(f"{_PREFIX}/ended", 0) >= self._world_size
        if self._listener is not None:
            return store.add(f"{_PREFIX}/left", 0) >= self._world_size - self._num_ranks
        if self._own is None or all_ended:
            store.add(f"{_PREFIX}/left", self._num_ranks)
            return True
        return False

    def _publish(self, store: Store, failure: Failure, number: int) -> None:
        fields = [failure.rank, failure.headline, failure.text, failure.status, failure.order]
        store.set(f"{_PREFIX}/failure/{number}", json.dumps(fields))
        from torch._C._distributed_c10d import PrefixStore

        from smpc.executor.failure.process_reports import ProcessReport, publish

        publish(
            PrefixStore(f"{STORE_PREFIX}{self._attempt}", store),
            ProcessReport(failure.rank, failure.headline, failure.text),
        )

    def _tell_ends(self, store: Store) -> None:

        for rank in self._left_early():
            if rank not in self._told_ends:
                self._told_ends.append(rank)
                store.append(f"{STORE_PREFIX}{self._attempt}/{ENDED}", f"{rank},")  # type: ignore[attr-defined]

    def _listen_to_others(self, store: Store, number: int, beats: dict[int, tuple[int, float]]) -> None:
        store.add(f"{_PREFIX}/beat/{number}", 1)
        now = time.monotonic()
        for other in range(store.add(f"{_PREFIX}/nodes", 0)):
            if other != number and other not in self._heard and store.check([f"{_PREFIX}/failure/{other}"]):
                self._heard.append(other)
                self._take(_failure_of_payload(store.get(f"{_PREFIX}/failure/{other}")))
            beat = store.add(f"{_PREFIX}/beat/{other}", 0)
            if other == number or beats.get(other, (-1, 0.0))[0] != beat:
                beats[other] = (beat, now)
            elif now - beats[other][1] > _SILENCE_SECONDS and not store.check([f"{_PREFIX}/left/{other}"]):
                self._take(
                    Failure(
                        -1, f"the launcher of another node has not been heard of for {_SILENCE_SECONDS:.0f} s", "", 1
                    )
                )
        if self._is_done:
            store.set(f"{_PREFIX}/left/{number}", "")

    def _take(self, failure: Failure) -> None:
        if self._remote is None or failure.order < self._remote.order:
            self._remote = failure


def _failure_of_payload(payload: bytes) -> Failure:
    """The failure that another launcher has written into the store."""
    try:
        rank, headline, text, status, (kind, when, last) = json.loads(payload)
        return Failure(int(rank), str(headline), str(text), int(status), (float(kind), float(when), int(last)))
    except (ValueError, TypeError):
        return Failure(-1, f"the store of this job has something that no launcher wrote: {payload[:60]!r}", "", 1)


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
