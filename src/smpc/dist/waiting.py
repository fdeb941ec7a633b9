"""Local rank 0 of each node goes first: downloads, caches, compiled extensions.

    with run_local_rank_zero_first():                       the others begin when it is through
    with busy_wait_for_local_rank_zero():                   all begin; the others look for a file that it writes at its end
    with local_rank_zero_download_and_wait("a.bin"):        the others begin when the file is there; needs no process groups

When the body fails on local rank 0, all ranks end with an error that says so: no rank waits for ever.
"""

from __future__ import annotations

import os
import random
import string
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from smpc.dist.collectives import all_gather_object, has_others
from smpc.dist.rank_and_size import get_global_rank, get_local_rank, get_node_rank
from smpc.dist.process_groups import checked_seconds
from smpc.errors import PeerError, TransportError, UsageError

_POLL_SECONDS = 0.1
_DEFAULT_SECONDS = 1800.0
_LETTERS = string.ascii_letters + string.digits
_WRONG = "failed"


@contextmanager
def run_local_rank_zero_first() -> Iterator[None]:
    """The body runs on local rank 0 of each node first, then on the others. Collective.

    If it fails on a local rank 0, that one raises its own exception, and all others PeerError, without having run it.
    """
    if not has_others("run_local_rank_zero_first"):
        yield
        return
    if get_local_rank() != 0:
        _check_waited_outcomes(all_gather_object(None))
        yield
        return
    try:
        yield
    except BaseException as error:
        all_gather_object(_told_to_waiting(error))
        raise
    _check_waited_outcomes(all_gather_object(None))


def _told_to_waiting(error: BaseException) -> str:
    return f"rank {get_global_rank()}, local rank {get_local_rank()}: {type(error).__name__}: {str(error)[:500]}"


def _check_waited_outcomes(outcomes: list[str | None]) -> None:
    failed = [outcome for outcome in outcomes if outcome is not None]
    if failed:
        raise PeerError("; ".join(failed))


@contextmanager
def local_rank_zero_download_and_wait(expected_file_path: str, timeout: float | None = None) -> Iterator[None]:
    """Local rank 0 runs the body at once; the others when the file is there. Needs no process groups.

    `expected_file_path`: the file that the body makes. `timeout`: seconds that the others wait at most, 1800 by default; then
    TransportError. Raises ConfigError for a wrong timeout.
    """
    seconds = _DEFAULT_SECONDS if timeout is None else checked_seconds(timeout)
    if get_local_rank() != 0:
        _await_file(expected_file_path, seconds)
    yield


def _await_file(path: str, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > limit:
            raise TransportError(
                f"local rank {get_local_rank()} waited {seconds:g} s for {path!r}, which local rank 0 should write; look for what it does, "
                "or give a larger timeout"
            )
        time.sleep(_POLL_SECONDS)


def get_node_signal_file_name(rng: random.Random | None = None) -> str:
    """A name for a file of this node, `._signal_file_node{number}_{6 letters or digits}`: the same on all its ranks. Collective.

    `rng`: what local rank 0 draws from; by default something that no seed of the script changes.
    """
    drawn = "".join((rng or random.SystemRandom()).choice(_LETTERS) for _ in range(6))
    own = (get_node_rank(), get_local_rank(), drawn)
    of_nodes = {node: letters for node, local_rank, letters in all_gather_object(own) if local_rank == 0}
    return f"._signal_file_node{own[0]}_{of_nodes.get(own[0], drawn)}"


def write_signal_file(signal_file_name: str, dir_path: str | None = None) -> str:
    """Write an empty file on local rank 0; returns its path, on every rank.

    `signal_file_name`: its name, as from `get_node_signal_file_name`. `dir_path`: its folder, by default the working directory.
    """
    return _write_signal(signal_file_name, dir_path, "")


def _write_signal(name: str, dir_path: str | None, text: str) -> str:
    """Writes the signal file, once for each host."""
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise UsageError(f"signal_file_name: expected the plain name of a file, found {name!r}")
    path = os.path.join(dir_path or os.getcwd(), name)
    if get_local_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        draft = f"{path}.draft"
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    return path


@contextmanager
def busy_wait_for_local_rank_zero(dir_path: str | None = None) -> Iterator[None]:
    """All ranks run the body; the others then wait for local rank 0's end, which a file in `dir_path` tells. Collective.

    Unlike a collective call, the wait may take long (1800 s) without a timeout of the process group. The file is removed in the end. A rank
    whose body fails raises its own exception, and all others PeerError. Raises UsageError on all ranks, before any body, where local rank 0
    cannot write to the folder, or ranks of a node name different ones.
    """
    name = get_node_signal_file_name()
    outcome: str | None = None
    path = os.path.join(os.path.realpath(dir_path or os.getcwd()), name)
    _check_folder(path)
    try:
        try:
            yield
        except BaseException as error:
            outcome = _told_to_waiting(error)
            raise
        finally:
            _write_signal(
                name, os.path.dirname(path), _WRONG if outcome else ""
            )  # the body may have changed the working directory
            if outcome is None and get_local_rank() != 0:
                _await_file(path, _DEFAULT_SECONDS)
    except BaseException as error:
        _exchange_waited_outcome(outcome or _told_to_waiting(error), path)
        raise
    _check_waited_outcomes(_exchange_waited_outcome(None, path))


def _check_folder(path: str) -> None:
    """Before anybody waits for a file: one folder on all ranks of a node, to which local rank 0 can write. Collective."""
    folder, found = os.path.dirname(path), None
    if get_local_rank() == 0:
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            found = f"dir_path: local rank 0 of node {get_node_rank()} cannot write to {folder!r}: {error.strerror}"
    told = all_gather_object((get_node_rank(), get_local_rank(), folder, found))
    wrong = [problem for *_, problem in told if problem is not None]
    of_zero = {node: where for node, local_rank, where, _ in told if local_rank == 0}
    wrong += [
        f"dir_path: expected {of_zero[node]!r}, as local rank 0 of node {node} has it, found {where!r} on local rank {local_rank}"
        for node, local_rank, where, _ in told
        if where != of_zero.get(node, where)
    ]
    if wrong:
        raise UsageError("busy_wait_for_local_rank_zero: " + "; ".join(wrong[:4]))


def _exchange_waited_outcome(outcome: str | None, path: str) -> list[str | None]:
    """The outcome of all ranks' bodies; after this nobody needs the file."""
    try:
        return all_gather_object(outcome)
    finally:
        if get_local_rank() == 0:
            with suppress(OSError):
                os.remove(path)
