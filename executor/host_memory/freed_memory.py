"""Memory that a step frees stays with the process, for the next microbatch and the next step: on a CPU, with glibc.

    keep_freed_memory()          once in a process, before it trains

By itself glibc gives large blocks back to the kernel as soon as they are freed, and the end of its heap as well. A step frees and takes
the same memory again and again, and the kernel fills every page of it with zeros each time. Here, blocks of up to 32 MiB come from
the heap, which is glibc's own limit for processes that free such blocks often, and the heap does not shrink. A process then holds what its
largest step needed, until it ends.

Who sets glibc's own variables decides instead: `MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`.
"""

from __future__ import annotations

import ctypes
import os

_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
_LARGEST_OF_HEAP, _EVERYTHING = 32 << 20, (1 << 31) - 1


def keep_freed_memory() -> None:
    """See the module docstring. Nothing happens with another C library, or where the environment decides."""
    if _has_glibc() and not any(name in os.environ for name in _VARIABLES):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_OF_HEAP)
        mallopt(_TRIM_THRESHOLD, _EVERYTHING)


def _has_glibc() -> bool:
    """musl knows the name, and calls the question invalid; macOS does not know it."""
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (OSError, ValueError):
        return False
