"""Locks on folders: of a draft, while the process that writes it lives; of a run's folder, while entries in it are renamed.

    lock = make_locked(path)         a new folder that is this process's until it closes the lock, or ends
    with abandoned(path) as is_so:   whether nobody holds that lock any more; nobody takes it meanwhile
    with publishing(path):           one process or thread at a time numbers, renames and marks checkpoints in a folder

All are flock on a file, which the kernel gives up when the process dies, however that happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator

from smpc.errors import CheckpointError

LOCK = ".lock"
PUBLISHING = ".publishing"
PATIENCE = 60.0  # seconds; publishing is a few renames
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_INTERVAL = 0.01


class Lock:
    """A descriptor that holds a lock. Closing it again does nothing: by then its number may belong to another file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Give the lock up."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def make_locked(parent: str, name: str, state: str) -> tuple[str, Lock]:
    """Make a hidden folder for drafts, 0700, that belongs to this process until it closes the lock: `.name.1f0a9c3e.state` in `parent`.

    Holds the lock of `parent` meanwhile, so that no other process considers the folder abandoned before it is locked.
    """
    with publishing(parent):
        path = os.path.join(parent, f".{name}.{secrets.token_hex(4)}.{state}")
        os.mkdir(path, 0o700)
        lock = _try_lock(os.path.join(path, LOCK))
        assert lock is not None, "nobody else knows its name"
        return path, lock


@contextlib.contextmanager
def abandoned(draft: str) -> Iterator[bool]:
    """Whether no process holds the lock of a draft; then it is held in the body. Inside `publishing`."""
    try:
        lock = _try_lock(os.path.join(draft, LOCK))
    except OSError:
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()


@contextlib.contextmanager
def publishing(folder: str) -> Iterator[None]:
    """Holds the lock of a folder of checkpoints. Raises CheckpointError if another process keeps it for longer than `PATIENCE`."""
    path = os.path.join(folder, PUBLISHING)
    deadline = time.monotonic() + PATIENCE
    try:
        while (lock := _try_lock(path)) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{folder}: another process has been publishing a checkpoint there for {PATIENCE:g} s; it may be stopped. End it, or "
                    "save to a folder of its own"
                )
            time.sleep(_INTERVAL)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(
                path
            )  # while it is locked: who opened it before finds that it is not the file of that name any more
        lock.close()


def _try_lock(path: str) -> Lock | None:
    """The lock of a file, which is made if it is missing; None if another holds it, or the file has gone meanwhile."""
    descriptor = os.open(path, _FLAGS, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return Lock(descriptor)
    except BlockingIOError:
        pass
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
