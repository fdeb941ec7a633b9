"""A step of a pipeline that no monitor watches: the rank that fails tells the others why, and closes the connections.

    rank k      leaves its traceback in the store of torch.distributed, closes its transport, raises on
    its peers   a wait for rank k ends as the connection closes; they find the report, close their transports and raise PeerError

Without process groups nothing is told, as there are no peers.

Example: `with told_to_peers("runtime0", rank, interpreter.close): interpreter.run(inputs, on_output)`
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from smpc.errors import PeerError, TransportError
from smpc.executor.failure.process_reports import ProcessReport, find, publish

_GRACE = 3.0  # seconds in which the reason of a lost connection may come


@contextlib.contextmanager
def told_to_peers(name: str, rank: int, close: Callable[[], None]) -> Iterator[None]:
    """Around a step. `name`: of the pipeline, alike on its ranks. `rank`: this process's, of the pipeline."""
    try:
        yield
    except BaseException as error:
        store = PrefixStore(f"smpc/{name}", _get_default_store()) if dist.is_initialized() else None
        failed = None if store is None else _found(store, _GRACE if isinstance(error, TransportError) else 0.0)
        if store is not None and failed is None:
            text = "".join(traceback.format_exception(error)).rstrip()
            with contextlib.suppress(RuntimeError):  # the store's host may be the one that died
                publish(store, ProcessReport(rank, f"pipeline rank {rank} failed", text))
        with contextlib.suppress(RuntimeError):
            close()
        if failed is not None and isinstance(error, TransportError):
            raise PeerError(f"another rank failed first; its report:\n{failed}") from error
        raise


def _found(store: Store, patience: float) -> ProcessReport | None:
    until = time.monotonic() + patience
    while True:
        with contextlib.suppress(RuntimeError):
            found = find(store)
            if found is not None or time.monotonic() >= until:
                return found
        if time.monotonic() >= until:
            return None
        time.sleep(0.02)
