"""Source: public training scripts for SMP v2."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from smpc.v2.logger import get_logger

__all__ = ["timeit"]


@contextmanager
def timeit(enabled: bool = True, name: str = "", rank: int = 0) -> Iterator[None]:
    """Logs how long what is inside took, in seconds, on one rank; -1: on every rank."""
    begin = time.perf_counter()
    yield
    own = dist.get_rank() if dist.is_initialized() else 0
    if enabled and rank in (-1, own):
        get_logger().info("%s took %.3f s", name or "this", time.perf_counter() - begin)
