"""Sending Python objects between ranks. Every call blocks until its part is done.

Terms
    object      anything that pickles; tensors inside keep dtype, shape and values, and a CUDA tensor arrives on
                the receiver's device. The receiver unpickles what it gets: the ranks of a job trust each other
    CommGroup   WORLD or <axis>_GROUP: the group of that axis which the caller belongs to
    RankType    what a rank number counts: WORLD_RANK the global rank, <axis>_RANK a position in the caller's
                group of that axis

    call                            pairs with
    send(obj, dest_rank, type)      recv_from on the destination
    broadcast(obj, group)           recv_from on every other member of the group; the caller is the source
    allgather(obj, group)           allgather on every other member; returns the objects in order of rank
    barrier(group)                  barrier on every other member

Example, on all ranks of a replica:

    if smp.mp_rank() == 0:
        smp.broadcast({"tag": "step100"}, smp.MP_GROUP)
    else:
        message = smp.recv_from(0, smp.RankType.MP_RANK)

Messages between two processes arrive in the order in which they were sent. A call without its partner ends the job after
`start_timeout`, before the first step is done, and later after the longest of the timeouts; the error names the rank that did
not come. Source: public SMP v1 API ("Common API").
"""

from __future__ import annotations

import io
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from smpc.errors import UsageError
from smpc.mesh import Axis
from smpc.v1.session.process_state import state
from smpc.v1.session.wait_limits import exchange


class CommGroup(Enum):
    """A group of processes: the one of its axis that the caller belongs to."""

    WORLD = Axis.WORLD
    MP_GROUP = Axis.MP
    DP_GROUP = Axis.DP
    PP_GROUP = Axis.PP
    TP_GROUP = Axis.TP
    RDP_GROUP = Axis.RDP


class RankType(Enum):
    """What a rank number counts."""

    WORLD_RANK = Axis.WORLD
    MP_RANK = Axis.MP
    DP_RANK = Axis.DP
    PP_RANK = Axis.PP
    TP_RANK = Axis.TP
    RDP_RANK = Axis.RDP


WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send an object to one process, which calls `recv_from`.

    `dest_rank`: the destination, counted as `rank_type` says. Raises UsageError if there is no such rank or it is
    the caller.
    """
    payload, destination = _encode_object(obj), _checked_peer(dest_rank, rank_type, "dest_rank")
    with exchange(f"smp.send to rank {destination}"):
        _send_to(payload, destination)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Receive the next object that a process sends to this one, by `send` or `broadcast`.

    `src_rank`: the source, counted as `rank_type` says. Raises UsageError if there is no such rank or it is the
    caller.
    """
    source = _checked_peer(src_rank, rank_type, "src_rank")
    device = state.session.message_device
    with exchange(f"smp.recv_from rank {source}"):
        length = torch.empty(1, dtype=torch.int64, device=device)
        dist.recv(length, src=source)
        payload = torch.empty(int(length), dtype=torch.uint8, device=device)
        dist.recv(payload, src=source)
    return _decode_object(payload, state.session.device)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send an object from the caller to every other member of the group; each calls `recv_from` on the caller."""
    session, payload = state.session, _encode_object(obj)
    for member in session.mesh.group(_group_axis(group), session.rank):
        if member != session.rank:
            with exchange(f"smp.broadcast({group.name}), sending to rank {member}"):
                _send_to(payload, member)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Exchange objects: every member gets the list of all members' objects, in order of their rank in the group."""
    session = state.session
    members, payload = session.groups[_group_axis(group)], _encode_object(obj)
    with exchange(f"smp.allgather({group.name})"):
        found = _gather_bytes(payload, members, session.message_device)
    return [_decode_object(each, session.device) for each in found]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait until every member of the group has called this."""
    session = state.session
    device = session.message_device
    device_ids = None if device.type == "cpu" else [device.index]
    members = session.groups[_group_axis(group)]
    with exchange(f"smp.barrier({group.name})"):
        dist.barrier(members, device_ids=device_ids)


def mp_barrier() -> None:
    """`barrier(MP_GROUP)`: wait for the processes of this replica."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """`barrier(DP_GROUP)`: wait for the processes that run the same stage."""
    barrier(CommGroup.DP_GROUP)


def pp_barrier() -> None:
    """`barrier(PP_GROUP)`: wait for the stages of this replica."""
    barrier(CommGroup.PP_GROUP)


def tp_barrier() -> None:
    """`barrier(TP_GROUP)`: wait for the tensor-parallel peers."""
    barrier(CommGroup.TP_GROUP)


def rdp_barrier() -> None:
    """`barrier(RDP_GROUP)`: wait for the holders of the same parameters."""
    barrier(CommGroup.RDP_GROUP)


def gather_objects(obj: Any, group: dist.ProcessGroup, message_device: torch.device, device: torch.device) -> list[Any]:
    """All members' objects, in order of their rank in the group; usable before there is a session."""
    return [_decode_object(each, device) for each in _gather_bytes(_encode_object(obj), group, message_device)]


def _gather_bytes(payload: torch.Tensor, group: dist.ProcessGroup, message_device: torch.device) -> list[torch.Tensor]:
    """All members' bytes, in order of their rank in the group."""
    payload = payload.to(message_device)
    length = torch.tensor([payload.numel()], dtype=torch.int64, device=message_device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(each) for each in lengths)
    padded = payload.new_zeros(longest)
    padded[: payload.numel()] = payload
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [each[: int(n)] for each, n in zip(gathered, lengths, strict=True)]


def _send_to(payload: torch.Tensor, destination: int) -> None:
    """Send bytes to a global rank, their number first.

    Always over the world's group, so that a broadcast on one axis pairs with a `recv_from` that counts on another.
    """
    payload = payload.to(state.session.message_device)
    dist.send(torch.tensor([payload.numel()], dtype=torch.int64, device=payload.device), dst=destination)
    dist.send(payload, dst=destination)


def _encode_object(obj: Any) -> torch.Tensor:
    """An object as a tensor of bytes. torch.save keeps tensors that share memory sharing it."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _decode_object(payload: torch.Tensor, device: torch.device) -> Any:
    """The object in a tensor of bytes; the sender's CUDA tensors go to `device` if that is a GPU, else to the CPU."""

    def place(storage: Any, location: str) -> Any:
        return storage.cuda(device.index) if location.startswith("cuda") and device.type == "cuda" else storage

    buffer = io.BytesIO(payload.cpu().numpy().tobytes())
    return torch.load(buffer, map_location=place, weights_only=False)


def _group_axis(group: CommGroup) -> Axis:
    if not isinstance(group, CommGroup):
        raise UsageError(f"group: expected a smp.CommGroup, found {type(group).__name__} {group!r}")
    return group.value


def _checked_peer(number: int, rank_type: RankType, argument: str) -> int:
    """Global rank of a partner, which must exist and be another process."""
    if not isinstance(rank_type, RankType):
        raise UsageError(f"rank_type: expected a smp.RankType, found {type(rank_type).__name__} {rank_type!r}")
    session = state.session
    members = session.mesh.group(rank_type.value, session.rank)
    if number not in range(len(members)):
        raise UsageError(
            f"{argument}: expected a {rank_type.name} from 0 to {len(members) - 1}, found {number!r} "
            f"(on rank {session.rank})"
        )
    if members[number] == session.rank:
        raise UsageError(
            f"{argument}: expected another process, found {rank_type.name} {number}, which is the caller itself "
            f"(rank {session.rank})"
        )
    return members[number]
