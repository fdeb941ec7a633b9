"""`tsm.state`: what `tsm.init` has decided, for scripts to read. The process-wide state behind `smpc.v2`.

    tsm.init({"hybrid_shard_degree": 2, "tensor_parallel_degree": 2})
    tsm.state.tp_rank, tsm.state.rep_rank_process_group

Terms
    replication rank   which copy of the parameters a rank has a part of; ranks of replication rank 0 write sharded checkpoints
    native             all degrees are 1, and `hybrid_shard_degree` is 0 or 1: PyTorch does what the script says, and there are no groups

Copies of the configuration (the degrees, `sm_activation_offloading`, ...) may be assigned, before `init` too, as scripts do that run
without SMP; what is assigned is read again, until `init`, and changes nothing else. Everything else can be read after `init` alone; before,
it is a UsageError.

Source: "torch.sagemaker.state" in the public reference of SMP v2, and public training scripts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smpc.errors import UsageError
from smpc.mesh import Axis, Mesh
from smpc.v2.session.config import SessionConfig
from smpc.v2.session.random_state_tracker import DEFAULT, RngStateTracker

__all__ = ["Ranker", "Session", "State", "state"]
_KEYS = tuple(f.name for f in dataclasses.fields(SessionConfig))


@dataclass(frozen=True, slots=True)
class Session:
    """The session that `tsm.init` made. Groups: one for each axis in use; none in native mode."""

    config: SessionConfig
    mesh: Mesh
    rank: int
    groups: Mapping[Axis, dist.ProcessGroup]
    replica_group: dist.ProcessGroup | None  # the ranks of one replication rank
    owns_world: bool  # whether tsm.init started torch.distributed
    closers: list[Any] = field(default_factory=list)  # what reset calls: patches are taken back
    meshes: list[DeviceMesh] = field(default_factory=list)  # of the parameters, once it has been used
    random_states: RngStateTracker = field(default_factory=RngStateTracker)

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """The process group of an axis; None in native mode, and if no other rank is in it."""
        return None if self.config.is_native else self.groups.get(axis)


class Ranker:
    """Which ranks hold the same: `get_rep_rank` and `get_rep_groups`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_rep_rank(self, global_rank: int) -> int:
        """The replication rank of a global rank."""
        return self._mesh.axis_rank(Axis.REPLICA, global_rank)

    def get_rep_groups(self) -> list[list[int]]:
        """The global ranks that hold the same part of parameters, for each part."""
        return [list(group) for group in self._mesh.groups(Axis.REPLICA)]


class State:
    """See the module's docstring."""

    hybrid_shard_degree: int
    tensor_parallel_degree: int
    context_parallel_degree: int
    expert_parallel_degree: int
    sm_activation_offloading: bool
    activation_loading_horizon: int
    fsdp_cache_flush_warnings: bool
    allow_empty_shards: bool
    random_seed: int

    def __init__(self) -> None:
        self._session: Session | None = None

    def __getattr__(self, name: str) -> Any:
        """A copy of a key of the configuration, unless it has been assigned."""
        if name in _KEYS:
            return getattr(self._of(name).config, name)
        raise AttributeError(f"tsm.state has no attribute {name!r}", name=name, obj=self)

    @property
    def is_initialized(self) -> bool:
        """Whether `tsm.init` has been called, and not `reset` since."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The whole session that `tsm.init` made."""
        return self._of("session")

    @property
    def rank(self) -> int:
        """The global rank, from 0 to `world_size` - 1."""
        return self._of("rank").rank

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return self._of("world_size").mesh.world_size

    @property
    def world_process_group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        self._of("world_process_group")
        return dist.group.WORLD

    @property
    def tp_size(self) -> int:
        """The same as `tensor_parallel_degree`."""
        return self.tensor_parallel_degree

    @property
    def tp_rank(self) -> int:
        """This rank's place among the ranks that share a layer's weights."""
        return self._axis_rank("tp_rank", Axis.TP)

    @property
    def tp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in their tensor-parallel rank alone; None in native mode."""
        return self._of("tp_process_group").group(Axis.TP)

    @property
    def cp_size(self) -> int:
        """The same as `context_parallel_degree`."""
        return self.context_parallel_degree

    @property
    def cp_rank(self) -> int:
        """This rank's place among the ranks that share a sequence."""
        return self._axis_rank("cp_rank", Axis.CP)

    @property
    def cp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share a sequence with this one; None in native mode."""
        return self._of("cp_process_group").group(Axis.CP)

    @property
    def ep_size(self) -> int:
        """The same as `expert_parallel_degree`."""
        return self.expert_parallel_degree

    @property
    def ep_rank(self) -> int:
        """This rank's place among the ranks that share the experts."""
        return self._axis_rank("ep_rank", Axis.EP)

    @property
    def ep_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the experts with this one; None in native mode."""
        return self._of("ep_process_group").group(Axis.EP)

    @property
    def rep_rank_process_group(self) -> dist.ProcessGroup | None:
        """All ranks with this one's replication rank: they hold one copy of the parameters; None in native mode."""
        return self._of("rep_rank_process_group").replica_group

    @property
    def ranker(self) -> Ranker:
        """Which ranks hold the same."""
        return Ranker(self._of("ranker").mesh)

    def get_rng_state_tracker(self) -> RngStateTracker:
        """The random states of this process. The default one starts from `random_seed` and the tensor- or expert-parallel rank."""
        session = self._of("get_rng_state_tracker")
        tracker = session.random_states
        if DEFAULT not in tracker.get_states():
            inner = Axis.TP if session.mesh.tp_size > 1 else Axis.EP
            tracker.add(DEFAULT, session.config.random_seed + session.mesh.axis_rank(inner, session.rank))
        return tracker

    def start(self, session: Session) -> None:
        """Take the session of `tsm.init`; it replaces earlier assignments."""
        self._forget()
        self._session = session

    def reset(self) -> None:
        """Back to before `tsm.init`: patches are undone, and assignments forgotten. For tests."""
        session, self._session = self._session, None
        self._forget()
        if session is not None:
            for close in session.closers:
                close()
            if session.owns_world and dist.is_initialized():
                dist.destroy_process_group()

    def _forget(self) -> None:
        for name in _KEYS:
            vars(self).pop(name, None)

    def _axis_rank(self, name: str, axis: Axis) -> int:
        session = self._of(name)
        return session.mesh.axis_rank(axis, session.rank)

    def _of(self, name: str) -> Session:
        if self._session is None:
            raise UsageError(
                f"tsm.state.{name}: expected tsm.init(...) to be called first; call it at the start of the script"
            )
        return self._session


state = State()
