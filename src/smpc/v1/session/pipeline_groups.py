"""The process groups of a replica's pipeline, one for the transport, one for control messages.

All ranks make all groups, in one order, as torch.distributed demands; each keeps its own. Groups of their own let a failing rank close
its connections, so that peers that wait wake up, and keep the user's messages apart. The session's monitor
(`smpc.v1.session.wait_limits`) decides how long ranks wait for each other while the groups are made, and names the late ones.
"""

from __future__ import annotations

import datetime
import itertools

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from smpc.executor.transport import GlooTransport, NcclTransport, Transport
from smpc.launch.rendezvous import store_of_job
from smpc.mesh import Axis
from smpc.v1.session.process_state import Session
from smpc.v1.session.step_messages import Control
from smpc.v1.session.wait_limits import exchange

# Ranks wait for pipeline rank 0 between steps too, while it reads data or writes a checkpoint. Ranks that die close their connections.
_PATIENCE = datetime.timedelta(days=7)


def job_store() -> Store:
    """The job's store on a connection of its own, for the watcher thread; its launcher knows its keys."""
    return store_of_job(_get_default_store()).clone()  # type: ignore[attr-defined,no-any-return]


def make_control(session: Session) -> Control:
    """Control messages of this rank's replica. Collective over all ranks."""
    return Control(_own_group(session), session.device, session.message_device)


def make_state_control(session: Session, pipeline: Control | None) -> Control | None:
    """Messages among the ranks that hold one model's stages and slices; None if one rank has all. Collective over all ranks."""
    if session.mesh.ep_size > 1:  # whose ranks have experts of this one's model
        return make_world_control(session)
    if session.mesh.tp_size == 1:
        return pipeline
    return Control(_own_group(session, Axis.MP), session.device, session.message_device)


def make_world_control(session: Session) -> Control:
    """Messages among all ranks of the job. Collective over all ranks."""
    return Control(_own_group(session, Axis.WORLD), session.device, session.message_device)


def make_transport(session: Session) -> Transport:
    """The transport of this rank's pipeline. Collective over all ranks."""
    if session.device.type == "cpu":
        return GlooTransport(_own_group(session))
    pipeline = session.mesh.group(Axis.PP, session.rank)
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    for members in session.mesh.groups(Axis.PP):
        for (a, source), (b, destination) in itertools.permutations(enumerate(members), 2):
            # torch's watchdog would end the process after ten minutes, and say less than the monitor does after `step_timeout`.
            with exchange("making process groups"):
                group = dist.new_group([source, destination], timeout=_PATIENCE, backend="nccl")
            if members == pipeline and session.rank in (source, destination):
                groups[a, b] = group
    return NcclTransport(pipeline.index(session.rank), groups, session.device)


def _own_group(session: Session, axis: Axis = Axis.PP) -> dist.ProcessGroup:
    with exchange("making process groups"):
        made = [(members, dist.new_group(list(members), timeout=_PATIENCE)) for members in session.mesh.groups(axis)]
    group: dist.ProcessGroup = next(group for members, group in made if session.rank in members)
    return group
