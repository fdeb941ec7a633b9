"""The messages of a step beside the pipeline's own: headers, objects and tensors between the ranks of one replica.

They have a process group of their own, so that they never mix with the pipeline's or the user's messages. Numbers and objects are on
`message_device` while they are sent, tensors on `device`. Ranks are pipeline ranks. A lost connection raises TransportError.

A broadcast returns at once on the rank that has the data; the rest happens in the background until `settle`.
"""

from __future__ import annotations

import datetime
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import CheckpointError, TransportError
from smpc.executor.transport.messages import WireFormat
from smpc.v1.session.object_messages import gather_objects

if TYPE_CHECKING:
    from smpc.v1.session.skipped_calls import Whereabouts

_DATA, _ACKNOWLEDGE = 0, 1  # tags

Receipt = tuple[dist.Work | None, Tensor, WireFormat]  # of a tensor that is under way


class Control:
    """One rank's end."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, message_device: torch.device) -> None:
        self._group: dist.ProcessGroup | None = group
        self.rank = group.rank()
        self.size = group.size()
        self.device = device
        self._message_device = message_device
        self._pending: list[tuple[dist.Work, Tensor]] = []
        self._acknowledgements: list[dist.Work] = []

    def broadcast_numbers(self, numbers: Sequence[int], source: int) -> list[int]:
        """Whole numbers from `source`; the other ranks pass equally many numbers, which are ignored."""
        message = torch.tensor(numbers, dtype=torch.int64, device=self._message_device)
        self._broadcast(message, source)
        if self.rank == source:
            return list(numbers)
        received: list[int] = message.tolist()
        return received

    def broadcast_object(self, obj: Any, source: int) -> Any:
        """A picklable object from `source`. Ranks of one job trust each other."""
        payload = pickle.dumps(obj) if self.rank == source else b""
        (length,) = self.broadcast_numbers([len(payload)], source)
        message = torch.frombuffer(bytearray(payload or bytes(length)), dtype=torch.uint8).to(self._message_device)
        self._broadcast(message, source)
        return obj if self.rank == source else pickle.loads(message.cpu().numpy().tobytes())

    def broadcast_bytes(self, payload: Tensor, source: int) -> None:
        """Fill a flat uint8 tensor with `source`'s."""
        if payload.numel():
            self._broadcast(payload, source)

    def gather(self, obj: Any) -> list[Any]:
        """Every rank's object, in order of rank."""
        with self._connection() as group:
            return gather_objects(obj, group, self._message_device, self.device)

    def send(self, tensors: Sequence[Tensor], formats: Sequence[WireFormat], destination: int) -> None:
        """Start to send tensors; they must not be written before `settle`."""
        for tensor, form in zip(tensors, formats, strict=True):
            if not form.is_empty:
                wire = form.wire(form.conform(tensor))
                with self._connection() as group:
                    self._pending.append((group.send([wire], destination, _DATA), wire))

    def receive(self, formats: Sequence[WireFormat], source: int) -> list[Receipt]:
        """Post the receives of tensors; `wait` for them."""
        receipts: list[Receipt] = []
        for form in formats:
            buffer = form.empty(self.device)
            work = None
            if not form.is_empty:
                with self._connection() as group:
                    work = group.recv([form.wire(buffer)], source, _DATA)
            receipts.append((work, buffer, form))
        return receipts

    def wait(self, receipts: Sequence[Receipt]) -> list[Tensor]:
        """The tensors of posted receives."""
        with self._connection():
            for work, _, _ in receipts:
                if work is not None:
                    work.wait()
        return [form.unpack(buffer) for _, buffer, form in receipts]

    def settle(self) -> None:
        """Wait until everything that this rank sends has left."""
        pending, self._pending = self._pending, []
        with self._connection():
            for work, _ in pending:
                work.wait()

    def acknowledge(self, source: int) -> None:
        """End a transfer from `source`, which waits here until the others have everything.

        A process that ends closes its connections, and with them what its peers have not read yet. A peer that has ended itself in
        the meantime has had everything, so a lost connection means nothing here.
        """
        self.settle()
        for work in self._acknowledgements:
            with suppress(RuntimeError):
                work.wait()
        self._acknowledgements.clear()
        message = torch.zeros(1, dtype=torch.uint8, device=self._message_device)
        with self._connection() as group:
            if self.rank != source:
                self._acknowledgements.append(group.send([message], source, _ACKNOWLEDGE))
                return
        works = []
        for peer in (peer for peer in range(self.size) if peer != self.rank):
            with suppress(RuntimeError):  # posting fails, too, once a peer has closed its end
                works.append(group.recv([message], peer, _ACKNOWLEDGE))
        for work in works:
            with suppress(RuntimeError):
                work.wait()

    def meet(self, what: str, timeout: datetime.timedelta, whereabouts: Whereabouts | None = None) -> None:
        """Wait for the other ranks. Raises CheckpointError, naming ranks that do not come in time, or that make another call.

        With `whereabouts`, it raises as soon as one of them is known to have continued without this call.
        """
        if whereabouts is None:
            self._meet(what, timeout)
            return
        with self._connection() as connected:
            members = dist.get_process_group_ranks(connected)
        group = "-".join(map(str, members))
        keys = {rank: f"{group}/{rank}" for rank in members}
        store, own = whereabouts.store, keys[members[self.rank]]
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            try:
                store.set(own, "")
                self._await(what, keys, deadline, whereabouts)
            except RuntimeError as error:
                raise TransportError(f"{what}: the store that all ranks share is lost: {error}") from error
            self._meet(what, timeout, datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.5)))
        finally:
            with suppress(RuntimeError):
                store.delete_key(own)

    def _await(self, what: str, keys: Mapping[int, str], deadline: float, whereabouts: Whereabouts) -> None:
        """Wait until all keys exist. `_meet` reports ranks that are missing at the deadline, or do not answer and may be dead."""
        while time.monotonic() < deadline:
            with suppress(RuntimeError):
                whereabouts.store.wait(list(keys.values()), datetime.timedelta(seconds=1))
                return
            missing = [rank for rank, key in keys.items() if not whereabouts.store.check([key])]
            found = whereabouts.skipped(missing) if missing else None
            if found is None and whereabouts.are_silent(missing):
                return
            if found is not None:
                raise CheckpointError(
                    f"{what} must be called on all {self.size} ranks of the replica, and {found}. Call it on all ranks, or where "
                    "smp.rdp_rank() == 0; smp.dp_rank() is another number on each tensor-parallel rank of a replica"
                )

    def _meet(self, what: str, timeout: datetime.timedelta, left: datetime.timedelta | None = None) -> None:
        """As `meet`; `left`: the rest of `timeout`."""
        if self._message_device.type == "cpu":  # only gloo can tell who is missing
            assert self._group is not None
            begin = time.monotonic()
            try:
                dist.monitored_barrier(self._group, timeout=left or timeout, wait_all_ranks=True)
            except RuntimeError as error:
                is_late = time.monotonic() - begin > 0.9 * (left or timeout).total_seconds()
                why = (
                    f"some did not call it within {timeout.total_seconds():g} s"
                    if is_late
                    else "one has ended without it"
                )
                raise CheckpointError(
                    f"{what} must be called on all {self.size} ranks of the replica, and {why}: {error}"
                ) from error
        said = self.gather(what)
        if any(other != what for other in said):
            calls = ", ".join(f"{other} on rank {rank}" for rank, other in enumerate(said))
            raise CheckpointError(f"the ranks of a replica must make the same calls, in the same order; found {calls}")

    def close(self) -> None:
        """Drop transfers in progress and close the connections, so that waiting peers wake up."""
        self._pending.clear()
        self._acknowledgements.clear()
        group, self._group = self._group, None
        if group is not None:
            if self.device.type == "cuda":  # NCCL would first wait for transfers in progress, which may never end
                group._get_backend(self.device).abort()
            dist.destroy_process_group(group)

    def _broadcast(self, message: Tensor, source: int) -> None:
        with self._connection() as group:
            work = dist.broadcast(message, group=group, group_src=source, async_op=True)
            assert work is not None, "every rank belongs to the group"
            if self.rank == source:
                self._pending.append((work, message))
            else:
                work.wait()

    @contextmanager
    def _connection(self) -> Iterator[dist.ProcessGroup]:
        if self._group is None:
            raise TransportError("this pipeline was closed after a failure; start the processes again")
        try:
            yield self._group
        except RuntimeError as error:
            raise TransportError(f"pipeline rank {self.rank} lost the connection to its peers: {error}") from None
