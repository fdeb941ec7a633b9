"""The messages of a step beside the pipeline's own: headers, objects and tensors between the ranks of one replica.

They have a process group of their own, so that nothing of the pipeline's traffic or of the user's gets between. Numbers and objects lie on
`message_device` while they are sent, tensors on `device`. Ranks are pipeline ranks. A lost connection raises TransportError.

A broadcast returns at once on the rank that has the data; the rest happens in the background until `settle`.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import CheckpointError, TransportError
from smpc.executor.transport.layout import WireFormat
from smpc.v1.session.comm import gather_objects

_DATA, _ACKNOWLEDGE = 0, 1  # tags


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
        """Whole numbers from `source`; the others pass as many of their own, which do not count."""
        message = torch.tensor(numbers, dtype=torch.int64, device=self._message_device)
        self._broadcast(message, source)
        return list(numbers) if self.rank == source else [int(number) for number in message.tolist()]

    def broadcast_object(self, obj: Any, source: int) -> Any:
        """A picklable object from `source`. Ranks of one job trust each other."""
        payload = pickle.dumps(obj) if self.rank == source else b""
        (length,) = self.broadcast_numbers([len(payload)], source)
        message = torch.frombuffer(bytearray(payload or bytes(length)), dtype=torch.uint8).to(self._message_device)
        self._broadcast(message, source)
        return obj if self.rank == source else pickle.loads(message.cpu().numpy().tobytes())

    def broadcast_bytes(self, payload: Tensor, source: int) -> None:
        """Fill a flat uint8 tensor with that of `source`."""
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

    def receive(self, formats: Sequence[WireFormat], source: int) -> list[tuple[dist.Work | None, Tensor]]:
        """Post the receives of tensors; `wait` for them."""
        receipts: list[tuple[dist.Work | None, Tensor]] = []
        for form in formats:
            buffer = form.empty(self.device)
            work = None
            if not form.is_empty:
                with self._connection() as group:
                    work = group.recv([form.wire(buffer)], source, _DATA)
            receipts.append((work, buffer))
        return receipts

    def wait(self, receipts: Sequence[tuple[dist.Work | None, Tensor]]) -> list[Tensor]:
        """The tensors of posted receives."""
        with self._connection():
            for work, _ in receipts:
                if work is not None:
                    work.wait()
        return [buffer for _, buffer in receipts]

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
            _finish(work)
        self._acknowledgements.clear()
        message = torch.zeros(1, dtype=torch.uint8, device=self._message_device)
        with self._connection() as group:
            if self.rank != source:
                self._acknowledgements.append(group.send([message], source, _ACKNOWLEDGE))
                return
            works = [group.recv([message], peer, _ACKNOWLEDGE) for peer in range(self.size) if peer != self.rank]
        for work in works:
            _finish(work)

    def meet(self, what: str, timeout: datetime.timedelta) -> None:
        """Wait for the other ranks. Raises CheckpointError, naming those that do not come in time, or that make another call."""
        if self._message_device.type == "cpu":  # only gloo can tell who is missing
            assert self._group is not None
            try:
                dist.monitored_barrier(self._group, timeout=timeout, wait_all_ranks=True)
            except RuntimeError as error:
                raise CheckpointError(
                    f"{what} must be called on all {self.size} ranks of the replica, and some did not call it within "
                    f"{timeout.total_seconds():g} s: {error}"
                ) from error
        said = self.gather(what)
        if any(other != what for other in said):
            calls = ", ".join(f"{other} on rank {rank}" for rank, other in enumerate(said))
            raise CheckpointError(f"the ranks of a replica must make the same calls, in the same order; found {calls}")

    def close(self) -> None:
        """Drop what is under way and close the connections, so that peers that wait wake up."""
        self._pending.clear()
        self._acknowledgements.clear()
        group, self._group = self._group, None
        if group is not None:
            if self.device.type == "cuda":  # NCCL would first wait for what is under way, which may never end
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


def _finish(work: dist.Work) -> None:
    with suppress(RuntimeError):
        work.wait()
