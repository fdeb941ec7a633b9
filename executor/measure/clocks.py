"""How far the clocks of ranks on other hosts are from rank 0's.

    offset = clock_offset(group, device)        # collective; `time.monotonic_ns() + offset` is rank 0's clock, about

Each rank in turn asks rank 0 for its time, a few times, and takes the answer that was quickest: that answer was given at the middle
of the question, within half of its round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_ROUNDS = 12


def clock_offset(
    group: dist.ProcessGroup, device: torch.device, clock: Callable[[], int] = time.monotonic_ns, rounds: int = _ROUNDS
) -> int:
    """Nanoseconds to add to this rank's clock. Messages are on `device`. Collective over the group."""
    message = torch.zeros(1, dtype=torch.int64, device=device)
    if group.rank() == 0:
        for peer in range(1, group.size()):
            for _ in range(rounds):
                dist.recv(message, group=group, group_src=peer)
                message.fill_(clock())
                dist.send(message, group=group, group_dst=peer)
        return 0
    answers: list[tuple[int, int]] = []
    for _ in range(rounds):
        start = clock()
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        theirs, end = int(message), clock()
        answers.append((end - start, theirs - (start + end) // 2))
    return min(answers)[1]
