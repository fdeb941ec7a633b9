"""The launcher's side of the store: hosts it, tells the ranks and the other hosts' launchers of failures, hears of theirs.

Terms
    node    what one launcher started; several on one host in tests. The launcher of node 0 hosts the store
    order   failures sort by it: causes before consequences, then by time. Hosts' clocks need not agree to better than a second, for
            a death that left no report comes before the reports of the ranks that noticed it
    beat    a number that every launcher of several nodes raises all the time; if it stops, the launcher is gone

All of it happens on a thread of its own, because importing torch takes longer than the ranks need to start, and a connection to another
host may not come about. The keys begin with `smpc_run/`; what is read from them is parsed as text, never unpickled.
"""

from __future__ import annotations

import atexit
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_SECONDS = 0.25
_CONNECT_TIMEOUT = timedelta(minutes=30)  # the ranks' own timeout for the start is shorter
_SILENCE_SECONDS = 15.0
_PREFIX = "smpc_run"
_IMPORT_SECONDS = 60.0  # that the end of the process waits for torch to be imported
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
        self._wake, self._has_torch = threading.Event(), threading.Event()
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
        if not self._has_torch.is_set():
            atexit.register(self._await_import)

    def _await_import(self) -> None:
        """The process ends. A thread that Python stops in the midst of importing torch would abort it, with a status of its own."""
        self._has_torch.wait(_IMPORT_SECONDS)
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
        try:
            from torch._C._distributed_c10d import TCPStore

            from smpc.launch.store import serve
        finally:
            self._has_torch.set()
        if self._listener is not None:
            return serve(self._listener, _CONNECT_TIMEOUT)
        return TCPStore(self._address, self._port, is_master=False, timeout=_CONNECT_TIMEOUT)

    def _serve(self, store: Store) -> None:
        if self._num_ranks < self._world_size:
            import_module(
                "smpc.executor.failure.processes"
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

        from smpc.executor.failure.processes import ProcessReport, publish
        from smpc.launch.store import STORE_PREFIX

        publish(
            PrefixStore(f"{STORE_PREFIX}{self._attempt}", store),
            ProcessReport(failure.rank, failure.headline, failure.text),
        )

    def _tell_ends(self, store: Store) -> None:
        from smpc.launch.store import ENDED, STORE_PREFIX

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
