"""When one rank fails or stalls, all ranks stop, and show which one it was and why.

Terms
    report      what is known of the first failure, in the store that all ranks share: see `smpc.executor.failure.process_reports`
    watcher     a daemon thread in every process that looks into the store twice a second, until the process ends: the interpreter
                must not end while it is inside the store's native code, which would abort
    watch       a span of the main thread that may take so long: a step, a first step (which compiles), a checkpoint
    round       one exchange of standings, when a watch has taken too long: see `smpc.executor.failure.stall`

What happens when rank k raises inside a step:

    rank k      reports, closes its transport, raises on
    its peers   a wait for rank k ends as the connection closes; they find the report, close their transports
                and raise PeerError
    the others  the same, one after another
    stragglers  ranks that compute, sleep or wait in something that does not end: their watchers print the
                report and end the process with status 1 after a period of grace

A process that dies without a word (kill -9) closes its connections as well; its peers report the loss.

What happens when nothing moves:

    any rank    its watch has lasted longer than allowed, or before its first step it has waited for so long, or it waits for a rank that
                is gone (see `smpc.executor.failure.start`): the watcher calls a round
    all ranks   their watchers tell where their main threads are; whoever does not answer is silent
    any rank    finds the one that the others wait for. If that one may go on for some time (it compiles, it
                writes a checkpoint), so may the caller; if not, the report names it, with its stack
    all ranks   print the report and end with status 1

The store may be silent itself: where no launcher serves it, it ends and stops with rank 0. A second thread, which does not ask it, ends the
process then.

Native code that never gives Python's lock back stops the watcher too. Then faulthandler's own thread prints the stacks
and ends the process, a moment after the others have noticed.

Between `smp.init` and the end of the first step the monitor follows the rank's phases: `monitor.start`.

Example: `with monitor.step(interpreter.where, interpreter.close): interpreter.run(inputs, on_output)`
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from torch.distributed.distributed_c10d import PrefixStore, Store

from smpc.errors import PeerError, TransportError
from smpc.executor.failure.process_reports import FOREIGN, REPORT, ProcessReport, find, publish, signature
from smpc.executor.failure.stall import (
    WAITS,
    Activity,
    Standing,
    activity_of,
    find_stalled,
    frame_of,
    last_collectives,
    report_of,
    stack_of,
)
from smpc.executor.failure.start import Start

_ROUND = "smpc/stall"
_SHOWN = "smpc/shown"
_ANSWER_SECONDS = 2.0  # the others' watchers look four times in that long
_LONGEST_ANSWER_SECONDS = 4.5  # where several are silent, which a busy host explains better than native code
_STALL_GRACE = 2.0  # for all ranks to have shown the report
_STORE_SECONDS = 4.0  # that the store may take to answer, after the timeout
_LAST_RESORT = 6.0  # after the timeout; the other ranks have reported by then
_AFTER_STEP = 1 << 40  # the position of a rank that is between two steps
_LOST = ("Connection", "connect", "Broken pipe", "Timed out", "ocket")  # what torch says where a peer is gone
_BACKENDS = ("gloo", "NCCL")  # who says it, in a step, where code of the script may have connections of its own


class FailureMonitor:
    """One process's part. `rank` is the global rank.

    `store` is used from two threads and must live as long as the job. All times are seconds. `grace` is how long a process may take to end
    by itself after a peer's failure. `waits`: more files in which the main thread waits for peers, `reduces`: whether backward passes do.
    `on_end` gets the report before the watcher ends this process. `start_timeout`: how long this rank may wait for others until its first
    step is done; None where there is no start to watch. `ended` tells the ranks that a launcher knows to have ended. `session` sets apart
    what the sessions of one job leave in the store.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        *,
        step_timeout: float = 1800.0,
        poll_interval: float = 0.5,
        grace: float = 3.0,
        waits: Sequence[str] = (),
        reduces: bool = False,
        on_end: Callable[[ProcessReport], None] = lambda report: None,
        start_timeout: float | None = None,
        ended: Callable[[], Sequence[int]] = lambda: (),
        session: int = 0,
    ) -> None:
        self._store = store
        self._own: Store = PrefixStore(f"session{session}", store) if session else store
        self._rank = rank
        self._pid = os.getpid()
        self._num_ranks = num_ranks
        self._step_timeout = step_timeout
        self._poll_interval = poll_interval
        self._grace = grace
        self._waits = tuple(waits)
        self._reduces = reduces
        self._on_end = on_end
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._seen: ProcessReport | None = None
        self._raised = False  # this process is ending by itself
        self._where: Callable[[], str] | None = None  # inside a watch
        self._position: Callable[[], int] = lambda: 0
        self._deadline = float("inf")
        self.start = Start(self._own, rank, start_timeout, ended)
        self._timeout = step_timeout  # of the current watch
        self.num_steps = 0  # that this rank has begun
        self._round = 0  # the next one to answer
        self._place, self._since = "", time.monotonic()
        self._is_armed = False
        self.polled: Callable[[], None] = lambda: None  # what else the watcher looks after
        self._showing, self._has_shown = threading.Lock(), False
        self._looked = time.monotonic()  # when the watcher last had an answer of the store
        self._watcher = threading.Thread(target=self._watch, name="smpc failure watcher", daemon=True)
        self._watcher.start()
        threading.Thread(target=self._watch_store, name="smpc store watcher", daemon=True).start()
        atexit.register(self.stop)

    @property
    def store(self) -> Store:
        """Messages between the ranks of this session."""
        return self._own

    def stop(self) -> None:
        """End the watcher; before the store closes."""
        atexit.unregister(self.stop)
        if os.getpid() != self._pid:
            return  # a child that the script has forked has no watcher
        self._stop.set()
        self._watcher.join(_STORE_SECONDS)
        if not self._watcher.is_alive():  # the store answers
            self.start.leave()
        self._disarm()

    def report(self, error: BaseException, where: str = "") -> None:
        """Tell all ranks of an exception. The first report of the job counts."""
        text = "".join(traceback.format_exception(error)).rstrip()
        self._publish(ProcessReport(self._rank, f"rank {self._rank} failed{where and ' in ' + where}", text))

    def _publish(self, report: ProcessReport) -> None:
        with contextlib.suppress(RuntimeError):  # the store's host may be the one that died
            publish(self._store, report)

    def peer_report(self) -> ProcessReport | None:
        """The report, if any rank has failed. Once seen it is kept: the store may end with its host."""
        if self._seen is None:
            with contextlib.suppress(RuntimeError):
                self._seen = find(self._store) if self._store.check([REPORT]) else None
        return self._seen

    # -- the main thread -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(
        self,
        where: Callable[[], str],
        *,
        timeout: float | None = None,
        position: Callable[[], int] | None = None,
    ) -> Iterator[None]:
        """Limits how long the body may take; `timeout` is a step's if None. Inside another watch it does nothing.

        `where` names what the body is doing. `position` is how far it has come, for a body that is a step; None for other things.
        """
        if self._where is not None:
            yield
            return
        if position is not None:
            self.num_steps += 1
            self._position = position
        self._timeout = self._step_timeout if timeout is None else timeout
        self._deadline = time.monotonic() + self._timeout
        self._where = where
        try:
            yield
        finally:
            self._where, self._position, self._deadline = None, lambda: _AFTER_STEP, float("inf")

    def extend(self, timeout: float) -> None:
        """Give the current watch at least so long from now on."""
        deadline = time.monotonic() + timeout
        if deadline > self._deadline:
            self._timeout, self._deadline = timeout, deadline

    @contextlib.contextmanager
    def exchange(self, what: str, timeout: float, works: float = 0.0) -> Iterator[None]:
        """An exchange with other ranks outside of steps, which may take `timeout` once the first step is done.

        `works`: how long a rank may work in an exchange while others wait. If a connection is lost, raises the error that ended it.
        """
        try:
            limit = self.watch(lambda: what, timeout=timeout) if self.start.is_over else contextlib.nullcontext()
            with self.start.within(what, works), limit:
                yield
        except RuntimeError as error:
            if not any(words in str(error) for words in _LOST):
                raise
            raise self._explained(error, what) from error

    def _explained(self, error: RuntimeError, what: str) -> TransportError:
        """Why a connection was lost: the peer's report, or who is gone."""
        patience = time.monotonic() + self._grace
        gone: list[int] = []
        while not gone and time.monotonic() < patience:
            failed = self.peer_report()
            if failed is not None:
                self._raised = True
                return _peer_error(failed)
            gone = self.start.all_gone()
            time.sleep(0.02)
        found = self._disconnected(error, what)
        return self._lost(found) or found

    def _lost(self, error: BaseException) -> PeerError | None:
        """An error that names the ranks that are gone, for one that tells of a lost connection."""
        if not isinstance(error, TransportError):
            return None
        gone = [str(self._silent(rank)) for rank in self.start.all_gone()]
        return PeerError(f"{error}\n{'; '.join(gone)}") if gone else None

    def _silent(self, rank: int) -> Standing:
        """The known facts about a rank that does not answer."""
        try:
            signed, has_left = signature(self._own, rank), rank in self.start.left()
        except RuntimeError:  # the store is gone
            signed, has_left = None, False
        if signed is None:
            return Standing(rank, Activity.SILENT, fate=self.start.fate(rank))
        if has_left and not signed.process.has_ended:
            return Standing(rank, Activity.SILENT, signed.place, fate="it has called smp.shutdown, or has ended")
        return Standing(rank, Activity.SILENT, signed.place, fate=signed.process.fate)

    @contextlib.contextmanager
    def step(
        self, where: Callable[[], str], close: Callable[[], None], position: Callable[[], int] = lambda: 0
    ) -> Iterator[None]:
        """Guards one step: watches it, and stops the other ranks if it fails. `close` closes the transport."""
        failed = self.peer_report()
        if failed is not None:
            self._raised = True
            if failed.is_stall:
                self._show(failed)
            raise _peer_error(failed)
        try:
            with self.watch(where, position=position):
                yield
        except BaseException as raised:
            if os.getpid() != self._pid:
                raise  # a child that the script has forked is no rank
            self._deadline = float("inf")
            error = self._translated(raised, where())
            failed = self._cause(error)
            lost = self._lost(error) if failed is None else None
            if failed is None:
                self.report(lost or error)
            self._raised = True
            with contextlib.suppress(RuntimeError):
                close()
            if failed is not None:
                if failed.is_stall:
                    self._show(failed)
                raise _peer_error(failed) from error
            time.sleep(2 * self._poll_interval)  # this process may host the store: let all watchers read the report
            if lost is not None:
                raise lost from error
            if error is not raised:
                raise error from raised
            raise

    def _translated(self, error: BaseException, where: str) -> BaseException:
        """A TransportError in place of what a collective of torch.distributed says of a lost connection."""
        text = str(error)
        is_lost = isinstance(error, RuntimeError) and not isinstance(error, TransportError)
        if is_lost and any(word in text for word in _LOST) and any(name in text for name in _BACKENDS):
            return self._disconnected(error, where)
        return error

    def _disconnected(self, error: BaseException, where: str) -> TransportError:
        return TransportError(f"{where}: rank {self._rank} lost the connection to its peers: {error}")

    def _cause(self, error: BaseException) -> ProcessReport | None:
        """The peer's report, if one made this rank fail. A lost connection may be noticed before its reason."""
        patience = time.monotonic() + (self._grace if isinstance(error, TransportError) else 0.0)
        while True:
            failed = self.peer_report()
            if failed is not None or time.monotonic() >= patience:
                return failed
            time.sleep(0.02)

    # -- the watcher ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        since: float | None = None  # a reason to end was first seen
        while not self._stop.wait(self._poll_interval):
            self.polled()
            if self._raised:
                self._disarm()
                return
            now = self._looked = time.monotonic()
            self._note_place(now)
            self._note_wait(now)
            self._arm(now)
            reason = self._reason()
            if reason is None:
                since = None
                continue
            if since is None:
                since = now
                if reason.is_stall:
                    self._show(reason)
            if reason.is_stall:
                self._await_others(since, reason.rank)
            if reason.is_stall or now >= since + self._grace:
                self._end(reason)

    def _watch_store(self) -> None:
        """End the process where the store does not answer, and the main thread waits in vain."""
        before = time.monotonic()
        while not self._stop.wait(self._poll_interval):
            now = time.monotonic()
            if now > before + self._poll_interval + _STORE_SECONDS:  # this process was stopped itself
                self._looked = now
            before = now
            limit = self._deadline if self.start.is_over else min(self._deadline, self._looked + self.start.timeout)
            if (
                self._raised
                or now < limit + _STORE_SECONDS
                or now < self._looked + _LONGEST_ANSWER_SECONDS + _STORE_SECONDS
            ):
                continue
            reason = ProcessReport(
                FOREIGN,
                f"the store that all ranks share has not answered rank {self._rank} for {now - self._looked:.0f} s: the launcher that "
                "serves it, or rank 0 where there is none, is stopped, or cannot be reached",
                stack_of(frame_of(self._main)),
                True,
            )
            self._show(reason)
            self._end(reason)

    def _reason(self) -> ProcessReport | None:
        """Why this process should end, if it should."""
        try:
            self._seen = self._seen or find(self._store)
            if self._seen is None:
                if self._own.check([f"{_ROUND}/{self._round}"]):
                    self._answer()
                if time.monotonic() > self._deadline or self.start.is_late:
                    self._call_round([])
                elif gone := self.start.gone():
                    self._call_round(gone)
        except RuntimeError as error:
            if self._where is not None or self.start.waited > 0.0:
                dead = ", ".join(map(str, self.start.dead()))
                whose = f" (ended: rank {dead})" if dead else ""
                return ProcessReport(
                    FOREIGN, f"the store that all ranks share is lost, its host has died{whose}: {error}"
                )
        return self._seen

    def _await_others(self, since: float, stalled: int) -> None:
        """Nothing ends by itself in a stall; but the first process that ends takes the others' connections along."""
        keys = [f"{_SHOWN}/{rank}" for rank in range(self._num_ranks) if rank != stalled]
        with contextlib.suppress(RuntimeError):
            self._own.set(f"{_SHOWN}/{self._rank}", "")
            while time.monotonic() < since + _STALL_GRACE and not self._own.check(keys):
                time.sleep(0.05)

    def _note_place(self, now: float) -> None:
        """How long the main thread has been where it is, to the interval between two looks."""
        place = self._standing_place()
        if place != self._place:
            self._place, self._since = place, now

    def _note_wait(self, now: float) -> None:
        """Before the first step is done: whether the main thread waits for others."""
        if not self.start.is_over:
            frame = frame_of(self._main)
            self.start.look(frame, activity_of(frame, self._waits, self._reduces) in WAITS, now)

    def _standing_place(self) -> str:
        where = self._where
        if not self.start.is_over:
            return self.start.place if where is None else f"{self.start.place}: {where()}"
        if where is None:
            return f"after step {self.num_steps}, outside smpc: data loading, the optimizer or other code of the script"
        return f"step {self.num_steps}, {where()}"

    def _answer(self) -> Standing:
        """Report this rank's position."""
        number, self._round = self._round, self._round + 1
        now = time.monotonic()
        self._note_place(now)
        frame = frame_of(self._main)
        where = self._where
        standing = Standing(
            rank=self._rank,
            activity=activity_of(frame, self._waits, self._reduces),
            place=self._place,
            progress=(self.num_steps, self._position() if self.num_steps else self.start.phase),
            seconds=now - self._since,
            allowed=max(0.0 if where is None else self._deadline - now, self.start.allowed),
            stack=stack_of(frame),
            flight=last_collectives(),
        )
        self._own.set(f"{_ROUND}/{number}/{self._rank}", standing.to_json())
        return standing

    def _call_round(self, gone: Sequence[int]) -> None:
        """This rank has waited for too long, or for ranks that are gone: find out why."""
        number = self._round
        self._own.set(f"{_ROUND}/{number}", str(self._rank))
        own = self._answer()
        keys = [f"{_ROUND}/{number}/{rank}" for rank in range(self._num_ranks)]
        self._await_answers(keys)
        if self._store.check([REPORT]):
            return
        standings = [
            own
            if rank == self._rank
            else Standing.read(rank, self._own.get(key))
            if self._own.check([key])
            else self._silent(rank)
            for rank, key in enumerate(keys)
        ]
        report = self._judged(standings, gone)
        if report is not None:
            publish(self._store, report)
            self._seen = find(self._store)

    def _judged(self, standings: Sequence[Standing], gone: Sequence[int]) -> ProcessReport | None:
        """The report of a round that has found the rank which the others wait for; None if they may keep waiting."""
        if gone:
            others = [standing for standing in standings if standing.rank not in gone]
            if self.start.waited == 0.0 or any(standing.activity not in WAITS for standing in others):
                return None  # one of them may be what this rank waits for
            return report_of(standings, self.start.waited, gone=gone)
        if time.monotonic() <= self._deadline and not self.start.is_late:
            return None  # the watch has ended meanwhile
        stalled = find_stalled(standings)
        if stalled.allowed > 0.0:
            if self.start.is_late:
                self.start.extend(stalled.allowed)
            if time.monotonic() > self._deadline:
                self.extend(stalled.allowed)
            return None
        if self.start.is_late:
            return report_of(standings, self.start.timeout, key="start_timeout")
        is_first = self.num_steps == 1 and not self.start.is_over
        return report_of(standings, self._timeout, key="start_timeout" if is_first else "")

    def _await_answers(self, keys: Sequence[str]) -> None:
        started = time.monotonic()
        while time.monotonic() < started + _LONGEST_ANSWER_SECONDS:
            if self._store.check([REPORT]):
                return  # another rank's round has come to an end
            num_missing = sum(not self._own.check([key]) for key in keys)
            if num_missing == 0 or (num_missing == 1 and time.monotonic() > started + _ANSWER_SECONDS):
                return
            time.sleep(0.05)

    def _show(self, report: ProcessReport) -> None:
        """Print a report, once: this thread or the other one."""
        with self._showing:
            if not self._has_shown:
                with contextlib.suppress(Exception):  # whatever the script has made of stderr, this process must end
                    print(f"rank {self._rank} ends: {report}", file=sys.stderr, flush=True)
            self._has_shown = True

    def _end(self, reason: ProcessReport) -> None:
        if not self._raised:
            if not reason.is_stall:
                self._show(ProcessReport(reason.rank, str(_peer_error(reason))))
            self._on_end(reason)
            os._exit(1)

    # -- the last resort -----------------------------------------------------------------------------------------------

    def _arm(self, now: float) -> None:
        """Put the end of this process off, while its watcher still runs."""
        deadline = min(self._deadline, float("inf") if self.start.is_over else now + self.start.timeout)
        if deadline == float("inf"):
            self._disarm()
            return
        with contextlib.suppress(Exception):  # stderr may be closed, None, no file, or any object of the script's
            faulthandler.dump_traceback_later(max(deadline - now, 0.0) + _LAST_RESORT, exit=True, file=sys.stderr)
            self._is_armed = True

    def _disarm(self) -> None:
        if self._is_armed:
            faulthandler.cancel_dump_traceback_later()
            self._is_armed = False


def _peer_error(report: ProcessReport) -> PeerError:
    return PeerError(str(report) if report.rank == FOREIGN else f"another rank failed first; its report:\n{report}")
