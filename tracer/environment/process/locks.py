"""Locks of threads and of processes: whether one is held, and how it is put back."""

from __future__ import annotations

import threading
from _multiprocessing import SemLock  # type: ignore[import-not-found]
from typing import Any

_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
_ASKING = ("acquire", "locked", "_is_owned", "_is_mine", "_is_zero", "_get_value", "_count")


def is_lock(value: Any) -> bool:
    """Whether it is a lock of C, as those of `threading` and `multiprocessing` are within."""
    return type(value) in (_LOCK, _RLOCK, SemLock)


def asks_lock(function: Any) -> bool:
    """Whether a C function is a method of a lock that tells whether it is free. `with lock` tells nothing: it waits."""
    return is_lock(getattr(function, "__self__", None)) and function.__name__ in _ASKING


def is_held(lock: Any) -> bool:
    """Whether anybody holds it now."""
    if isinstance(lock, SemLock):
        return bool(lock._is_zero())
    return bool(lock.locked()) if type(lock) is _LOCK else not repr(lock).startswith("<unlocked")


def put_back(lock: Any, was_held: bool) -> None:
    """Takes it, or gives it away, where that was otherwise before."""
    if was_held and not is_held(lock):
        lock.acquire(False)
    elif is_held(lock) and not was_held:
        lock.release()
