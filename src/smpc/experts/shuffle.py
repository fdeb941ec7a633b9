"""Rows on their way between ranks of a group: exchanged, or permuted before they are routed and put back after.

`shuffle` permutes tokens over all ranks.

Ranks that hold neighbouring text send the same experts their tokens; after a shuffle every rank has a sample of all of it. The permutation
is drawn from a seed that all ranks share, over the global numbers of tokens, which count by rank first, then on the rank. Every rank gets
back as many tokens as it had, so numbers may differ between ranks.

    mixed, ticket = shuffle(tokens, seed, group)
    result = unshuffle(layer(mixed), ticket, group)

`exchange_rows` brings rows from every rank of a group to every other, in numbers that differ: an all-to-all that autograd goes through.
All ranks know the largest number of rows that any of them sends to any. So all of them decide alike whether the rows go through the
memory that the processes of a host share, padded, in one piece, or through the process group, as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup, collective, gathered
from smpc.experts.expert_linear import permuted, unpermuted


@dataclass(frozen=True, slots=True)
class ShuffleTraffic:
    """How many rows go where. `send`, `receive`: by rank. `widest`: the largest number between any two ranks."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    widest: int

    @property
    def back(self) -> ShuffleTraffic:
        """The same rows the other way."""
        return ShuffleTraffic(self.receive, self.send, self.widest)


def exchange_rows(rows: Tensor, traffic: ShuffleTraffic, group: TensorGroup) -> Tensor:
    """Sends the first `send[0]` rows of [M, ...] to rank 0, the next to rank 1; returns what arrives, by rank."""
    return collective(rows, group, lambda x: moved(x, traffic, group), lambda grad: moved(grad, traffic.back, group))


def moved(rows: Tensor, traffic: ShuffleTraffic, group: TensorGroup) -> Tensor:
    """`exchange_rows` outside autograd."""
    room = 1 << max(traffic.widest - 1, 0).bit_length()  # few sizes, as each is laid out once
    shape = (group.size * room, *rows.shape[1:])
    wanted = rows.new_empty(1).expand(shape)
    slots = group.slots_for(wanted)
    if slots is not None and slots.holds(wanted.nbytes):
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


@dataclass(frozen=True, slots=True, eq=False)
class Shuffle:
    """One permutation, as a rank sees it: `leaving` sorts its tokens by the rank they go to, `arriving` puts those that come in order."""

    leaving: Tensor
    arriving: Tensor
    traffic: ShuffleTraffic


def shuffle(tokens: Tensor, seed: int, group: TensorGroup) -> tuple[Tensor, Shuffle]:
    """[N, ...] other tokens of the group, and what `unshuffle` needs. `seed` must be the same on all ranks; another for each call."""
    sizes: list[int] = gathered(torch.tensor([tokens.shape[0]], device=tokens.device), 0, group).tolist()
    ticket = _drawn_order(sizes, seed, group.rank, tokens.device)
    arrived = exchange_rows(permuted(tokens, ticket.leaving), ticket.traffic, group)
    return permuted(arrived, ticket.arriving), ticket


def unshuffle(tokens: Tensor, ticket: Shuffle, group: TensorGroup) -> Tensor:
    """Every token back to the rank and the place that `shuffle` took it from."""
    if tokens.shape[0] != len(ticket.arriving):
        raise UsageError(f"unshuffle: expected {len(ticket.arriving)} tokens, as shuffle gave, found {tokens.shape[0]}")
    arrived = exchange_rows(unpermuted(tokens, ticket.arriving), ticket.traffic.back, group)
    return unpermuted(arrived, ticket.leaving)


def _drawn_order(sizes: list[int], seed: int, rank: int, device: torch.device) -> Shuffle:
    """Global place p gets the token of number order[p]."""
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    pairs = torch.bincount(owner * len(sizes) + owner[place], minlength=len(sizes) ** 2).view(len(sizes), -1)
    traffic = ShuffleTraffic(tuple(pairs[rank].tolist()), tuple(pairs[:, rank].tolist()), int(pairs.max()))
    leaving = torch.argsort(place[own])  # by rank, and in each by the place that it goes to
    # What arrives is in the order of the ranks that it came from, and within a rank by place.
    came_from = owner[order[own]]
    sorted_places = torch.argsort(came_from, stable=True)  # place among mine of the j-th that arrives
    arriving = torch.empty_like(sorted_places)
    arriving[sorted_places] = torch.arange(len(sorted_places))
    return Shuffle(leaving.to(device), arriving.to(device), traffic)
