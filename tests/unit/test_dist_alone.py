"""`smpc.dist` in a job of one process, and what it refuses."""

import os
import random
import subprocess
import sys

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed import fake_pg  # noqa: F401, registers the backend `fake`

from smpc import dist
from smpc.errors import (
    ConfigError,
    ConfigUnsupportedError,
    GroupError,
    MissingEnvironmentError,
    TransportError,
    UsageError,
)

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """No variables of a launcher, and no group that outlives the test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_alone(tmp_path):
    assert (dist.get_world_size(), dist.get_global_rank(), dist.get_local_world_size()) == (1, 0, 1)
    assert (dist.get_local_rank(), dist.get_node_rank(), dist.is_available(), dist.is_initialized()) == (
        0,
        0,
        True,
        False,
    )
    tensor = torch.arange(3.0)
    dist.barrier()
    dist.all_reduce(tensor, "avg")
    dist.broadcast(tensor, 0)
    objects = [1, "a"]
    dist.broadcast_object_list(objects)
    assert objects == [1, "a"]
    assert torch.equal(dist.all_gather(tensor)[0], torch.arange(3.0))
    assert dist.all_gather_object({"a": 1}) == [{"a": 1}]
    assert list(dist.get_sampler(range(4))) == [0, 1, 2, 3]
    with dist.run_local_rank_zero_first(), dist.local_rank_zero_download_and_wait(str(tmp_path / "never")):
        pass
    with dist.busy_wait_for_local_rank_zero(str(tmp_path)):
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_names_of_signal_files(tmp_path):
    name = dist.get_node_signal_file_name(random.Random(3))
    assert name == dist.get_node_signal_file_name(random.Random(3))
    assert name.startswith("._signal_file_node0_")
    assert len(name) == len("._signal_file_node0_") + 6
    path = dist.write_signal_file(name, str(tmp_path / "new"))
    assert path == str(tmp_path / "new" / name)
    assert os.path.getsize(path) == 0
    with pytest.raises(UsageError, match="plain name of a file"):
        dist.write_signal_file("../x", str(tmp_path))


def test_a_world_of_one_in_memory():
    dist.initialize_dist("cpu")
    dist.initialize_dist("cpu")  # again: nothing
    assert distributed.get_backend() == "gloo"
    assert {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")} == {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0",
    }  # fmt: skip
    tensor = torch.ones(2, dtype=torch.int64)
    dist.all_reduce(tensor, "bor")
    with pytest.raises(ConfigError, match="AVG needs floating-point numbers"):
        dist.all_reduce(tensor, "AVG")


def test_a_world_of_one_again():
    """It has set RANK and WORLD_SIZE, and used to miss the master of those the second time."""
    for _ in range(2):
        dist.initialize_dist("cpu")
        assert distributed.get_world_size() == 1
        distributed.destroy_process_group()
    assert os.environ["WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("device", "error", "says"),
    [
        ("mps", ConfigUnsupportedError, "'mps' is not supported"),
        ("tpu", ConfigUnsupportedError, "'tpu' is not supported"),
        ("disk", ConfigError, "expected cpu or gpu, found 'disk'"),
    ],
)
def test_other_devices(device, error, says):
    with pytest.raises(error, match=says):
        dist.initialize_dist(device)
    assert not distributed.is_initialized()


def test_other_backends_and_operations():
    distributed.init_process_group("fake", rank=0, world_size=1, store=distributed.HashStore())
    with pytest.raises(RuntimeError, match="is initialised with fake, and cpu needs gloo"):
        dist.initialize_dist("cpu")
    with pytest.raises(ConfigError, match="reduce_operation: expected one of SUM, PRODUCT, MIN"):
        dist.all_reduce(torch.ones(1), "MEAN")


def test_not_initialised_in_a_larger_world(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (dist.get_world_size(), dist.get_global_rank()) == (2, 1)
    for call in (
        dist.barrier,
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.broadcast(torch.ones(1), 0),
        lambda: dist.broadcast_object_list([1]),
        lambda: dist.all_gather(torch.ones(1)),
        lambda: dist.all_gather_object(1),
        lambda: dist.run_local_rank_zero_first().__enter__(),
    ):
        with pytest.raises(
            GroupError, match=r"one of 2 ranks, and torch.distributed is not initialised; call smpc.dist.initialize"
        ) as caught:
            call()
        assert isinstance(caught.value, UsageError)
        assert isinstance(caught.value, RuntimeError)


def test_variables_that_differ_or_are_absent(monkeypatch):
    distributed.init_process_group("fake", rank=1, world_size=4, store=distributed.HashStore())
    assert (dist.get_world_size(), dist.get_global_rank()) == (4, 1)
    for function in (dist.get_local_rank, dist.get_local_world_size, dist.get_node_rank):
        with pytest.raises(MissingEnvironmentError, match="expected a whole number in the environment, found nothing"):
            function()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert dist.get_global_rank() == 1
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE: found 8 in the environment, and 4 in torch.distributed"):
        dist.get_world_size()


def test_a_file_that_never_comes(monkeypatch, tmp_path):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(TransportError, match=r"local rank 1 waited 0.2 s for .*absent"),
        dist.local_rank_zero_download_and_wait(str(tmp_path / "absent"), timeout=0.2),
    ):
        pytest.fail("it is not there")


@pytest.mark.long
def test_importable_by_itself():
    """Nothing of the interfaces above comes with it."""
    code = "import sys, smpc.dist; print(sorted(name for name in sys.modules if name.startswith(('smpc.v1', 'smpc.v2', 'smpc.composer'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("timeout", ["300", None, True, 0, -1.0, float("nan")])
def test_timeouts_that_cannot_be(timeout):
    with pytest.raises(ConfigError, match="timeout: expected seconds"):
        dist.initialize_dist("cpu", timeout=timeout)
    assert not distributed.is_initialized()


@pytest.mark.parametrize("timeout", ["300", True, 0, -1.0, float("nan")])
def test_times_to_wait_for_a_file_that_cannot_be(timeout, monkeypatch, tmp_path):
    """NaN had no end; the others were told of a wrong type, and local rank 0 was not."""
    for local_rank in ("0", "1"):
        for name, value in (
            ("RANK", local_rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", local_rank),
            ("LOCAL_WORLD_SIZE", "2"),
        ):
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(ConfigError, match="timeout: expected seconds"),
            dist.local_rank_zero_download_and_wait(str(tmp_path / "absent"), timeout=timeout),
        ):
            pytest.fail("nobody should begin")
