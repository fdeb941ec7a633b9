"""When one rank fails, all ranks stop, and show that rank's traceback.

Terms
    report      the formatted traceback of the first rank that failed, in the store that all ranks share
    watcher     a daemon thread in every process that looks into the store twice a second

What happens when rank k raises inside a step:

    rank k      reports, closes its transport, raises on
    its peers   a wait for rank k ends as the connection closes; they find the report, close their transports
                and raise PeerError
    the others  the same, one after another
    stragglers  ranks that compute, sleep or wait in something that does not end: their watchers print the
                report and end the process with status 1 after a period of grace

A process that dies without a word (kill -9) closes its connections as well; its peers report the loss. A step
that takes longer than `step_timeout` is reported with the instruction in which it hangs and the stacks of all
threads.

Example: `with monitor.step(interpreter.where, interpreter.close): interpreter.run(inputs, on_output)`
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from torch.distributed.distributed_c10d import Store

from smpc.errors import PeerError, TransportError

_COUNT = "smpc/errors"
_REPORT = "smpc/error"
_STALL = "smpc/stall"


class FailureMonitor:
    """One process's part. `rank` is the global rank.

    `store` is used from two threads and must live as long as the job.
    All times are seconds. `grace` is how long a process may take to end by itself after a peer's failure.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        step_timeout: float = 1800.0,
        poll_interval: float = 0.5,
        grace: float = 3.0,
    ) -> None:
        self._store = store
        self._rank = rank
        self._step_timeout = step_timeout
        self._poll_interval = poll_interval
        self._grace = grace
        self._stop = threading.Event()
        self._seen: str | None = None
        self._raised = False  # this process is ending by itself
        self._where: Callable[[], str] | None = None  # inside a step
        self._deadline = float("inf")
        self._watcher = threading.Thread(target=self._watch, name="smpc failure watcher", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """End the watcher; before the store closes."""
        self._stop.set()
        self._watcher.join()

    def report(self, error: BaseException, where: str = "") -> None:
        """Tell all ranks of an exception. The first report of the job counts."""
        text = "".join(traceback.format_exception(error))
        self._publish(f"rank {self._rank} failed{where and ' in ' + where}:\n{text}")

    def _publish(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store's host may be the one that died
            if self._store.add(_COUNT, 1) == 1:
                self._store.set(_REPORT, text)

    def peer_report(self) -> str | None:
        """The report, if any rank has failed. Once seen it is kept: the store may end with its host."""
        if self._seen is None:
            with contextlib.suppress(RuntimeError):
                self._seen = self._read()
        return self._seen

    def _read(self) -> str | None:
        if not self._store.check([_REPORT]):
            return None
        report: bytes = self._store.get(_REPORT)
        return report.decode(errors="replace")

    @contextlib.contextmanager
    def step(self, where: Callable[[], str], close: Callable[[], None]) -> Iterator[None]:
        """Guards one step. `where` names the current instruction; `close` closes the transport."""
        failed = self.peer_report()
        if failed is not None:
            self._raised = True
            raise _peer_error(failed)
        self._where, self._deadline = where, time.monotonic() + self._step_timeout
        try:
            yield
        except BaseException as error:
            self._deadline = float("inf")
            failed = self._cause(error)
            if failed is None:
                self.report(error)
            self._raised = True
            with contextlib.suppress(RuntimeError):
                close()
            if failed is not None:
                raise _peer_error(failed) from error
            time.sleep(2 * self._poll_interval)  # this process may host the store: let all watchers read the report
            raise
        finally:
            self._where, self._deadline = None, float("inf")

    def _cause(self, error: BaseException) -> str | None:
        """The peer's report, if one made this rank fail. A lost connection may be noticed before its reason."""
        patience = time.monotonic() + (self._grace if isinstance(error, TransportError) else 0.0)
        while True:
            failed = self.peer_report()
            if failed is not None or time.monotonic() >= patience:
                return failed
            time.sleep(0.02)

    def _watch(self) -> None:
        since: float | None = None  # a reason to end was first seen
        while not self._stop.wait(self._poll_interval):
            if self._raised:
                return
            now = time.monotonic()
            if now > self._deadline + self._grace:
                self._end(self._stalled())
            reason = self._reason()
            since = None if reason is None else since or now
            if reason is not None and since is not None and now > since + self._grace:
                self._end(reason)

    def _reason(self) -> str | None:
        """Why this process should end, if it should."""
        try:
            self._seen = self._seen or self._read()
        except RuntimeError as error:
            if self._where is not None:
                return f"the store that all ranks share is lost, its host has died: {error}"
        return None if self._seen is None else str(_peer_error(self._seen))

    def _stalled(self) -> str:
        where = self._where() if self._where is not None else "no step"
        faulthandler.dump_traceback(all_threads=True)
        text = f"rank {self._rank} failed: a step took longer than {self._step_timeout:g} s; the ranks stand at\n"
        text += "\n".join(self._gather(f"rank {self._rank}: {where}"))
        self._publish(text)
        return text

    def _gather(self, line: str) -> list[str]:
        """This line and those of the other ranks that stall too."""
        lines = [line]
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_STALL}/{self._store.add(_STALL, 1)}", line)
            time.sleep(self._grace / 2)
            lines = [self._store.get(f"{_STALL}/{n + 1}").decode() for n in range(self._store.add(_STALL, 0))]
        return sorted(lines)

    def _end(self, text: str) -> None:
        if not self._raised:
            print(f"rank {self._rank} ends: {text}", file=sys.stderr, flush=True)
            os._exit(1)


def _peer_error(report: str) -> PeerError:
    return PeerError(f"another rank failed first; its report:\n{report}")
