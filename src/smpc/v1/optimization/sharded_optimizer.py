"""`shard_optimizer_state`: of the ranks that hold a parameter one updates it, and the others get it from there.

    shards.assign(parameters)        who updates which
    shards.owns(parameter)
    shards.gather()                  after the optimizer's step: every rank gets what the others have updated

Terms
    holders   the ranks that hold the same values of a parameter, and average its gradient: the reduced-data-parallel group for a parameter
              of a distributed (tensor-parallel) module, the data-parallel group for any other
    owner     the holder that has the parameter's optimizer state, and its fp32 master

A parameter has one owner for all of it, so that every optimizer works, also one that takes norms of parameters. Parameters are dealt out
from the largest to the smallest, each to the holder that owns the fewest elements so far: no rank has more than the average and one
parameter.

    replica 0   embedding 600, norm 10          replica 1   head 350, up 260, bias 10

The gradients are those that replicas have averaged anyway, and one rank computes what all would have computed, so results are the same,
bit by bit, as without sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from smpc.executor.data_parallel import broadcast
from smpc.mesh import Axis
from smpc.v1.state import Session

_BUCKET = 1 << 24  # elements that are sent at once


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter, how many elements of optimizer state its owner has (alike on all tensor-parallel ranks), and whether RDP holds it."""

    parameter: Tensor
    size: int
    is_scaled: bool


class Shards:
    """Who updates which parameter, among the ranks of this rank's data-parallel group."""

    def __init__(self, session: Session) -> None:
        self._session = session
        members = session.mesh.group(Axis.DP, session.rank)
        self._replica_of = [session.mesh.rdp_rank(member) for member in members]
        self._position = members.index(session.rank)
        self._loads = [0] * len(members)
        self._entries: dict[int, Entry] = {}
        self._owners: dict[int, int] = {}  # by id: position in the data-parallel group, or replica

    def assign(self, entries: Sequence[Entry]) -> None:
        """Give owners to the entries that have none. The same on every rank of the group, for the same entries."""
        new = [entry for entry in entries if id(entry.parameter) not in self._entries]
        self._entries |= {id(entry.parameter): entry for entry in new}
        # Those with fewer holders first, as the others can even out what they leave.
        for entry in sorted(new, key=lambda entry: (not entry.is_scaled, -entry.size)):
            self._owners[id(entry.parameter)] = self._choose(entry)

    def _choose(self, entry: Entry) -> int:
        if not entry.is_scaled:
            owner = min(range(len(self._loads)), key=lambda position: (self._loads[position], position))
            self._loads[owner] += entry.size
            return owner
        replicas = sorted(set(self._replica_of))
        owner = min(replicas, key=lambda replica: (self._load_of(replica), replica))
        for position, replica in enumerate(self._replica_of):
            if replica == owner:
                self._loads[position] += entry.size
        return owner

    def _load_of(self, replica: int) -> int:
        return max(load for load, other in zip(self._loads, self._replica_of, strict=True) if other == replica)

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter. What has no owner every rank updates."""
        entry = self._entries.get(id(parameter))
        if entry is None:
            return True
        own = self._replica_of[self._position] if entry.is_scaled else self._position
        return self._owners[id(parameter)] == own

    def is_counted(self, parameter: Tensor) -> bool:
        """Whether, of all ranks that hold a parameter or slices of it, this is the one that counts it in a norm over the owners."""
        entry = self._entries.get(id(parameter))
        if entry is None or not self.owns(parameter):
            return entry is None and self._position == 0
        return not entry.is_scaled or self._session.mesh.tp_rank(self._session.rank) == 0

    def gather(self) -> None:
        """Every rank gets from the owners what it does not own. Collective."""
        scaled = [entry for entry in self._entries.values() if entry.is_scaled]
        others = [entry for entry in self._entries.values() if not entry.is_scaled]
        replicas = sorted(set(self._replica_of))
        self._gather(scaled, replicas, self._session.groups[Axis.RDP], self._rdp_position)
        self._gather(others, range(len(self._loads)), self._session.groups[Axis.DP], lambda position: position)

    def _gather(
        self,
        entries: Sequence[Entry],
        owners: Sequence[int],
        group: dist.ProcessGroup,
        position_of: Callable[[int], int],
    ) -> None:
        for owner in owners:
            own = [entry.parameter for entry in entries if self._owners[id(entry.parameter)] == owner]
            for bucket in _buckets(own):
                broadcast(bucket, group, position_of(owner))

    def _rdp_position(self, replica: int) -> int:
        mesh = self._session.mesh
        members = mesh.group(Axis.RDP, self._session.rank)
        return next(i for i, member in enumerate(members) if mesh.rdp_rank(member) == replica)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters that require grad, some at a time."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if bucket and size + parameter.numel() > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield bucket
