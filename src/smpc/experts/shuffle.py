"""Tokens permuted over all ranks of a group before they are routed, and put back after.

Ranks that hold neighbouring text send the same experts their tokens; after a shuffle every rank has a sample of all of it. The permutation
is drawn from a seed that all ranks share, over the global number of a token: that of its rank first, then its own. Every rank gets back as
many tokens as it had, so numbers may differ between ranks.

    mixed, ticket = shuffle(tokens, seed, group)
    result = unshuffle(layer(mixed), ticket, group)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup, gathered
from smpc.experts.exchange import Traffic, exchange
from smpc.experts.linear import permuted, unpermuted


@dataclass(frozen=True, slots=True, eq=False)
class Shuffle:
    """One permutation, as a rank sees it: `leaving` sorts its tokens by the rank they go to, `arriving` puts those that come in order."""

    leaving: Tensor
    arriving: Tensor
    traffic: Traffic


def shuffle(tokens: Tensor, seed: int, group: TensorGroup) -> tuple[Tensor, Shuffle]:
    """[N, ...] other tokens of the group, and what `unshuffle` needs. `seed` must be the same on all ranks; another for each call."""
    sizes: list[int] = gathered(torch.tensor([tokens.shape[0]], device=tokens.device), 0, group).tolist()
    ticket = _drawn(sizes, seed, group.rank, tokens.device)
    arrived = exchange(permuted(tokens, ticket.leaving), ticket.traffic, group)
    return permuted(arrived, ticket.arriving), ticket


def unshuffle(tokens: Tensor, ticket: Shuffle, group: TensorGroup) -> Tensor:
    """Every token back to the rank and the place that `shuffle` took it from."""
    if tokens.shape[0] != len(ticket.arriving):
        raise UsageError(f"unshuffle: expected {len(ticket.arriving)} tokens, as shuffle gave, found {tokens.shape[0]}")
    arrived = exchange(unpermuted(tokens, ticket.arriving), ticket.traffic.back, group)
    return unpermuted(arrived, ticket.leaving)


def _drawn(sizes: list[int], seed: int, rank: int, device: torch.device) -> Shuffle:
    """Global place p gets the token of number order[p]."""
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    pairs = torch.bincount(owner * len(sizes) + owner[place], minlength=len(sizes) ** 2).view(len(sizes), -1)
    traffic = Traffic(tuple(pairs[rank].tolist()), tuple(pairs[:, rank].tolist()), int(pairs.max()))
    leaving = torch.argsort(place[own])  # by rank, and in each by the place that it goes to
    # What arrives lies by the rank that it came from, and in each by place.
    came_from = owner[order[own]]
    sorted_places = torch.argsort(came_from, stable=True)  # place among mine of the j-th that arrives
    arriving = torch.empty_like(sorted_places)
    arriving[sorted_places] = torch.arange(len(sorted_places))
    return Shuffle(leaving.to(device), arriving.to(device), traffic)
