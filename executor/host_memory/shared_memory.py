"""How the ranks of a process group find out that they are on one host, and come to share memory.

    rank 0      makes memory that has no name in any file system (memfd), and tells all ranks its process and descriptor
    the others  map /proc/<process>/fd/<descriptor>, if the name that they find there has rank 0's random token
    every rank  opens a descriptor of every other process, which tells when that has ended
    all ranks   vote: the memory is used if all of them could do that

It all happens over the group itself: for collectives in the group's first one of a CPU tensor, for a pipeline when its transport is
made. Any reason against it makes the vote a no, and tensors go through gloo: ranks on several hosts or in containers that do not see
each other's processes, ranks that are threads of one process, another system than Linux, another processor than x86-64 (see
`smpc.executor.host_memory.shared_peers`), another backend than gloo, torch's debug mode that checks collectives
(TORCH_DISTRIBUTED_DEBUG=DETAIL), or SMPC_SHARED_MEMORY=0 in the environment of any rank.

Nothing of it outlives the processes, however they end: the memory goes with the last mapping and descriptor, and a rank's go with its
process group.

Example: `link = HostLink.of(process_group)` on all ranks, then `link.slots` on all of them: `SharedSlots`, or None for gloo.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from smpc.errors import ConfigError
from smpc.executor.host_memory.shared_peers import Peer
from smpc.executor.host_memory.shared_slots import SharedSlots, num_bytes

VARIABLE = "SMPC_SHARED_MEMORY"
_NAME = "smpc-{:016x}"  # of the memory: what rank 0's token makes of it


@dataclass(frozen=True, slots=True)
class _Card:
    """A rank's description for the others. `rank`: in the whole job. `namespace`: of the process number."""

    able: int
    rank: int
    pid: int
    namespace: int
    descriptor: int
    token: int


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory of a group, the processes of its other ranks (None at this rank's place), and the group's timeout in seconds."""

    memory: mmap.mmap
    peers: tuple[Peer | None, ...]
    timeout: float


class GroupMemory:
    """The shared memory of one process group, made when it is first asked for. Use `of`."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(process_group)  # the group's end ends the memory
        self._is_settled = False
        self._slots: SharedSlots | None = None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> GroupMemory:
        """The one link of a group: all who use the group must count its collectives together."""
        found = _LINKS.get(process_group)
        if found is None:
            found = _LINKS[process_group] = cls(process_group)
        return found

    @property
    def slots(self) -> SharedSlots | None:
        """The shared memory for CPU tensors; None: gloo. The first call is collective."""
        if not self._is_settled:
            group = self._group()
            assert group is not None, "whoever calls a collective holds the group"
            found = connect(group, num_bytes(group.size()))
            self._is_settled = True
            if found is not None:
                self._slots = SharedSlots(found.memory, group.rank(), found.peers, found.timeout)
                weakref.finalize(group, self._slots.close)
        return self._slots


# A property of torch's groups for which they have no attribute; entries go with them.
_LINKS: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupMemory] = weakref.WeakKeyDictionary()


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether SMPC_SHARED_MEMORY allows it. ConfigError if it says something else than 0 or 1."""
    text = environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}: expected 0 (off) or 1 (on, the default), found {text!r} in the environment")
    return text != "0"


def connect(group: dist.ProcessGroup, wanted_bytes: int) -> Shared | None:
    """Memory that all ranks of a group share, zeros at first, or None if one of them cannot have it. Collective."""
    wanted = is_wanted(os.environ)
    with torch.inference_mode(False):
        backend = group._get_backend(torch.device("cpu"))
        if not dist.is_gloo_available() or not isinstance(backend, dist.ProcessGroupGloo):
            return None
        timeout = backend.options._timeout.total_seconds()
        with _Opening(group.rank(), wanted_bytes) as opening:
            cards = [_Card(*card) for card in _numbers_of_ranks(group, opening.card(wanted))]
            is_open = opening.open(cards)
            if not all(vote for (vote,) in _numbers_of_ranks(group, [int(is_open)])):
                return None
            return opening.shared(timeout)


@dataclass(slots=True)
class _Opening:
    """The resources of one rank until all have agreed; those not taken by then are released."""

    rank: int
    num_bytes: int
    descriptor: int = -1
    memory: mmap.mmap | None = None
    peers: list[Peer | None] = field(default_factory=list)

    def __enter__(self) -> _Opening:
        return self

    def __exit__(self, *reason: object) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        if self.memory is not None:
            self.memory.close()
        for peer in self.peers:
            if peer is not None:
                os.close(peer.alive)

    def card(self, wanted: bool) -> list[int]:
        """The description for the others; rank 0 makes the memory for it."""
        token = secrets.randbits(62) if self.rank == 0 else 0
        namespace, able = 0, wanted and _is_possible()
        if able:
            try:
                namespace = os.stat("/proc/self/ns/pid").st_ino
                if self.rank == 0:
                    self.descriptor = os.memfd_create(_NAME.format(token))
                    os.ftruncate(self.descriptor, self.num_bytes)
            except OSError:
                able = False
        job_rank = dist.get_rank() if dist.is_initialized() else self.rank
        return [int(able), job_rank, os.getpid(), namespace, self.descriptor, token]

    def open(self, cards: Sequence[_Card]) -> bool:
        """Maps the memory and opens the processes, if all ranks could have it; whether that worked."""
        owner = cards[0]
        distinct = len({card.pid for card in cards}) == len(cards)
        if not all(card.able and card.namespace == owner.namespace for card in cards) or not distinct:
            return False
        try:
            if self.rank > 0:
                path = f"/proc/{owner.pid}/fd/{owner.descriptor}"
                if os.readlink(path) != f"/memfd:{_NAME.format(owner.token)} (deleted)":
                    return False
                self.descriptor = os.open(path, os.O_RDWR)
            self.memory = mmap.mmap(self.descriptor, self.num_bytes)
            for rank, card in enumerate(cards):
                self.peers.append(None if rank == self.rank else Peer(card.rank, card.pid, os.pidfd_open(card.pid)))
        except (OSError, ValueError):  # ValueError: mmap, of memory that is too small
            return False
        return True

    def shared(self, timeout: float) -> Shared:
        """All have agreed."""
        assert self.memory is not None
        found = Shared(self.memory, tuple(self.peers), timeout)
        self.memory, self.peers = None, []
        return found


def _is_possible() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _numbers_of_ranks(group: dist.ProcessGroup, own: Sequence[int]) -> list[list[int]]:
    """Every rank's numbers."""
    sent = torch.tensor(own, dtype=torch.int64, device="cpu")
    received = torch.empty(group.size() * len(own), dtype=torch.int64, device="cpu")
    group._allgather_base(received, sent).wait()
    found: list[list[int]] = received.view(group.size(), -1).tolist()
    return found
