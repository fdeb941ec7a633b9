"""Starting: `tsm.init` and `tsm.is_initialized`.

On every process of a job, in this order, so that a mistake is one clear error before any group exists: find this process's place in the
job, parse the configuration, start torch.distributed if nobody has, check that all processes have the same configuration, make groups.

A process's place comes from torch.distributed if the script has initialised it, as scripts do; otherwise from the launcher's variables
(`smpc.places`), of a job of one process if there are none.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import torch.distributed as dist

from smpc.dist import initialize_dist
from smpc.dist.process_groups import watch_end
from smpc.dist.sampling import divide_data
from smpc.errors import ConfigError
from smpc.mesh import Axis, Mesh
from smpc.mesh.device_mesh import make_groups
from smpc.places import Place
from smpc.v2.session.config import SessionConfig
from smpc.v2.session.fsdp_patch import patch
from smpc.v2.state_handler import Session, state
from smpc.v2.transforming.transformed_slices import forget_models

_SECONDS = 1800.0  # that a wait for other ranks may take, in a world that is started here


def init(config: str | dict[str, Any] | None = None) -> None:
    """Start this process's session. Call it once, first, on every rank.

    `config`: a dict, the text of a JSON object, or the path of a JSON file; SM_HP_MP_PARAMETERS (JSON) in the environment overrides it, key
    by key. Starts torch.distributed unless that has been done, with nccl where there is a GPU. Calling it again with the same configuration
    does nothing.

    Raises ConfigError or one of its subclasses, before any process group is made, if the configuration is wrong or does not fit the number
    of processes, or if an earlier call had another; on all ranks if they disagree.
    """
    given = dist.is_initialized()
    place = None if given else Place.find(os.environ)
    rank = dist.get_rank() if given else (place.rank if place else 0)
    world_size = dist.get_world_size() if given else (place.world_size if place else 1)
    parsed = SessionConfig.parse(config, world_size, os.environ)
    if state.is_initialized:
        _check_same([state.session.config, parsed], ["the first tsm.init", "this one"])
        return
    mesh = mesh_of(parsed, world_size)
    watch_end()
    for line in parsed.ignored() if rank == 0 else ():
        warnings.warn(line, stacklevel=2)
    if not given:
        initialize_dist(timeout=_SECONDS)
    try:
        session = _make_session(parsed, mesh, rank, owns_world=not given)
        session.closers.append(patch(session))
        session.closers.append(forget_models)
        session.closers.append(divide_data(*mesh.data_place(rank, tensor_ranks_share=True)))
        state.start(session)
    except BaseException:
        if not given:
            dist.destroy_process_group()
        raise


def is_initialized() -> bool:
    """Whether `tsm.init` has been called; true in native mode, too."""
    return state.is_initialized


def mesh_of(config: SessionConfig, world_size: int) -> Mesh:
    """The mesh that a configuration describes: tensor-parallel ranks vary fastest, then context-parallel ranks, shards and replicas."""
    return Mesh(
        world_size,
        tensor_parallel_degree=config.tensor_parallel_degree,
        context_parallel_degree=config.context_parallel_degree,
        sharded_data_parallel_degree=config.shard_degree(world_size) // config.context_parallel_degree,
        expert_parallel_degree=config.expert_parallel_degree,
    )


def _make_session(config: SessionConfig, mesh: Mesh, rank: int, *, owns_world: bool) -> Session:
    """Check that the ranks agree, then make the groups. Collective."""
    found: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(found, dataclasses.asdict(config))
    _check_same([SessionConfig(**each) for each in found], [f"rank {number}" for number in range(mesh.world_size)])
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised by now"
    if config.is_native:
        return Session(config, mesh, rank, {}, None, owns_world)
    groups, replicas = make_groups(mesh, rank, world), _replica_group(mesh, rank, world)
    dist.barrier()  # nobody leaves, and ends a session, while another still connects
    return Session(config, mesh, rank, groups, replicas, owns_world)


def _replica_group(mesh: Mesh, rank: int, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks that have this one's replication rank. Collective: every rank makes every group."""
    number = {each: mesh.axis_rank(Axis.REPLICA, each) for each in range(mesh.world_size)}
    replicas = sorted(set(number.values()))
    if len(replicas) == 1:
        return world
    made = {each: dist.new_group([r for r in number if number[r] == each]) for each in replicas}
    own: dist.ProcessGroup = made[number[rank]]
    return own


def _check_same(configs: list[SessionConfig], owners: list[str]) -> None:
    """Raise ConfigError, listing every key that differs, unless all configurations are equal to the first."""
    lines = []
    for field in dataclasses.fields(SessionConfig):
        values = [getattr(config, field.name) for config in configs]
        odd = next((i for i, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            lines.append(f"{field.name}: {values[0]!r} in {owners[0]}, {values[odd]!r} in {owners[odd]}")
    if lines:
        raise ConfigError("\n".join(["expected one configuration, found different ones; use the same for all", *lines]))
