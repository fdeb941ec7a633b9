"""`smpc.v1.session.init`: the launcher's environment, sessions of one process, and what is listened on."""

import contextlib
import datetime
import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import server
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import smpc.v1 as smp
from smpc.config import Config
from smpc.errors import ConfigError, ConfigUnsupportedError, PeerError, TransportError, UsageError
from smpc.launch.rendezvous import ENDED, store_of_job
from smpc.places import Launch
from smpc.v1.session.init import _choose_device, _end, await_all, meet

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}


def listens(num_ranks, environ, sender):
    """Sends what this process listens on, as `address:port` in the hexadecimal of /proc/net, and its rank and size."""
    os.environ.clear()
    os.environ.update(environ)
    smp.init({"partitions": num_ranks})
    assert smp.allgather(smp.rank(), smp.WORLD) == list(range(smp.size()))
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            if state == "0A" and f"socket:[{fields[9]}]" in links:
                found.append(local)
    # Where the host's own name means loopback, gloo listens there anyway; elsewhere it is this that makes it.
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    smp.barrier()
    sender.send((found, smp.rank(), smp.size()))
    smp.shutdown()


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SM_HP_MP_PARAMETERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    yield
    smp.shutdown()
    assert not dist.is_initialized()


def test_the_environment_of_torchrun():
    launch = Launch.read(TORCHRUN)
    assert launch == Launch(3, 4, 1, 2, 29500, single_host=False, has_store=False)
    agent = Launch.read({**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (agent.single_host, agent.has_store) == (True, True)


def test_no_launcher_is_a_job_of_one():
    assert Launch.read({"MASTER_ADDR": "host0"}) == Launch(0, 1, 0, 1, None, single_host=True, has_store=False)


def test_a_loopback_master_means_a_single_host():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert Launch.read(environ) == Launch(1, 2, 1, 2, 1, single_host=True, has_store=False)


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"WORLD_SIZE": "four"}, ["WORLD_SIZE: expected a whole number, found 'four'"]),
        ({"RANK": "-1", "MASTER_PORT": ""}, ["RANK: expected", "MASTER_PORT: expected a whole number, found ''"]),
        ({"MASTER_ADDR": "", "LOCAL_RANK": ""}, ["LOCAL_RANK: expected", "MASTER_ADDR: expected the address"]),
        ({"RANK": "4"}, ["expected RANK < WORLD_SIZE"]),
        ({"LOCAL_RANK": "2"}, ["expected RANK < WORLD_SIZE and LOCAL_RANK < LOCAL_WORLD_SIZE"]),
        ({"LOCAL_WORLD_SIZE": "5"}, ["expected RANK < WORLD_SIZE and LOCAL_RANK"]),
    ],
)
def test_a_wrong_environment_names_every_variable(change, lines):
    with pytest.raises(ConfigError) as caught:
        Launch.read({**TORCHRUN, **change})
    found = str(caught.value).splitlines()
    assert [line.startswith(start) for line, start in zip(found, lines, strict=False)] == [True] * len(lines)
    assert found[len(lines) :] == ["start the script with smpc run or torchrun, which set them"]


def test_one_process_without_a_launcher(no_launcher):
    assert not smp.is_initialized()
    smp.init({"pipeline_parallel_degree": 1, "microbatches": 4})
    assert smp.is_initialized()
    assert not smp.is_tracing()
    assert smp.state.cfg.microbatches == 4
    assert [
        smp.rank(),
        smp.local_rank(),
        smp.pp_rank(),
        smp.tp_rank(),
        smp.rdp_rank(),
        smp.dp_rank(),
        smp.mp_rank(),
    ] == [0] * 7
    assert [
        smp.size(),
        smp.local_size(),
        smp.pp_size(),
        smp.tp_size(),
        smp.rdp_size(),
        smp.dp_size(),
        smp.mp_size(),
    ] == [1] * 7
    assert smp.get_mp_group() == smp.get_dp_group() == [0]
    assert smp.get_tp_process_group().size() == 1
    assert smp.allgather("x", smp.TP_GROUP) == ["x"]
    smp.barrier()
    smp.broadcast("nobody else", smp.WORLD)


def test_the_environment_variable_alone_configures(no_launcher, monkeypatch):
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 1, "microbatches": 2}')
    smp.init()
    assert smp.state.cfg.microbatches == 2


def test_twice_the_same_is_fine_and_another_is_an_error(no_launcher):
    smp.init({"partitions": 1, "microbatches": 2})
    session = smp.state.session
    smp.init({"pipeline_parallel_degree": 1, "microbatches": 2})
    smp.init(smp.state.cfg)
    assert smp.state.session is session
    with pytest.raises(ConfigError) as caught:
        smp.init({"partitions": 1, "microbatches": 3, "pipeline": "simple"})
    assert str(caught.value).splitlines()[1:] == [
        "microbatches: 2 in the first smp.init, 3 in this one",
        "pipeline: 'interleaved' in the first smp.init, 'simple' in this one",
        "active_microbatches: 2 in the first smp.init, 3 in this one",
    ]
    assert smp.state.session is session


def test_after_shutdown_everything_can_start_again(no_launcher):
    smp.init({"partitions": 1})
    smp.state.model = object()
    smp.shutdown()
    smp.shutdown()
    assert not smp.is_initialized()
    assert not dist.is_initialized()
    assert smp.state.model is None
    smp.init({"partitions": 1, "microbatches": 7})
    assert smp.state.cfg.microbatches == 7


@pytest.mark.parametrize(
    ("config", "expected", "message"),
    [
        ({"partitions": 2}, ConfigError, "expected a multiple of 2 processes .* found 1"),
        ({"partitions": 1, "horovod": True}, ConfigUnsupportedError, "horovod: True is not implemented yet"),
        (
            {"processes_per_host": 8},
            ConfigError,
            "the configuration says 8, found 1 on .*; start as many, as smpc run -n 8",
        ),
        ([], ConfigError, "expected a mapping"),
    ],
)
def test_a_mistake_is_reported_before_torch_distributed_starts(no_launcher, config, expected, message):
    with pytest.raises(expected, match=message):
        smp.init(config)
    assert not dist.is_initialized()
    assert not smp.is_initialized()


def test_without_arguments_the_environment_says_all(no_launcher, monkeypatch):
    nested = {
        "smdistributed": {
            "modelparallel": {"enabled": 1, "parameters": {"microbatches": 3, "overlapping_allreduce": 0}}
        },
        "mpi": {"enabled": True, "processes_per_host": 1, "custom_mpi_options": "--verbose"},
    }
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps(nested))
    smp.init()
    assert (smp.state.cfg.microbatches, smp.state.cfg.pipeline_parallel_degree) == (3, 1)
    assert smp.state.cfg.overlapping_allreduce is False
    smp.shutdown()
    monkeypatch.delenv("SM_HP_MP_PARAMETERS")
    smp.init()
    assert smp.state.cfg == Config()


def test_a_setting_without_effect_warns_once(no_launcher):
    with pytest.warns(UserWarning, match="fast_mode: True has no effect here") as caught:
        smp.init({"partitions": 1, "fast_mode": True})
    smp.init({"partitions": 1, "fast_mode": True})
    assert len(caught) == 1


def test_a_torch_distributed_that_the_script_started_is_used_and_kept(no_launcher, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    smp.init({"partitions": 1})
    assert smp.get_world_process_group() is dist.group.WORLD
    smp.shutdown()
    assert dist.is_initialized()
    dist.destroy_process_group()


NAMES = ["rank", "size", "local_rank", "local_size", "barrier", "mp_barrier", "get_world_process_group"] + [
    template.format(axis)
    for axis in ("pp", "tp", "rdp", "dp", "mp")
    for template in ("{}_rank", "{}_size", "get_{}_group", "get_{}_process_group")
]


@pytest.mark.parametrize(
    ("bound", "current", "expected"),
    [
        (None, None, 1),  # the script has not touched CUDA: not GPU 0, which every rank of the host would take
        (None, 3, 3),
        (torch.device("cuda", 2), None, 2),
    ],
)
def test_the_gpu_of_a_script_that_initialised_torch_distributed(monkeypatch, bound, current, expected):
    """It took GPU 0 on all ranks where the script had called init_process_group("nccl") and nothing else."""
    made_current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current or 0)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", SimpleNamespace(bound_device_id=bound))
    assert _choose_device("cuda:nccl", Launch.read(TORCHRUN), given=True) == torch.device("cuda", expected)
    assert made_current == [torch.device("cuda", expected)]


def test_shutdown_waits_for_the_gpu_before_it_closes_connections(monkeypatch):
    """The host is ahead of its GPU: closing the communicators first would drop gradients that a peer still waits for."""
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("synchronize", device)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(smp.state, "closers", [lambda: calls.append("close")])
    device = torch.device("cuda", 1)
    _end(SimpleNamespace(device=device, owns_world=True))
    assert calls == [("synchronize", device), "close", "destroy"]


def test_shutdown_closes_connections_also_where_the_gpu_has_failed(monkeypatch):
    def synchronize(device):
        raise RuntimeError("CUDA error: device-side assert triggered")

    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(smp.state, "closers", [lambda: calls.append("close")])
    with pytest.raises(RuntimeError, match="device-side assert"):
        _end(SimpleNamespace(device=torch.device("cuda", 1), owns_world=True))
    assert calls == ["close", "destroy"]


@pytest.mark.parametrize("name", NAMES)
def test_before_init_every_function_says_so(name):
    with pytest.raises(UsageError, match=r"smp\.init has not been called in this process; call smp\.init\(config\)"):
        getattr(smp, name)()


def test_before_init_the_configuration_says_so():
    with pytest.raises(UsageError, match=r"smp\.init has not been called"):
        _ = smp.state.cfg


def run_listeners(num_ranks, environ):
    """Start one process per rank without a launcher of torch's; what each sent."""
    inherited = {name: value for name, value in os.environ.items() if "SOCKET_IFNAME" not in name}
    context = server.context()
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(
            target=listens, args=(num_ranks, {**inherited, "OMP_NUM_THREADS": "1", **environ(rank)}, sender)
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        assert all(receiver.poll(120) for receiver, _ in pipes), "a rank does not answer"
        results = [receiver.recv() for receiver, _ in pipes]
        for process in processes:
            process.join(120)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for receiver, _ in pipes:
            receiver.close()
    assert [process.exitcode for process in processes] == [0] * num_ranks
    return results


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")
def test_a_job_on_one_host_listens_on_loopback_alone(free_port):
    def environ(rank):
        return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}

    results = run_listeners(2, environ)
    for rank, (addresses, *place) in enumerate(results):
        assert place == [rank, 2]
        assert all(address.startswith("0100007F:") for address in addresses), addresses
    assert f"0100007F:{free_port:04X}" in results[0][0], "rank 0 serves the store"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")
def test_a_job_of_one_process_listens_on_loopback_alone():
    [(addresses, *place)] = run_listeners(1, lambda rank: {})
    assert place == [0, 1]
    assert all(address.startswith("0100007F:") for address in addresses), addresses


def test_a_port_in_use_is_one_clear_error(no_launcher, monkeypatch, listener):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": listener}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        ConfigError, match=f"MASTER_PORT: cannot listen on 127.0.0.1:{listener}: Address already in use"
    ):
        smp.init({"partitions": 2})


@pytest.fixture
def listener():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(1)
        yield bound.getsockname()[1]


@pytest.fixture
def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.mark.parametrize(
    ("here", "ended", "error", "found"),
    [
        ((0, 1, 2), "", None, ""),
        ((0, 1, 2), "1,0,", None, ""),  # they came, and had left before this rank looked
        ((0, 1, 2), "7,", None, ""),  # of other jobs that a script makes of its launcher's ranks
        ((0,), "7,", TransportError, "ranks 1, 2 did not come"),
        ((0,), "", TransportError, "ranks 1, 2 did not come"),
        ((0, 2), "1,", PeerError, "expected 4 processes, but rank 1 ended with status 0 before smp.init"),
        ((0,), "2,0,", PeerError, "but rank 2 ended with status 0"),  # though rank 1 may still come
        ((), "2,0,1,", PeerError, "but ranks 0, 1, 2 ended with status 0"),
    ],
)
def test_who_is_waited_for(here, ended, error, found):
    """One rank of four waits for the others; `ended` is what the launcher tells."""
    store, launch = dist.PrefixStore("/torch", HashStore()), Launch.read(TORCHRUN)
    for rank in here:
        store.set(f"smpc_here/{rank}", "")
    if ended:
        store_of_job(store).set(ENDED, ended)
    if error is None:
        await_all(store, launch, datetime.timedelta(seconds=600))
    else:
        timeout = datetime.timedelta(seconds=600 if error is PeerError else 0)
        with pytest.raises(error, match=found):
            await_all(store, launch, timeout)


def test_two_processes_of_one_rank():
    """Both trained on as that rank, or waited for a rank that never came."""
    store, launch = dist.PrefixStore("/torch", HashStore()), Launch.read(TORCHRUN)
    for rank in range(4):
        store.set(f"smpc_here/{rank}", "1")
    with pytest.raises(ConfigError, match=r"another process says that it is rank 3 too \(RANK=3, WORLD_SIZE=4\)"):
        await_all(store, launch, datetime.timedelta(seconds=600))


def test_a_rank_that_hosts_the_store_and_does_not_come(free_port):
    """torch's client waited twice as long, and printed three pages of C++ frames."""
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    with pytest.raises(
        TransportError, match=f"could not reach the store of the job at 127.0.0.1:{free_port} .* rank 0 serves it"
    ):
        meet(Launch.read(environ), datetime.timedelta(seconds=0.2))
