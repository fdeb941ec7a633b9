"""The process groups of a job: how they start (`initialize_dist`), and how a process that has some ends (`watch_end`).

No thread of theirs may still run when Python takes itself down. gloo runs a collective call in a thread of its own. The call may return
before that thread has released the tensors; if it is the last owner, it needs Python to free them. On a loaded machine, a process may end
in between: Python is then gone, and the process aborts with SIGABRT instead of status 0. So the process waits until those threads sleep.

    sleeping    two readings of /proc say so, and that it was never awake in between. A thread that waits for Python is awake while
                Reading /proc releases Python's lock.

`destroy_process_group` ends the threads of groups that nothing else refers to; device meshes and sharded models keep theirs.
"""

from __future__ import annotations

import datetime
import os
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch._C._distributed_c10d import Store
from smpc.dist.rank_and_size import is_available
from smpc.dist.rank_and_size import is_initialized
from smpc.errors import ConfigError
from smpc.errors import ConfigTypeError
from smpc.errors import ConfigUnsupportedError
from smpc.errors import GroupError
from smpc.launch.rendezvous import job_store
from smpc.launch.rendezvous import store_of_call
from smpc.places import Launch
import atexit
import functools
import time
from pathlib import Path


_LOOP_THREAD = "pt_gloo_runloop"  # torch's own name for them
_THREADS = Path("/proc/self/task")
_POLL_SECONDS = 0.001
_MOST_SECONDS = 60.0


@functools.cache
def watch_end() -> None:
    """Have this process wait at its end for the threads of its process groups. Once is enough."""
    atexit.register(await_sleep)


def await_sleep(seconds: float = _MOST_SECONDS) -> bool:
    """Wait until the threads of gloo sleep, at most so long; whether they do. True where there is no /proc."""
    limit = time.monotonic() + seconds
    before = None
    while time.monotonic() < limit:
        now = _switches_before_start()
        if now is not None and now == before:
            return True
        before = now
        time.sleep(_POLL_SECONDS)
    return False


def _switches_before_start() -> dict[str, str] | None:
    """How often each of them has gone to sleep, by its number; None, if one is awake."""
    found = {}
    for thread in sorted(os.listdir(_THREADS)) if _THREADS.is_dir() else ():
        try:
            lines = (_THREADS / thread / "status").read_text(encoding="utf-8").splitlines()
        except OSError:  # it has ended
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] != _LOOP_THREAD:
            continue
        if not status["State"].startswith("S"):
            return None
        found[thread] = status["voluntary_ctxt_switches"]
    return found


_BACKENDS = {"cpu": "gloo", "gpu": "cpu:gloo,cuda:nccl"}
_NAME = "smpc_dist"  # in the job's store


def initialize_dist(device: str | torch.device | None = None, timeout: float = 300.0) -> None:
    """Make the process group of all ranks; with a group there already, only check it.

    `device`: `cpu` (gloo), `gpu` (nccl for its tensors, gloo for others); by default gpu where there is one. `timeout`: seconds that
    this, and every wait for other ranks, may take. The place comes from what `smpc run`, torchrun, mpirun or srun have set; where nothing
    is set, it is a job of one process, in memory. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and NODE_RANK are set afterwards. After
    `torch.distributed.destroy_process_group` it may be called again, on all ranks equally often.

    Raises ConfigError for other devices and for a place that is incomplete; GroupError, if there is a group of another backend.
    """
    kind = _kind_of_device(device)
    if not is_available():
        raise GroupError("this torch was built without torch.distributed")
    checked_seconds(timeout)
    watch_end()
    if is_initialized():
        _check_backend(kind)
        return
    launch = Launch.read(os.environ)
    limit = datetime.timedelta(seconds=timeout)
    if kind == "gpu":
        torch.cuda.set_device(launch.local_rank)
    store: Store = HashStore()
    if launch.master_port is not None:
        try:
            store = store_of_call(job_store(launch, limit), _NAME, launch.rank)
        except RuntimeError as error:
            raise GroupError(
                f"initialize_dist: rank {launch.rank} could not reach the store of the job at {launch.master_addr}:{launch.master_port} "
                f"within {timeout:g} s: {str(error).splitlines()[0]}"
            ) from error
    distributed.init_process_group(
        _BACKENDS[kind],
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=limit,
    )
    _set_variables(launch)


def checked_seconds(timeout: float) -> float:
    """The timeout. Raises ConfigTypeError or ConfigError for an invalid one: with NaN, whose comparisons are false, a wait has no end."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ConfigTypeError(f"timeout: expected seconds, found {timeout!r}")
    if not 0 < timeout < 1e9:
        raise ConfigError(f"timeout: expected seconds above 0, found {timeout!r}")
    return timeout


def _kind_of_device(device: str | torch.device | None) -> str:
    """cpu or gpu: what collectives run on."""
    if device is None:
        return "gpu" if torch.cuda.is_available() else "cpu"
    name = device.type if isinstance(device, torch.device) else device
    name = {"cuda": "gpu"}.get(name, name)
    if name in ("mps", "tpu"):
        raise ConfigUnsupportedError(f"device: {name!r} is not supported; expected cpu or gpu")
    if name not in _BACKENDS:
        raise ConfigError(f"device: expected cpu or gpu, found {name!r}")
    if name == "gpu" and not torch.cuda.is_available():
        raise ConfigError("device: gpu needs a GPU, and torch finds none; use cpu")
    return name


def _check_backend(kind: str) -> None:
    found = distributed.get_backend()
    wanted = "gloo" if kind == "cpu" else "nccl"
    if wanted not in (found, *str(distributed.get_backend_config()).replace(",", ":").split(":")):
        raise GroupError(
            f"initialize_dist: torch.distributed is initialised with {found}, and {kind} needs {wanted}; initialise it once, or call "
            "torch.distributed.destroy_process_group before"
        )


def _set_variables(launch: Launch) -> None:
    """Sets variables that a launcher has not set, as torchrun would."""
    values = {
        "RANK": launch.rank,
        "WORLD_SIZE": launch.world_size,
        "LOCAL_RANK": launch.local_rank,
        "LOCAL_WORLD_SIZE": launch.local_size,
    }
    if launch.single_host:
        values["NODE_RANK"] = 0
    for name, value in values.items():
        if not os.environ.get(name, "").strip():
            os.environ[name] = str(value)
