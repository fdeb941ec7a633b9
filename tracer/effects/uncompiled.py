"""What was given to torch.compile runs as it is, without compiling, while anybody asks for that.

torch keeps one setting for all threads, its stance, and stages of one process run in threads. If each thread set it and put back what
it found, threads that overlap would leave it set for good: the last to leave would put back what the first had set. They are counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_lock = threading.Lock()
_stances: list[AbstractContextManager[object]] = []  # the one that the first to enter has set
_inside = 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """In this context compiled modules and functions run what they were compiled from, in all threads.

    Under a mode that watches torch calls torch.compile would compile what the mode does, or nothing, and never again what it has met there.
    """
    global _inside
    with _lock:
        if (
            not _stances and "torch._dynamo" in sys.modules
        ):  # importing it takes a second; nothing is compiled without it
            _stances.append(torch.compiler.set_stance("force_eager"))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _stances:
                _stances.pop().__exit__(None, None, None)
