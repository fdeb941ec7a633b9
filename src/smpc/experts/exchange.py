"""Rows from every rank of a group to every other, in numbers that differ: an all-to-all that autograd goes back through.

All ranks know the largest number of rows that any of them sends to any. So all of them decide alike whether the rows go through the
memory that the processes of a host share, padded, or through the process group, as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smpc.executor.collectives import TensorGroup, collective


@dataclass(frozen=True, slots=True)
class Traffic:
    """How many rows go where. `send`, `receive`: by rank. `widest`: the largest number between any two ranks."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    widest: int

    @property
    def back(self) -> Traffic:
        """The same rows the other way."""
        return Traffic(self.receive, self.send, self.widest)


def exchange(rows: Tensor, traffic: Traffic, group: TensorGroup) -> Tensor:
    """Sends the first `send[0]` rows of [M, ...] to rank 0, the next to rank 1; returns what arrives, by rank."""
    return collective(rows, group, lambda x: moved(x, traffic, group), lambda grad: moved(grad, traffic.back, group))


def moved(rows: Tensor, traffic: Traffic, group: TensorGroup) -> Tensor:
    """`exchange` outside autograd."""
    room = 1 << max(traffic.widest - 1, 0).bit_length()  # few sizes, as each is laid out once
    shape = (group.size * room, *rows.shape[1:])
    slots = group.slots_for(rows.new_empty(1).expand(shape))
    if slots is not None:
        padded = rows.new_empty(shape)
        for rank, part in enumerate(torch.split(rows, list(traffic.send))):
            padded[rank * room : rank * room + part.shape[0]] = part
        arrived = slots.all_to_all(padded, 0)
        return torch.cat([arrived[rank * room :][:count] for rank, count in enumerate(traffic.receive)])
    own = rows.contiguous()
    found = own.new_empty((sum(traffic.receive), *own.shape[1:]))
    assert group.process_group is not None
    group.process_group.alltoall_base(found, own, list(traffic.receive), list(traffic.send)).wait()
    return found
