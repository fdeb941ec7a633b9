"""Tokens to the ranks of their experts, and back.

Terms
    slot        place j of token n among its k experts, numbered n k + j; `index[n, j]` is the expert, 0 to E - 1. Any other number means
                that nobody serves the slot: it adds nothing
    row         what an expert gets: a copy of a token. Rows are grouped by expert, and within an expert by the rank that they came from,
                then by slot
    way         all_to_all: ranks tell each other how many rows they send, then send them (one wait of the host for the device a layer);
                all_gather: every rank gets all tokens and takes the tokens of its own experts, for small groups
    capacity    how many rows an expert takes from each rank; what is beyond, in the order of slots, is dropped. None: all are taken
                (dropless). With a capacity, every rank sends `capacity` rows for every expert, padded with zeros, and no counts

    rank 0  tokens a b, experts 3 0         rank 0 holds experts 0 1    rows  b c   counts 1 1
    rank 1  tokens c d, experts 1 3         rank 1 holds experts 2 3    rows  a d   counts 0 2

`combine` multiplies by the weights where the token came from, and sums over the slots by a view and a sum: repeatable, and the same for
any number of ranks, in every bit, if the experts compute each row alike.

A rank without tokens takes part and stays connected: its backward runs the same collectives as on the other ranks. The gradients of experts
sum over the tokens of ALL ranks: see `smpc.expert_parallel` for their scale.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from smpc.errors import ConfigError, UsageError
from smpc.executor.collectives import TensorGroup, gather_in, gathered, reduce_scatter
from smpc.experts.expert_linear import collected, inverse, permuted, spread_rows
from smpc.experts.shuffle import ShuffleTraffic, exchange_rows

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WAYS = ("all_to_all", "all_gather")


_NONE = ShuffleTraffic((), (), 0)


@dataclass(frozen=True, slots=True, eq=False)
class DispatchPlan:
    """Where the rows of one call came from. `counts`: rows of each of this rank's experts, in order; their sum is the number of rows.

    `by_rank`, where rows are not grouped by expert, but as they arrived: by rank, the rows for each of this rank's experts.
    """

    counts: tuple[int, ...]
    way: str
    num_tokens: int
    num_slots: int  # of a token
    source: Tensor  # [M] the slot of every row that this rank sent, or, with all_gather, of every row that it computes
    arrival: tuple[Tensor, Tensor] | None = None  # [R] row r arrived at this place; the inverse. None: in order
    places: Tensor | None = None  # [N k] for each slot its row in `source`, where all have one
    traffic: ShuffleTraffic = _NONE
    is_padded: bool = False  # rows of zeros fill a capacity up
    by_rank: tuple[tuple[int, ...], ...] = ()
    room: int = 0  # tokens of each rank, with all_gather: of the rank that has most

    def index(self, device: torch.device | str | None = None) -> Tensor:
        """[R] int64: the expert of every row, counted among this rank's; ascending, where rows are grouped by expert."""
        device = self.source.device if device is None else device
        blocks = self.by_rank or (self.counts,)
        local = torch.arange(len(self.counts), device=device).repeat(len(blocks))
        counts = torch.tensor(blocks, device=device).flatten()
        return local.repeat_interleave(counts, output_size=sum(self.counts))


def owned(num_experts: int, group: TensorGroup) -> range:
    """The experts that this rank holds: neighbours; a rest goes to the first ranks, one to each."""
    start = group.start(num_experts)
    return range(start, start + group.share(num_experts))


def capacity_of(factor: float, num_tokens: int, num_slots: int, num_experts: int) -> int:
    """Rows that an expert takes from a rank of `num_tokens` tokens: `factor` times an even share, rounded up, and at least one."""
    return max(1, math.ceil(factor * num_tokens * num_slots / num_experts))


def dispatch(
    hidden: Tensor,
    index: Tensor,
    num_experts: int,
    group: TensorGroup,
    *,
    way: str = "all_to_all",
    capacity: int | None = None,
    is_sorted: bool = True,
) -> tuple[Tensor, DispatchPlan]:
    """The rows [R, H] of this rank's experts, and the plan that brings their outputs back.

    Unless `is_sorted`, rows may be in any order, which is cheaper; `plan.index()` says which expert each is for.

    `hidden` is [N, H], `index` [N, k] of integers. With a `capacity`, N may differ between ranks, the capacity may not. Raises UsageError
    for shapes that do not fit, ConfigError for a way that does not exist, a capacity below 1, or fewer experts than ranks.
    """
    _check_dispatch(hidden, index, num_experts, group, way, capacity)
    if capacity is not None:
        return _with_capacity(hidden, index, num_experts, group, capacity)
    if way == "all_gather" and group.size > 1:
        return _gathered_tokens(hidden, index, num_experts, group)
    flat = index.reshape(-1).to(torch.int64)
    experts, order = torch.sort(flat, stable=True)  # what nobody serves comes first and last
    first, matrix = _told_counts(_dispatch_starts(experts, num_experts), hidden, group)
    hidden = _like_others(hidden, matrix, index.shape[0])
    traffic, local = _traffic_of_counts(matrix, num_experts, group)
    source = order[first : first + sum(traffic.send)]
    places = inverse(source) if len(source) == index.numel() else None
    arrived = exchange_rows(spread_rows(hidden, source, index.shape[1], False, places), traffic, group)
    arrival = _by_expert(local, hidden.device) if is_sorted else None
    rows = arrived if arrival is None else permuted(arrived, *arrival)
    totals = tuple(sum(column) for column in zip(*local, strict=True))
    by_rank = () if is_sorted else tuple(tuple(row) for row in local)
    num_tokens, num_slots = index.shape
    return rows, DispatchPlan(
        totals, "all_to_all", num_tokens, num_slots, source, arrival, places, traffic, by_rank=by_rank
    )


def combine(outputs: Tensor, plan: DispatchPlan, weights: Tensor | None, group: TensorGroup) -> Tensor:
    """[N, H]: for every token, the sum over its slots of weight times the output of the expert, in the outputs' dtype.

    `outputs` are [R, H], one for each row of `dispatch`; `weights` are [N, k], None for ones. Products and sums are in the wider dtype
    of both.
    """
    expected = (plan.num_tokens, plan.num_slots)
    found = expected if weights is None else tuple(weights.shape)
    if outputs.shape[0] != sum(plan.counts) or found != expected:
        raise UsageError(
            f"combine: expected {sum(plan.counts)} rows of outputs and weights of shape {expected}, found outputs of shape "
            f"{tuple(outputs.shape)} and weights of shape {found}; pass those of the same dispatch"
        )
    if plan.room:
        slots = _returned_from_dispatch(outputs, plan, group)
    else:
        arrived = outputs if plan.arrival is None else permuted(outputs, *reversed(plan.arrival))
        back = exchange_rows(arrived, plan.traffic.back, group)
        slots = collected(back, plan.source, math.prod(expected), plan.is_padded, plan.places)
    if weights is None and plan.num_slots == 1:
        return slots
    by_token = slots.view(*expected, *outputs.shape[1:])
    weighted = by_token if weights is None else by_token * weights.unsqueeze(-1)
    return weighted.sum(1).to(outputs.dtype)


def _sorted_for_dispatch(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The experts of all slots, ascending, and the slots in that order. Slots that nobody serves come last, as expert E."""
    flat = index.reshape(-1).to(torch.int64)
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    return torch.sort(flat, stable=True)


def _dispatch_starts(experts: Tensor, num_experts: int) -> Tensor:
    """[E + 1]: where the slots of each expert begin among sorted ones, and where those that nobody serves do."""
    return torch.searchsorted(experts, torch.arange(num_experts + 1, device=experts.device))


def _told_counts(starts: Tensor, hidden: Tensor, group: TensorGroup) -> tuple[int, list[list[int]]]:
    """This rank's first slot that is served, of sorted ones; and by rank: its rows for each expert, their width, the number of their
    dtype.
    """
    kind = [hidden.shape[1], _DTYPES.index(hidden.dtype)]
    if group.size == 1:
        told: list[list[int]] = [[*starts.tolist(), *kind]]
    else:
        told = gathered(torch.cat((starts, torch.tensor(kind, device=starts.device))).unsqueeze(0), 0, group).tolist()
    counts = [[last - first for first, last in itertools.pairwise(row[:-2])] for row in told]
    return told[group.rank][0], [[*own, *row[-2:]] for own, row in zip(counts, told, strict=True)]


def _like_others(hidden: Tensor, matrix: list[list[int]], num_tokens: int) -> Tensor:
    """The hidden states; if there are none, with the width and dtype of hidden states on other ranks."""
    kinds = {(row[-2], row[-1]) for row in matrix if any(row[:-2])}
    if len(kinds) > 1:
        found = "; ".join(f"rank {rank}: {row[-2]} of {_DTYPES[row[-1]]}" for rank, row in enumerate(matrix))
        raise UsageError(f"dispatch: expected hidden states of one size and dtype on all ranks, found {found}")
    width, dtype = next(iter(kinds), (hidden.shape[1], _DTYPES.index(hidden.dtype)))
    if num_tokens or (hidden.shape[1] == width and hidden.dtype == _DTYPES[dtype]):
        return hidden
    return hidden.sum(1, keepdim=True).expand(0, width).to(_DTYPES[dtype])


def _traffic_of_counts(
    matrix: list[list[int]], num_experts: int, group: TensorGroup
) -> tuple[ShuffleTraffic, list[list[int]]]:
    """From the rows that each rank has for each expert: the traffic, and [ranks][local experts] of the rows that arrive here."""
    shares = group.shares(num_experts)
    bounds = [sum(shares[:rank]) for rank in range(group.size + 1)]
    pairs = [[sum(row[first:last]) for first, last in itertools.pairwise(bounds)] for row in matrix]  # [from][to]
    mine = slice(bounds[group.rank], bounds[group.rank + 1])  # without width and dtype
    widest = max(max(row) for row in pairs)
    traffic = ShuffleTraffic(tuple(pairs[group.rank]), tuple(row[group.rank] for row in pairs), widest)
    return traffic, [row[mine] for row in matrix]


def _by_expert(local: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Where the rows of each expert arrived, if they come by rank, then by expert; None if that is their order already.

    And the inverse: where the rows that arrived are.
    """
    if len(local) == 1 or len(local[0]) == 1:
        return None
    counts = torch.tensor(local)
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0]).repeat_interleave(counts.flatten())
    arrival = torch.argsort(experts, stable=True).to(device)
    return arrival, inverse(arrival)


def _with_capacity(
    hidden: Tensor, index: Tensor, num_experts: int, group: TensorGroup, capacity: int
) -> tuple[Tensor, DispatchPlan]:
    """Every expert gets `capacity` rows of every rank. Nothing waits for the device."""
    num_slots = index.numel()
    experts, order = _sorted_for_dispatch(index, num_experts)
    starts = _dispatch_starts(experts, num_experts)
    place = torch.arange(num_slots, device=experts.device) - starts[experts]
    is_kept = (place < capacity) & (experts < num_experts)
    target = torch.where(is_kept, experts * capacity + place, num_experts * capacity)
    source = torch.full((num_experts * capacity + 1,), num_slots, dtype=torch.int64, device=experts.device)
    source[target] = order
    source = source[:-1]
    shares = group.shares(num_experts)
    own = shares[group.rank]
    send = tuple(share * capacity for share in shares)
    traffic = ShuffleTraffic(send, (own * capacity,) * group.size, max(send))
    arrived = exchange_rows(spread_rows(hidden, source, index.shape[1], is_padded=True), traffic, group)
    arrival = None
    if group.size > 1 and own > 1:
        places = torch.arange(group.size * own * capacity, device=hidden.device)
        arrival = (
            places.view(group.size, own, capacity).transpose(0, 1).reshape(-1),
            places.view(own, group.size, capacity).transpose(0, 1).reshape(-1),
        )
    rows = arrived if arrival is None else permuted(arrived, *arrival)
    counts = (group.size * capacity,) * own
    num_tokens, each = index.shape
    return rows, DispatchPlan(counts, "all_to_all", num_tokens, each, source, arrival, None, traffic, is_padded=True)


def _gathered_tokens(
    hidden: Tensor, index: Tensor, num_experts: int, group: TensorGroup
) -> tuple[Tensor, DispatchPlan]:
    """All ranks' tokens, and of them the rows of this rank's experts. Ranks that have fewer tokens than others add empty ones."""
    count, num_slots = index.shape
    sizes: list[int] = gathered(torch.tensor([count], device=hidden.device), 0, group).tolist()
    room = max(1, *sizes)
    padding = (0, 0, 0, room - count)
    tokens = gather_in(torch.nn.functional.pad(hidden, padding), 0, group)
    chosen = gathered(torch.nn.functional.pad(index, padding, value=num_experts), 0, group)
    mine = owned(num_experts, group)
    experts, order = _sorted_for_dispatch(chosen, num_experts)
    bounds = _dispatch_starts(experts, num_experts)[mine.start : mine.stop + 1].tolist()
    source = order[bounds[0] : bounds[-1]]
    counts = tuple(last - first for first, last in itertools.pairwise(bounds))
    return spread_rows(tokens, source, num_slots, is_padded=False), DispatchPlan(
        counts, "all_gather", count, num_slots, source, room=room
    )


def _returned_from_dispatch(outputs: Tensor, plan: DispatchPlan, group: TensorGroup) -> Tensor:
    """The slots of this rank's tokens, of which each rank has computed some: others are zero there, so the sum is exact."""
    every = collected(outputs, plan.source, group.size * plan.room * plan.num_slots, False)
    return reduce_scatter(every, 0, group)[: plan.num_tokens * plan.num_slots]


def _check_dispatch(
    hidden: Tensor, index: Tensor, num_experts: int, group: TensorGroup, way: str, capacity: int | None
) -> None:
    """Raises UsageError for tokens and indices that cannot be dispatched."""
    if (
        hidden.dim() != 2
        or index.dim() != 2
        or hidden.shape[0] != index.shape[0]
        or index.is_floating_point()
        or hidden.dtype not in _DTYPES
    ):
        raise UsageError(
            "dispatch: expected hidden states [N, H] and integers [N, k], the experts of each token, found shapes "
            f"{tuple(hidden.shape)} and {tuple(index.shape)} of {index.dtype}; flatten the tokens first"
        )
    if way not in WAYS:
        raise ConfigError(f"dispatch: expected a way of {', '.join(WAYS)}, found {way!r}")
    if capacity is not None and capacity < 1:
        raise ConfigError(f"dispatch: expected a capacity of at least 1 row for each expert, found {capacity}")
    if num_experts < group.size:
        raise ConfigError(f"dispatch: expected an expert or more for each of {group.size} ranks, found {num_experts}")
