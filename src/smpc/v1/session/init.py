"""Starting and ending a session: `smp.init` and `smp.shutdown`.

`smp.init(config)` runs on every process of a job, in this order, so that a mistake is one clear error before any
group exists: find this process's place in the job, parse the configuration (the dict, overridden by
SM_HP_MP_PARAMETERS), build the mesh, start torch.distributed if nobody has, check that all processes have the same
configuration, make one process group for every axis.

A process's place comes from, in this order
    torch.distributed, if it is initialised already: it is used as it is
    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun and `smpc run` set them
    neither: a job of one process

Listeners: a job on a single host listens on the loopback interface alone. For that GLOO_SOCKET_IFNAME and
NCCL_SOCKET_IFNAME are set to it where they are not set, and without a launcher's store rank 0 makes one that is
bound to 127.0.0.1. What a script that initialises torch.distributed itself listens on is up to that script.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from smpc.config import Config
from smpc.errors import ConfigError, PeerError, TransportError
from smpc.executor.clocks import clock_offset
from smpc.executor.collectives import TensorGroup
from smpc.launch_store import ENDED, LOOPBACK, is_loopback, listen, of_job, serve
from smpc.mesh import Axis, Mesh
from smpc.nn.parallel import TensorParallel, set_parallel
from smpc.nn.random import RandomStreams
from smpc.observation import Observation, Window
from smpc.v1.session.comm import gather_objects
from smpc.v1.state import Session, state

_HERE = "smpc_here"  # store key: which processes have called smp.init
_MANY = 8
_SHORTEST_LOOK, _LONGEST_LOOK = 0.01, 1.0  # seconds between two looks at who is here: a tenth of the wait so far


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place in the job, as its launcher describes it."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    master_port: int | None  # None: a job of one process, which needs no rendezvous
    single_host: bool
    has_store: bool  # whether the launcher serves the rendezvous store itself

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Launch:
        """Read a launcher's environment variables. ConfigError names every one that is missing or wrong."""
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls(0, 1, 0, 1, None, single_host=True, has_store=False)
        problems: list[str] = []

        def number(name: str, default: int | None = None) -> int:
            text = environ.get(name, "")
            if not text and default is not None:
                return default
            if not text.isascii() or not text.isdigit():
                problems.append(f"{name}: expected a whole number, found {text!r} in the environment")
                return 0
            return int(text)

        rank, world_size, port = number("RANK"), number("WORLD_SIZE"), number("MASTER_PORT")
        address = environ.get("MASTER_ADDR", "")
        local_master = is_loopback(address)
        local_size = number("LOCAL_WORLD_SIZE", world_size if local_master else None)
        local_rank = number("LOCAL_RANK", rank if local_master else None)
        if not address:
            problems.append("MASTER_ADDR: expected the address of rank 0's host, found nothing in the environment")
        if not problems and not (rank < world_size and local_rank < local_size <= world_size):
            problems.append(
                "expected RANK < WORLD_SIZE and LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE, found "
                f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}"
            )
        if problems:
            raise ConfigError("\n".join([*problems, "start the script with smpc run or torchrun, which set them"]))
        has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        single = local_size == world_size
        return cls(rank, world_size, local_rank, local_size, port, single_host=single, has_store=has_store)


def init(config: Mapping[str, Any] | Config | None = None) -> None:
    """Start the session of this process. Call it once, first, on every rank.

    `config`: the parameters of `smpc.config.Config` as a dict, flat or nested as for a SageMaker estimator; the
    environment variable SM_HP_MP_PARAMETERS (JSON) overrides it, and replaces it if it is None. A `Config` is taken as
    it is.

    Initialises torch.distributed unless that has been done, with nccl beside gloo where there is a GPU
    (`ddp_dist_backend` decides otherwise), and makes the process's GPU (`local_rank`) the current device. Calling
    it again with the same configuration does nothing.

    Raises ConfigError (or its subclasses) if the configuration is wrong, the number of processes does not match the
    degrees, ranks disagree on the configuration, or an earlier call had another configuration.
    """
    if state.initialized:
        _check_same([state.cfg, _parse(config, warn=False)], ["the first smp.init", "this one"])
        return
    given = dist.is_initialized()
    launch = _running_launch() if given else Launch.read(os.environ)
    parsed = _parse(config, warn=launch.rank == 0)
    mesh = Mesh.build(parsed, launch.world_size)
    backend = dist.get_backend_config() if given else _choose_backend(parsed.ddp_dist_backend)
    device = _choose_device(backend, launch, given)
    if not given:
        _start_world(backend, launch, parsed)
    try:
        session = _make_session(parsed, mesh, launch, backend, device, owns_world=not given)
        state.start(session)
        set_parallel(session.parallel)
    except BaseException:
        if not given:
            dist.destroy_process_group()
        raise


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
        _close(session)


def _close(session: Session) -> None:
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
    """Where this process computes: a GPU if nccl is there, else the CPU. `given`: the script has chosen the GPU."""
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
    """The GPU of a script that has initialised torch.distributed: what it bound that to, or made current, or else `local_rank`."""
    world = dist.group.WORLD
    assert world is not None, "the script has initialised it"
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else launch.local_rank  # type: ignore[no-untyped-call]
    device: torch.device = world.bound_device_id or torch.device("cuda", chosen)
    torch.cuda.set_device(device)
    return device


def _start_world(backend: str, launch: Launch, config: Config) -> None:
    """Initialise torch.distributed for a launcher's process, or for a job of one."""
    if launch.single_host:
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if launch.master_port is None:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    start = datetime.timedelta(seconds=config.start_timeout)
    store = _connect(launch, start)
    _meet(store, launch, start)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=_timeout(config),
        )
    except RuntimeError as error:
        raise TransportError(
            f"smp.init: rank {launch.rank} met the others in the store at port {launch.master_port}, but they could not connect. "
            f"A rank has ended, or a process that is not of this job has written to the store: {error}"
        ) from error


def _timeout(config: Config) -> datetime.timedelta:
    """Of every wait in torch.distributed; smpc's own are limited by what they are for."""
    return datetime.timedelta(seconds=max(config.start_timeout, config.step_timeout, config.checkpoint_timeout))


def _connect(launch: Launch, timeout: datetime.timedelta) -> Store:
    """The job's store. On one host, only that host can reach it: left to itself, TCPStore listens on every interface."""
    assert launch.master_port is not None, "a job of one process needs no store"
    if launch.has_store or not launch.single_host:
        arrivals = rendezvous("env://", rank=launch.rank, world_size=launch.world_size, timeout=timeout)
        store: Store = next(arrivals)[0]
        return store
    if launch.rank != 0:
        return TCPStore(LOOPBACK, launch.master_port, launch.world_size, is_master=False, timeout=timeout)
    try:
        return serve(listen(LOOPBACK, launch.master_port), timeout)
    except ConfigError as error:
        raise ConfigError(f"MASTER_PORT: {error}") from None


def _meet(store: Store, launch: Launch, timeout: datetime.timedelta) -> None:
    """Wait until all processes are here.

    Raises TransportError, naming those that are not; PeerError once the launcher says that one of those has ended with status 0.
    """
    store.set(f"{_HERE}/{launch.rank}", "")
    missing = list(range(launch.world_size))
    launcher, started = of_job(store), time.monotonic()
    while True:
        while missing and store.check([f"{_HERE}/{missing[0]}"]):
            del missing[0]
        if not missing:
            return
        ended = _ended(launcher)
        waited = time.monotonic() - started
        if ended or waited > timeout.total_seconds():
            missing = [rank for rank in missing if not store.check([f"{_HERE}/{rank}"])]
        gone = [rank for rank in missing if rank in ended]
        if gone:
            raise PeerError(
                f"smp.init: expected {launch.world_size} processes, but {_ranks(gone)} ended with status 0 before smp.init; every "
                "rank must call it, or none: look for what ends the script there"
            )
        if missing and waited > timeout.total_seconds():
            raise TransportError(
                f"smp.init: expected {launch.world_size} processes within start_timeout = {timeout.total_seconds():g} s, but "
                f"{_ranks(missing)} did not come: look for what they do before smp.init"
            )
        time.sleep(min(max(waited / 10, _SHORTEST_LOOK), _LONGEST_LOOK))


def _ended(launcher: Store) -> list[int]:
    """The ranks that have ended with status 0, as far as a launcher tells."""
    told = launcher.get(ENDED).decode() if launcher.check([ENDED]) else ""
    return [int(number) for number in told.split(",") if number.isdecimal()]


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MANY])) + (f" and {len(numbers) - _MANY} more" if len(numbers) > _MANY else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _make_session(
    config: Config, mesh: Mesh, launch: Launch, backend: str, device: torch.device, *, owns_world: bool
) -> Session:
    """Check that the ranks agree, then make the groups."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised by now"
    message_device = torch.device("cpu") if "gloo" in backend else device
    observation = Observation.read(os.environ)
    window = None if observation is None else observation.window
    found = gather_objects((config, window), world, message_device, device)
    _check_same([config for config, _ in found], [f"rank {rank}" for rank in range(len(found))])
    _check_windows([window for _, window in found])
    offset = 0 if launch.single_host or window is None else clock_offset(world, message_device)
    groups = _make_groups(mesh, launch.rank, world, _timeout(config))
    return Session(
        config=config,
        mesh=mesh,
        rank=launch.rank,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        device=device,
        message_device=message_device,
        groups=groups,
        parallel=_tensor_parallel(config, mesh, groups),
        owns_world=owns_world,
        observation=observation,
        clock_offset=offset,
    )


def _tensor_parallel(config: Config, mesh: Mesh, groups: Mapping[Axis, dist.ProcessGroup]) -> TensorParallel:
    """How tensor-parallel modules are split. A group of one draws its random numbers as everything else does."""
    dtype = torch.float16 if config.fp16_params else None
    if mesh.tp_size == 1:
        return TensorParallel(optimize=config.optimize, prescaled_batch=config.prescaled_batch, dtype=dtype)
    group = TensorGroup.of(groups[Axis.TP])
    streams = RandomStreams(config.tensor_parallel_seed, group.rank)
    return TensorParallel(group, config.optimize, config.prescaled_batch, dtype, streams)


def _make_groups(
    mesh: Mesh, rank: int, world: dist.ProcessGroup, timeout: datetime.timedelta
) -> dict[Axis, dist.ProcessGroup]:
    """The process group of every axis. Axes with the same groups share them: without tensor parallelism MP is PP.

    Collective: every rank makes every group, in the same order, as torch.distributed demands.
    """
    made = {mesh.groups(Axis.WORLD): world}
    groups: dict[Axis, dist.ProcessGroup] = {}
    for axis in Axis:
        partition = mesh.groups(axis)
        if partition not in made:
            new = [dist.new_group(list(members), timeout=timeout) for members in partition]
            made[partition] = next(group for members, group in zip(partition, new, strict=True) if rank in members)
        groups[axis] = made[partition]
    return groups


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
