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
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from smpc.config import Config
from smpc.errors import ConfigError
from smpc.mesh import Axis, Mesh
from smpc.v1.comm import gather_objects
from smpc.v1.state import Session, state

_LOOPBACK = "127.0.0.1"


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
        local_master = address in ("localhost", _LOOPBACK, "::1")
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
        _start_world(backend, launch)
    try:
        state.start(_make_session(parsed, mesh, launch, backend, device, owns_world=not given))
    except BaseException:
        if not given:
            dist.destroy_process_group()
        raise


def shutdown() -> None:
    """End the session: destroy its process groups, and torch.distributed if `smp.init` started it.

    Every rank should call it, after its last communication. Does nothing if there is no session. `smp.init` may be
    called again afterwards, with any configuration.
    """
    if not state.initialized:
        return
    session = state.session
    for close in state.closers:
        close()
    state.clear()
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
        return torch.device("cuda", torch.cuda.current_device())
    if launch.local_size > torch.cuda.device_count():
        raise ConfigError(
            f"expected at most one process per visible GPU, found {launch.local_size} processes and "
            f"{torch.cuda.device_count()} GPUs on {socket.gethostname()}; start fewer processes, or set "
            "ddp_dist_backend: gloo to compute on the CPU"
        )
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


def _start_world(backend: str, launch: Launch) -> None:
    """Initialise torch.distributed for a launcher's process, or for a job of one."""
    if launch.single_host:
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if launch.master_port is None:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    elif launch.single_host and not launch.has_store:
        store = _loopback_store(launch.master_port, launch)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size)
    else:
        dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size)


def _loopback_store(port: int, launch: Launch) -> TCPStore:
    """A TCPStore that only this host can reach. Left to itself, TCPStore listens on every interface."""
    if launch.rank != 0:
        return TCPStore(_LOOPBACK, port, launch.world_size, is_master=False)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_LOOPBACK, port))
        listener.listen(launch.world_size)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"MASTER_PORT: cannot listen on {_LOOPBACK}:{port}: {error.strerror}; choose another"
        ) from None
    return TCPStore(
        _LOOPBACK,
        port,
        launch.world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns and closes it from here on
    )


def _make_session(
    config: Config, mesh: Mesh, launch: Launch, backend: str, device: torch.device, *, owns_world: bool
) -> Session:
    """Check that the ranks agree, then make the groups."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised by now"
    message_device = torch.device("cpu") if "gloo" in backend else device
    configs = gather_objects(config, world, message_device, device)
    _check_same(configs, [f"rank {rank}" for rank in range(len(configs))])
    return Session(
        config=config,
        mesh=mesh,
        rank=launch.rank,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        device=device,
        message_device=message_device,
        groups=_make_groups(mesh, launch.rank, world),
        owns_world=owns_world,
    )


def _make_groups(mesh: Mesh, rank: int, world: dist.ProcessGroup) -> dict[Axis, dist.ProcessGroup]:
    """The process group of every axis. Axes with the same groups share them: without tensor parallelism MP is PP.

    Collective: every rank makes every group, in the same order, as torch.distributed demands.
    """
    made = {mesh.groups(Axis.WORLD): world}
    groups: dict[Axis, dist.ProcessGroup] = {}
    for axis in Axis:
        partition = mesh.groups(axis)
        if partition not in made:
            new = [dist.new_group(list(members)) for members in partition]
            made[partition] = next(group for members, group in zip(partition, new, strict=True) if rank in members)
        groups[axis] = made[partition]
    return groups


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
