"""The `device` of a configuration: scripts cut and predict for it, as `smpc compile --device` does, and all ranks for the same one."""

import pytest
import torch
from test_v1_sessions import assert_ranks_end_well
from torch import nn

import smpc
import smpc.v1 as smp
from smpc.errors import ConfigError

# Products cost nothing there, so what moves bytes decides where a model is cut.
QUICK = """
memory_bandwidth = 1e9
memory = "1TB"
transport = "gloo"
[peak_flops]
float32 = {peak}
[inside_host]
devices = 2
bandwidth = 1e12
latency = 0
[between_hosts]
bandwidth = 1e12
latency = 0
"""


def make_module():
    """Products first, then operations that only move bytes."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), *(nn.LayerNorm(64) for _ in range(8)))


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def trained(device):
    """The parameters of this rank's stage, and the first line of the report on a few steps."""
    smp.init({"partitions": 2, "microbatches": 2, "memory_weight": 0.0, "device": device})
    model = smp.DistributedModel(make_module())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.observe(2)
    for _ in range(3):
        optimizer.zero_grad()
        train_step(model, torch.ones(1024, 64))
        optimizer.step()
    names, text = {name for name, _ in model.local_named_parameters()}, str(model.report())
    smp.shutdown()
    return names, text.splitlines()[0]


def planned(device, rank):
    """The same parameters, by the planner alone."""
    found = smpc.partition(
        make_module(),
        (torch.ones(1024, 64),),
        pipeline_parallel_degree=2,
        microbatches=2,
        memory_weight=0.0,
        device=device,
        optimizer="sgd",
    )
    return set(found.stages[rank].parameters)


def cut_for_devices(rank, quick, slow):
    found = {}
    for name, path in (("quick", quick), ("slow", slow)):
        found[name], line = trained(path)
        assert found[name] == planned(path, rank)
        assert f"Predicted (for {name})" in line, line
    assert found["quick"] != found["slow"]


def test_scripts_are_cut_for_the_device_of_the_configuration(tmp_path):
    """They were cut for a server of 40 cores on every CPU, whatever `smpc compile --device` had shown."""
    paths = []
    for name, peak in (("quick", 1e15), ("slow", 1e8)):
        path = tmp_path / f"{name}.toml"
        path.write_text(QUICK.format(peak=peak))
        paths.append(str(path))
    assert_ranks_end_well(cut_for_devices, *paths)


def differing_files(rank, folder):
    own = folder / str(rank)
    own.mkdir()
    (own / "here.toml").write_text(QUICK.format(peak=1e9 * (1 + rank)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(own)
        with pytest.raises(
            ConfigError,
            match=r"device: 'here.toml' is another device on rank 1 than on rank 0; give all hosts the same file",
        ):
            smp.init({"partitions": 2, "device": "here.toml"})


def test_files_that_differ_between_ranks_are_refused(tmp_path):
    assert_ranks_end_well(differing_files, tmp_path)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("h10O", "expected one of"),
        ("nowhere.toml", "nowhere.toml"),
        ("h100, a100, l4", "expected one, or one for each of 2 pipeline ranks, found 3"),
        ("h100, cpu", "expected devices with one transport"),
    ],
)
def test_a_device_that_is_none_ends_smp_init_before_ranks_meet(device, message, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        smp.init({"partitions": 2, "device": device})
