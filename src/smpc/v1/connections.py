"""The process groups of a replica's pipeline: one for the transport, one for control messages.

All ranks make all groups, in one order, as torch.distributed demands; each keeps its own. Groups of their own let a failing rank close its
connections, so that peers that wait wake up, and keep the user's messages apart.
"""

from __future__ import annotations

import datetime
import itertools

import torch.distributed as dist

from smpc.executor.transport import GlooTransport, NcclTransport, Transport
from smpc.mesh import Axis
from smpc.v1.control import Control
from smpc.v1.state import Session

# Ranks wait for pipeline rank 0 between steps too, while it reads data or writes a checkpoint. Ranks that die close their connections.
_PATIENCE = datetime.timedelta(days=7)


def make_control(session: Session) -> Control:
    """Control messages of this rank's replica. Collective over all ranks."""
    return Control(_own_group(session), session.device, session.message_device)


def make_transport(session: Session) -> Transport:
    """The transport of this rank's pipeline. Collective over all ranks."""
    if session.device.type == "cpu":
        return GlooTransport(_own_group(session))
    pipeline = session.mesh.group(Axis.PP, session.rank)
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    for members in session.mesh.groups(Axis.PP):
        for (a, source), (b, destination) in itertools.permutations(enumerate(members), 2):
            group = dist.new_group([source, destination], backend="nccl")
            if members == pipeline and session.rank in (source, destination):
                groups[a, b] = group
    return NcclTransport(pipeline.index(session.rank), groups, session.device)


def _own_group(session: Session) -> dist.ProcessGroup:
    made = [(members, dist.new_group(list(members), timeout=_PATIENCE)) for members in session.mesh.groups(Axis.PP)]
    group: dist.ProcessGroup = next(group for members, group in made if session.rank in members)
    return group
