"""The process-wide state behind `smpc.v1`: the only place, with `smpc.v2`, where smpc keeps any.

Terms
    session   everything that `smp.init` decides once: configuration, mesh, this process's place in it, its groups
    state     the session, if there is one, and what the training script has registered since

`smp.state.cfg.<key>` reads a configuration parameter, as scripts for SMP v1 do:

    smp.init({"pipeline_parallel_degree": 2})
    smp.state.cfg.microbatches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from smpc.config import Config
from smpc.errors import UsageError
from smpc.mesh import Axis, Mesh
from smpc.nn.parallel import TensorParallel
from smpc.nn.registry import Registry
from smpc.observation import Observation


@dataclass(frozen=True, slots=True)
class Session:
    """What `smp.init` decided. `groups` has the process group of every axis that this process belongs to."""

    config: Config
    mesh: Mesh
    rank: int  # global rank of this process
    local_rank: int  # position among the processes of this host
    local_size: int  # processes on this host
    device: torch.device  # where this process computes
    message_device: torch.device  # where the bytes of the communication API lie while they are sent
    groups: Mapping[Axis, dist.ProcessGroup]
    parallel: TensorParallel  # how tensor-parallel modules are split
    owns_world: bool  # whether smp.init started torch.distributed, so that smp.shutdown ends it
    observation: Observation | None = None  # what the launcher asks for
    clock_offset: int = 0  # nanoseconds to add to this process's clock for that of rank 0


class State:
    """The one mutable object of `smpc.v1`."""

    def __init__(self) -> None:
        self.session_number = 0  # of the sessions of this process; it sets apart what they leave in the job's store
        self.registry = Registry()  # classes may be registered before smp.init, and stay so after smp.shutdown
        self.clear()

    def clear(self) -> None:
        """Forget everything, as before the first `smp.init`."""
        self._session: Session | None = None
        self.tracing = False  # whether a model is being recorded
        self.model: Any = None  # the one smp.DistributedModel of the script
        self.optimizer: Any = None  # the smp.DistributedOptimizer of the script
        self.scaler: Any = None  # the smp.amp.GradScaler of the script
        self.checkpointer: Any = None  # how the ranks save and load together, once they have
        self.closers: list[Callable[[], None]] = []  # what smp.shutdown calls first

    def start(self, session: Session) -> None:
        """Enter a session; `smp.init` calls it."""
        self._session = session
        self.session_number += 1

    @property
    def initialized(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The current session. Raises UsageError before `smp.init`."""
        if self._session is None:
            raise UsageError(
                "smp.init has not been called in this process; call smp.init(config) first, once, on every rank"
            )
        return self._session

    @property
    def cfg(self) -> Config:
        """The configuration. Raises UsageError before `smp.init`."""
        return self.session.config


state = State()
