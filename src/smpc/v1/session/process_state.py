"""The process-wide state behind `smpc.v1`: the only place where smpc keeps any.

Terms
    session   everything that `smp.init` decides once: configuration, mesh, this process's place in it, its groups
    script    what the training script has made since: a model, its optimizer, ...; one for each model
    state     the session, if there is one, and the scripts. `state.model` belongs to the acting script

Only functions that a user calls read `state`. Objects that work for a model get the `Session` and the `Script` when they are made.

`smp.state.cfg.<key>` reads a configuration parameter, as scripts for SMP v1 do:

    smp.init({"pipeline_parallel_degree": 2})
    smp.state.cfg.microbatches

and so are these:

    module_manager.translate_functions    a pair (to Hugging Face's, to smdistributed's) for each family whose layers the model has
                                          distributed, both from full state dict to full state dict; scripts may add their own
    param_index_to_name_tp_group          for each rank of the tensor-parallel group, the names of its parameters by their number among
                                          those that this pipeline rank has; all ranks of a group have slices of the same ones
    param_name_to_index_tp_group          the inverse; scripts may set both, and read what they have set then
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smpc.config import Config
from smpc.errors import UsageError
from smpc.executor import FailureMonitor
from smpc.mesh import Axis, Mesh
from smpc.nn.distribution.registry import Registry
from smpc.nn.parallel import TensorParallel
from smpc.nn.registration import formats_in
from smpc.observe.window import Observation
from smpc.partitioner.costs.device import Device


@dataclass(frozen=True, slots=True)
class Session:
    """What `smp.init` decided. `groups` has the process group of every axis that this process belongs to."""

    config: Config
    mesh: Mesh
    rank: int  # global rank of this process
    local_rank: int  # position among the processes of this host
    local_size: int  # processes on this host
    device: torch.device  # where this process computes
    planned_for: tuple[Device, ...]  # of each pipeline rank, to cut models for; (): for the kind of `device`
    message_device: torch.device  # the device of the communication API's bytes while they are sent
    groups: Mapping[Axis, dist.ProcessGroup]
    parallel: TensorParallel  # how tensor-parallel modules are split
    owns_world: bool  # whether smp.init started torch.distributed, so that smp.shutdown ends it
    observation: Observation | None = None  # what the launcher asks for
    clock_offset: int = 0  # nanoseconds to add to this process's clock to get rank 0's
    monitor: FailureMonitor | None = (
        None  # ends this process where others have failed or stalled; None in a job of one process
    )

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded over ranks that otherwise hold the same part of the model."""
        return self.mesh.rdp_size > 1 and (self.config.fully_shard or self.mesh.shard_size > 1)


class JobState:
    """State that all models of a script share."""

    def __init__(self) -> None:
        self.session: Session | None = None  # once smp.init has begun it
        self.tracing = False  # whether a model is being recorded
        self.checkpointer: Any = None  # how the ranks save and load together, once they have


class Script:
    """The objects that the training script has made around one model; None until it makes them."""

    def __init__(self, job: JobState | None = None) -> None:
        self.job = job or JobState()
        self.model: Any = None  # the smp.DistributedModel
        self.runner: Any = None  # the StepRunner of its steps
        self.optimizer: Any = None  # the smp.DistributedOptimizer
        self.untold: Any = None  # the same, until it has been compared with the other ranks'
        self.scaler: Any = None  # the smp.amp.GradScaler
        self.awaits_optimizer = False  # its state is loaded, and the first step fills it in

    def check_filled(self, what: str) -> None:
        """Raise UsageError if `what` would read the optimizer's state, and only the first step fills it in."""
        if self.awaits_optimizer:
            raise UsageError(
                f"{what}: the state of the optimizer that was loaded is filled in by the first step, which partitions the model; until "
                "then there are the values from before loading: call this after the first step, or in a hook of "
                "model.register_post_partition_hook"
            )


class ScriptModels:
    """One for each model. Code for one of them runs with that one `acting`; by default the first one acts."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.num_optimizers = 0  # of this session, those that others have replaced too
        self.job = JobState()
        self.scripts = [Script(self.job)]
        self._acting: Script | None = None

    @property
    def acting_script(self) -> Script:
        """The script whose model and optimizer are used now."""
        return self._acting or self.scripts[0]

    @contextlib.contextmanager
    def acting(self, script: Script) -> Iterator[None]:
        """In this context `script` acts."""
        outer, self._acting = self._acting, script
        try:
            yield
        finally:
            self._acting = outer

    def new_script(self) -> Script:
        """The script for a new model: the last one, as long as it has none."""
        if self.scripts[-1].model is not None:
            self.scripts.append(Script(self.job))
        return self.scripts[-1]

    def script_with(self, tensors: Iterable[torch.Tensor], what: str) -> Script:
        """The script whose model has these parameters; the acting one if none has. Raises UsageError for parameters of several models."""
        if len(self.scripts) == 1:
            return self.acting_script
        given = {id(tensor) for tensor in tensors}
        found = [each for each in self.with_models if not given.isdisjoint(_held_parameters(each))]
        if len(found) > 1:
            raise UsageError(
                f"{what}: expected parameters of one DistributedModel, found parameters of {len(found)}; {what} each by itself"
            )
        return found[0] if found else self.acting_script

    def script_of(self, model: Any) -> Script:
        """The script of a DistributedModel of this session."""
        return next((each for each in self.scripts if each.model is model), self.acting_script)

    @property
    def with_models(self) -> list[Script]:
        """The scripts that have a model."""
        return [each for each in self.scripts if each.model is not None]

    @property
    def tracing(self) -> bool:
        """Whether a model is being recorded."""
        return self.job.tracing

    @property
    def checkpointer(self) -> Any:
        """How the ranks save and load together, once they have."""
        return self.job.checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        self.job.checkpointer = value

    @property
    def model(self) -> Any:
        """The smp.DistributedModel."""
        return self.acting_script.model

    @model.setter
    def model(self, value: Any) -> None:
        self.acting_script.model = value

    @property
    def optimizer(self) -> Any:
        """The smp.DistributedOptimizer."""
        return self.acting_script.optimizer

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self.acting_script.optimizer = value

    @property
    def scaler(self) -> Any:
        """The smp.amp.GradScaler."""
        return self.acting_script.scaler

    @scaler.setter
    def scaler(self, value: Any) -> None:
        self.acting_script.scaler = value


def _held_parameters(script: Script) -> Iterator[int]:
    """Its model's parameters, and their replacements in its optimizer."""
    yield from (id(parameter) for parameter in script.model.parameters())
    if script.optimizer is not None:
        yield from (id(entry) for group in script.optimizer.param_groups for entry in group["params"])


Translations = tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]


class ModuleManager:
    """How state dicts of the model's modules are translated."""

    def __init__(self) -> None:
        self.translate_functions: list[Translations] = []

    def look_at(self, module: nn.Module) -> None:
        """Add the translations of a model."""
        self.translate_functions += [(form.to_hf, form.to_smdistributed) for form in formats_in(module)]


class _Numbered(ScriptModels):
    """Attributes of `smp.state_mod.state` that scripts read beside the configuration."""

    session: Any

    def _forget(self) -> None:
        super()._forget()
        self.module_manager = ModuleManager()
        self._names_by_index: list[Mapping[int, str]] | None = None
        self._indices_by_name: list[Mapping[str, int]] | None = None

    @property
    def param_index_to_name_tp_group(self) -> list[Mapping[int, str]]:
        """Names by number, for each tensor-parallel rank."""
        if self._names_by_index is not None:
            return self._names_by_index
        names = self._local_names("param_index_to_name_tp_group")
        return [dict(enumerate(names)) for _ in range(self.session.mesh.tp_size)]

    @param_index_to_name_tp_group.setter
    def param_index_to_name_tp_group(self, value: list[Mapping[int, str]]) -> None:
        self._names_by_index = value

    @property
    def param_name_to_index_tp_group(self) -> list[Mapping[str, int]]:
        """Numbers by name, for each tensor-parallel rank."""
        if self._indices_by_name is not None:
            return self._indices_by_name
        names = self._local_names("param_name_to_index_tp_group")
        return [{name: index for index, name in enumerate(names)} for _ in range(self.session.mesh.tp_size)]

    @param_name_to_index_tp_group.setter
    def param_name_to_index_tp_group(self, value: list[Mapping[str, int]]) -> None:
        self._indices_by_name = value

    def _local_names(self, what: str) -> list[str]:
        if self.model is None:
            raise UsageError(f"smp.state.{what}: expected a smp.DistributedModel, found none; construct it first")
        return [name for name, _ in self.model.local_named_parameters()]


def ended(what: str) -> UsageError:
    """The error for something of a session that is over."""
    return UsageError(
        f"this {what} belongs to a session that smp.shutdown has ended, and with it its groups; after smp.init, construct a new "
        f"{what} (its weights: state_dict() before smp.shutdown, load_state_dict() of the new one)"
    )


class State(_Numbered):
    """The one mutable object of `smpc.v1`."""

    def __init__(self) -> None:
        super().__init__()
        self.session_number = (
            0  # of the sessions that this process has begun; it separates their keys in the job's store
        )
        self.registry = Registry()  # classes may be registered before smp.init, and stay so after smp.shutdown
        self.at_model: list[Callable[[], Callable[[], None]]] = []  # what begins with a model; returns what ends it
        self.clear()

    def clear(self) -> None:
        """Forget everything, as before the first `smp.init`."""
        self._forget()
        self.closers: list[Callable[[], None]] = []  # what smp.shutdown calls first

    def start(self, session: Session) -> None:
        """Enter a session; `smp.init` calls it."""
        self.job.session = session

    @property
    def initialized(self) -> bool:
        """Whether there is a session."""
        return self.job.session is not None

    @property
    def session(self) -> Session:
        """The current session. Raises UsageError before `smp.init`."""
        if self.job.session is None:
            raise UsageError(
                "smp.init has not been called in this process; call smp.init(config) first, once, on every rank"
            )
        return self.job.session

    def check_current(self, session: Session | None, what: str) -> None:
        """Raise UsageError unless `session`, in which `what` was made, is the current one."""
        if session is not self.job.session:
            raise ended(what)

    @property
    def current(self) -> Session | None:
        """The current session, if there is one."""
        return self.job.session

    @property
    def cfg(self) -> Config:
        """The configuration. Raises UsageError before `smp.init`."""
        return self.session.config


state = State()
