"""Starting and ending a session: `smp.init` and `smp.shutdown`.

`smp.init(config)` runs on every process of a job, in this order, so that a mistake is one clear error before any
group exists: find this process's place in the job, parse the configuration (the dict, overridden by
SM_HP_MP_PARAMETERS), build the mesh, start torch.distributed if nobody has, check that all processes have the same
configuration, make one process group for every axis.

A process's place comes from torch.distributed, if it is initialised already: it is used unchanged. Otherwise it comes from the launcher's
variables, as below.

How long ranks wait for each other, here and until the first step is done, is up to `start_timeout`: see `smpc.v1.session.wait_limits`.

Listeners: a job on a single host listens on the loopback interface alone. For that GLOO_SOCKET_IFNAME and
NCCL_SOCKET_IFNAME are set to it where they are not set, and without a launcher's store rank 0 makes one that is bound
to 127.0.0.1. A script that initialises torch.distributed itself chooses its own interface.

How the processes of a job find each other: this process's place, the store they share, and which processes have arrived.

A process's place comes from its launcher (`smpc.places`): torchrun, `smpc run`, mpirun, srun, or variables set by hand. If nothing names
other processes, it is a job of one process.

The launcher serves the store (torchrun, `smpc run`), or else rank 0 does, at MASTER_ADDR and MASTER_PORT. On one host the address may be
left out, and also the port if mpirun or srun has a number for the job, from which all ranks derive the same port. Rank 0's store serves
the later sessions of the same processes too.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from smpc.config import Config
from smpc.dist.process_groups import watch_end
from smpc.dist.sampling import divide_data
from smpc.errors import ConfigError, PeerError, TransportError
from smpc.executor import FailureMonitor
from smpc.executor.collectives import TensorGroup
from smpc.executor.failure.process_reports import Process
from smpc.executor.failure.start import StartPhase
from smpc.executor.host_memory.freed_memory import keep_freed_memory
from smpc.executor.measure.link_measurement import clock_offset
from smpc.launch.rendezvous import job_store, store_of_job
from smpc.mesh import Axis, Mesh
from smpc.mesh.device_mesh import make_groups
from smpc.nn.parallel import TensorParallel, set_parallel
from smpc.nn.random import RandomStreams
from smpc.observe.window import Observation, Window
from smpc.partitioner.costs.device import Device
from smpc.partitioner.costs.device_file import find_devices
from smpc.places import Launch
from smpc.v1.session.object_messages import gather_objects
from smpc.v1.session.process_state import Session, state
from smpc.v1.session.wait_limits import longest_timeout, make_monitor, ranks_that_ended

_HERE = "smpc_here"  # store key: which processes have called smp.init
_MANY = 8
_SHORTEST_LOOK, _LONGEST_LOOK = 0.01, 1.0  # seconds between two looks at who is here: a tenth of the wait so far


def meet(launch: Launch, timeout: datetime.timedelta) -> Store:
    """The store of this session, once all processes have arrived; for a job of several processes."""
    base = _connect(launch, timeout)
    store = PrefixStore(f"smpc_session_{state.session_number}", base)
    try:
        await_all(store, launch, timeout)
    except TransportError:
        if launch.rank == 0 and not launch.has_store:
            time.sleep(2 * _LONGEST_LOOK)  # the others notice by themselves, by reading this process's store
        raise
    return store


def _connect(launch: Launch, timeout: datetime.timedelta) -> Store:
    """The job's store. On one host, only that host can reach it: left to itself, TCPStore listens on every interface."""
    try:
        return job_store(launch, timeout)
    except RuntimeError as error:
        where = f"{launch.master_addr}:{launch.master_port}"
        whose = "the launcher" if launch.has_store else "rank 0"
        raise TransportError(
            f"smp.init: rank {launch.rank} ({launch.origin}) could not reach the store of the job at {where} within start_timeout = "
            f"{timeout.total_seconds():g} s; {whose} serves it, and has not come or cannot be reached: {str(error).splitlines()[0]}"
        ) from error


def await_all(store: Store, launch: Launch, timeout: datetime.timedelta) -> None:
    """Wait until all processes are here.

    Raises TransportError, naming missing processes; PeerError once the launcher says that one of them has ended with status 0;
    ConfigError if another process has this one's place.
    """
    if store.add(f"{_HERE}/{launch.rank}", 1) > 1:
        raise ConfigError(
            f"smp.init: another process says that it is rank {launch.rank} too ({launch.origin or 'process ' + str(os.getpid())}); give "
            "each process of the job a RANK of its own, and start every job with a MASTER_PORT of its own"
        )
    missing = list(range(launch.world_size))
    launcher, started = store_of_job(store), time.monotonic()
    while True:
        while missing and store.check([f"{_HERE}/{missing[0]}"]):
            del missing[0]
        if not missing:
            return
        gone_early = ranks_that_ended(launcher)
        waited = time.monotonic() - started
        if gone_early or waited > timeout.total_seconds():
            missing = [rank for rank in missing if not store.check([f"{_HERE}/{rank}"])]
        gone = [rank for rank in missing if rank in gone_early]
        if gone:
            raise PeerError(
                f"smp.init: expected {launch.world_size} processes, but {ranks(gone)} ended with status 0 before smp.init; every "
                "rank must call it, or none: look for what ends the script there"
            )
        if missing and waited > timeout.total_seconds():
            origin = f" ({launch.origin})" if launch.origin else ""
            raise TransportError(
                f"smp.init: expected {launch.world_size} processes{origin} within start_timeout = {timeout.total_seconds():g} s, but "
                f"{ranks(missing)} did not come: still importing, in what the script does before smp.init, stopped, or never started; "
                "look for what they do there, or raise start_timeout"
            )
        time.sleep(min(max(waited / 10, _SHORTEST_LOOK), _LONGEST_LOOK))


def ranks(numbers: list[int]) -> str:
    """For people: `ranks 1, 2`."""
    shown = ", ".join(map(str, numbers[:_MANY])) + (f" and {len(numbers) - _MANY} more" if len(numbers) > _MANY else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


_LATER = 60.0  # seconds


def init(config: Mapping[str, Any] | Config | None = None) -> None:
    """Start the session of this process. Call it once, first, on every rank.

    `config`: the parameters of `smpc.config.Config` as a dict, flat or nested as for a SageMaker estimator; the
    environment variable SM_HP_MP_PARAMETERS (JSON) overrides it, and replaces it if it is None. A `Config` is used
    unchanged.

    Initialises torch.distributed unless that has been done, with nccl beside gloo where there is a GPU
    (`ddp_dist_backend` decides otherwise), and makes the process's GPU (`local_rank`) the current device. On a CPU the process keeps
    memory that it frees (`smpc.executor.host_memory.freed_memory`). Calling it again with the same configuration does nothing.

    Raises ConfigError (or its subclasses) if the configuration is wrong, the number of processes does not match the
    degrees, ranks disagree on the configuration, or an earlier call had another configuration. TransportError names the
    processes that do not come within `start_timeout`.
    """
    if state.initialized:
        _check_same([state.cfg, _parse(config, warn=False)], ["the first smp.init", "this one"])
        return
    watch_end()
    given = dist.is_initialized()
    launch = _running_launch() if given else Launch.read(os.environ)
    parsed = _parse(config, warn=launch.rank == 0)
    _check_hosts(parsed, launch)
    planned_for = _devices_of(parsed)
    mesh = Mesh.build(parsed, launch.world_size)
    backend = dist.get_backend_config() if given else _choose_backend(parsed.ddp_dist_backend)
    device = _choose_device(backend, launch, given)
    state.session_number += 1
    monitor: FailureMonitor | None = None
    try:
        store = _get_default_store() if given else _meet_ranks(launch, parsed)
        if launch.world_size > 1:
            monitor = make_monitor(_clone(store), parsed, mesh, launch.rank, state.session_number)
        with _watched(monitor, "connecting the processes"):
            if not given:
                _start_world(backend, launch, parsed, store)
            session = _make_session(parsed, mesh, launch, backend, device, planned_for, monitor, owns_world=not given)
        state.start(session)
        if device.type == "cpu":
            keep_freed_memory()
        set_parallel(session.parallel)
        place = mesh.data_place(launch.rank, tensor_ranks_share=parsed.prescaled_batch)
        state.closers.append(divide_data(*place))
    except BaseException:
        if monitor is not None:
            monitor.stop()
        if not given and dist.is_initialized():
            dist.destroy_process_group()
        raise
    if monitor is not None:
        state.closers.append(monitor.stop)
        monitor.start.enter(StartPhase.SCRIPT)


def shutdown() -> None:
    """End the session: destroy its process groups, and torch.distributed if `smp.init` started it.

    Every rank should call it, after its last communication. Does nothing if there is no session. `smp.init` may be
    called again afterwards, with any configuration.

    Waits for a checkpoint that is saved in the background, and raises CheckpointError, once all is closed, if it failed.
    """
    if not state.initialized:
        return
    session = state.session
    try:
        if state.checkpointer is not None:
            state.checkpointer.close()
    finally:
        _end(session)


def _end(session: Session) -> None:
    try:
        if session.device.type == "cuda":  # the host is ahead: peers may still wait for what this rank computes
            torch.cuda.synchronize(session.device)
    finally:
        _close_session(session)


def _close_session(session: Session) -> None:
    """Undoes what the session has made."""
    for close in state.closers:
        close()
    state.clear()
    set_parallel(None)
    if session.owns_world:
        dist.destroy_process_group()
        return
    destroyed = [session.groups[Axis.WORLD]]
    for group in session.groups.values():
        if all(group is not other for other in destroyed):
            destroyed.append(group)
            dist.destroy_process_group(group)


def _parse(config: Mapping[str, Any] | Config | None, *, warn: bool) -> Config:
    if isinstance(config, Config):
        return config
    return Config.parse({} if config is None else config, environ=os.environ, warn=warn)


def _check_hosts(config: Config, launch: Launch) -> None:
    """Raise ConfigError unless as many processes run on this host as the configuration says."""
    if config.processes_per_host not in (0, launch.local_size):
        raise ConfigError(
            f"processes_per_host: the configuration says {config.processes_per_host}, found {launch.local_size} on {socket.gethostname()}; "
            f"start as many, as smpc run -n {config.processes_per_host} does, or leave it out"
        )


def _running_launch() -> Launch:
    """The place of a process whose script has initialised torch.distributed itself."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        launch = Launch.read({"MASTER_ADDR": "-", "MASTER_PORT": "0", **os.environ})
        return dataclasses.replace(launch, rank=rank, world_size=world_size)
    hosts: list[str] = [""] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    mine = [other for other in range(world_size) if hosts[other] == hosts[rank]]
    return Launch(rank, world_size, mine.index(rank), len(mine), None, len(mine) == world_size, has_store=True)


def _choose_backend(wanted: str) -> str:
    """The torch.distributed backend of a key `ddp_dist_backend`."""
    cuda = torch.cuda.is_available()
    if wanted == "nccl" and not cuda:
        raise ConfigError("ddp_dist_backend: 'nccl' requires a GPU, found none; set it to auto or gloo")
    # Objects and barriers go over gloo even where tensors go over nccl: they need no GPU memory and no stream.
    return "cpu:gloo,cuda:nccl" if cuda and wanted != "gloo" else "gloo"


def _choose_device(backend: str, launch: Launch, given: bool) -> torch.device:
    """This process's device: a GPU if nccl is available, else the CPU. `given`: the script has chosen the GPU."""
    if "nccl" not in backend or not torch.cuda.is_available():
        return torch.device("cpu")
    if given:
        return _given_device(launch)
    if launch.local_size > torch.cuda.device_count():
        raise ConfigError(
            f"expected at most one process per visible GPU, found {launch.local_size} processes and "
            f"{torch.cuda.device_count()} GPUs on {socket.gethostname()}; start fewer processes, or set "
            "ddp_dist_backend: gloo to compute on the CPU"
        )
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


def _given_device(launch: Launch) -> torch.device:
    """The GPU of a script that has initialised torch.distributed: the device that it is bound to, the current one, or else `local_rank`."""
    world = dist.group.WORLD
    assert world is not None, "the script has initialised it"
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else launch.local_rank  # type: ignore[no-untyped-call]
    device: torch.device = world.bound_device_id or torch.device("cuda", chosen)
    torch.cuda.set_device(device)
    return device


def _start_world(backend: str, launch: Launch, config: Config, store: Store) -> None:
    """Initialise torch.distributed for a launcher's process, or for a job of one."""
    if launch.single_host:
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=_timeout(config)
    )


def _meet_ranks(launch: Launch, config: Config) -> Store:
    """The store of this session's processes, who are all here."""
    if launch.master_port is None:
        return HashStore()
    return meet(launch, datetime.timedelta(seconds=config.start_timeout))


def _clone(store: Store) -> Store:
    """The job's store on a connection of its own, for the watcher thread; its launcher knows its keys."""
    found: Store = store_of_job(store).clone()  # type: ignore[attr-defined]
    return found


def _watched(monitor: FailureMonitor | None, what: str) -> AbstractContextManager[None]:
    return nullcontext() if monitor is None else monitor.exchange(what, monitor.start.timeout)


def _timeout(config: Config) -> datetime.timedelta:
    """The timeout of every wait in torch.distributed. smpc's own waits are shorter and report first: they know which rank is late."""
    return datetime.timedelta(seconds=longest_timeout(config) + _LATER)


def _make_session(
    config: Config,
    mesh: Mesh,
    launch: Launch,
    backend: str,
    device: torch.device,
    planned_for: tuple[Device, ...],
    monitor: FailureMonitor | None,
    *,
    owns_world: bool,
) -> Session:
    """Check that the ranks agree, then make the groups."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised by now"
    message_device = torch.device("cpu") if "gloo" in backend else device
    observation = Observation.read(os.environ)
    window = None if observation is None else observation.window
    mine = config, window, Process.own(), hashlib.sha256(repr(planned_for).encode()).hexdigest()
    found = gather_objects(mine, world, message_device, device)
    _check_same([config for config, *_ in found], [f"rank {rank}" for rank in range(len(found))])
    _check_windows([window for _, window, *_ in found])
    _check_devices(config, [digest for *_, digest in found])
    if monitor is not None:
        monitor.start.know({rank: process for rank, (_, _, process, _) in enumerate(found) if rank != launch.rank})
    offset = 0 if launch.single_host or window is None else clock_offset(world, message_device)
    groups = make_groups(mesh, launch.rank, world, _timeout(config))
    gather_objects(
        None, world, message_device, device
    )  # nobody leaves, and ends a session, while another still connects
    return Session(
        config=config,
        mesh=mesh,
        rank=launch.rank,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        device=device,
        planned_for=planned_for,
        message_device=message_device,
        groups=groups,
        parallel=_tensor_parallel(config, mesh, groups, mesh.pp_rank(launch.rank)),
        owns_world=owns_world,
        observation=observation,
        clock_offset=offset,
        monitor=monitor,
    )


def _tensor_parallel(
    config: Config, mesh: Mesh, groups: Mapping[Axis, dist.ProcessGroup], pipeline_rank: int
) -> TensorParallel:
    """How tensor-parallel modules are split. A group of one rank draws from the default generator."""
    dtype = torch.float16 if config.fp16_params else None
    if mesh.tp_size == 1:
        return TensorParallel(optimize=config.optimize, prescaled_batch=config.prescaled_batch, dtype=dtype)
    group = TensorGroup.of(groups[Axis.TP])
    streams = RandomStreams(config.tensor_parallel_seed, group.rank, pipeline_rank)
    return TensorParallel(group, config.optimize, config.prescaled_batch, dtype, streams)


def _devices_of(config: Config) -> tuple[Device, ...]:
    """The device of each pipeline rank for which models are cut; (): the one that they run on. ConfigError if there is none such."""
    names = config.device_names
    return find_devices(names, config.pipeline_parallel_degree) if names else ()


def _check_devices(config: Config, digests: list[str]) -> None:
    """Raise ConfigError unless all ranks have read the same devices."""
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is not None:
        raise ConfigError(
            f"device: {config.device!r} is another device on rank {odd} than on rank 0; give all hosts the same file, as ranks cut a model "
            "by it"
        )


def _check_windows(windows: list[Window | None]) -> None:
    """Raise ConfigError unless all ranks are observed, or none is, in the same steps."""
    if len(set(windows)) > 1:
        odd = next(i for i, window in enumerate(windows) if window != windows[0])
        raise ConfigError(
            f"smpc run --report, --trace and --trace-steps: expected the same on all nodes, found steps {windows[0]} on rank 0, "
            f"{windows[odd]} on rank {odd}"
        )


def _check_same(configs: list[Config], owners: list[str]) -> None:
    """Raise ConfigError, listing every key that differs, unless all configurations are equal to the first."""
    lines: list[str] = []
    for name in (field.name for field in dataclasses.fields(Config)):
        values = [getattr(config, name) for config in configs]
        odd = next((i for i, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            lines.append(f"{name}: {values[0]!r} in {owners[0]}, {values[odd]!r} in {owners[odd]}")
    if lines:
        raise ConfigError("\n".join(["expected one configuration, found different ones; use the same for all", *lines]))
