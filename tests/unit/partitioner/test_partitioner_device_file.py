"""Devices by name and from files, optimizers by name, sizes as people write them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smpc.compile import compile_model
from smpc.config.numbers import at_least, parse_bytes
from smpc.errors import ConfigError
from smpc.partitioner.costs.device import DEVICES, H100
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.costs.named_optimizers import OPTIMIZERS, find_optimizer
from smpc.partitioner.costs.node_costs import CostModel
from smpc.tracer.ir import TensorSpec

GOOD = """
name = "H100 PCIe"
memory_bandwidth = 2.0e12
memory = "80GB"

[peak_flops]
float32 = 51e12
bfloat16 = 756e12

[inside_host]
devices = 8
bandwidth = 64e9
latency = 20e-6

[between_hosts]
bandwidth = 50e9
latency = 50e-6
"""


def test_every_device_is_complete():
    for device in DEVICES.values():
        assert device.source
        assert {"float64", "float32", "bfloat16", "float16"} <= set(device.peak_flops)
        assert device.inside_host.bandwidth >= device.between_hosts.bandwidth > 0
    assert find_device("H100") is H100


def test_the_link_to_the_host(tmp_path):
    """By generation of PCIe, as datasheets count it in both directions: Gen4 64 GB/s, Gen5 128 GB/s."""
    in_both = {"a100": 64e9, "l4": 64e9, "h100": 128e9, "h200": 128e9}
    for name, bandwidth in in_both.items():
        assert 2 * find_device(name).host.bandwidth == bandwidth
        assert find_device(name).host.rate < find_device(name).host.bandwidth
    path = tmp_path / "device.toml"
    path.write_text(GOOD)
    assert find_device(str(path)).host == find_device("l4").host  # where a file says nothing
    path.write_text(GOOD + "\n[host]\nbandwidth = 1e10\nlatency = 1e-6\nefficiency = 0.5\n")
    assert (find_device(str(path)).host.rate, find_device(str(path)).host.latency) == (5e9, 1e-6)
    path.write_text(GOOD + "\n[host]\nbandwith = 1e10\nhop = 1e-6\n")
    with pytest.raises(
        ConfigError,
        match=r"host\.bandwith; did you mean host\.bandwidth\?(?s:.*)host\.hop(?s:.*)host\.latency: missing",
    ):
        find_device(str(path))


def test_ranks_on_several_hosts_talk_over_the_network():
    assert CostModel.of(H100, 8).link_bandwidth == H100.inside_host.rate
    assert CostModel.of(H100, 9).link_bandwidth == H100.between_hosts.rate


def test_a_device_from_a_file(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(GOOD)
    device = find_device(str(path))
    assert (device.name, device.memory_bytes, device.devices_per_host) == ("H100 PCIe", 80 * 10**9, 8)
    assert dict(device.peak_flops) == {"float32": 51e12, "bfloat16": 756e12}
    assert device.between_hosts.latency == 50e-6


@pytest.mark.parametrize(
    ("before", "after", "texts"),
    [
        ("memory_bandwidth", "memory_bandwith", ["unknown key memory_bandwith; did you mean memory_bandwidth?",
                                                "memory_bandwidth: missing"]),
        ('"80GB"', '"lots"', ["memory: expected a size such as 80GB"]),
        ("51e12", "-1", ["peak_flops.float32: expected a number from 1000 to 1e+24, found -1"]),
        ("bfloat16 =", "bf16 =", ["peak_flops.bf16: expected the name of a torch dtype"]),
        ("devices = 8", "devices = 2.5", ["inside_host.devices: expected a whole number from 1 to 65536, found 2.5"]),
        ("latency = 20e-6", "latency = true", ["inside_host.latency: expected a number from 0 to 3600, found True"]),
        ('name = "H100 PCIe"', "name = ", ["malformed TOML: Invalid value"]),
    ],
)  # fmt: skip
def test_wrong_files_say_everything_that_is_wrong(tmp_path, before, after, texts):
    path = tmp_path / "device.toml"
    path.write_text(GOOD.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        find_device(str(path))
    for text in texts:
        assert text in str(caught.value)
    assert all(str(path) in line for line in str(caught.value).splitlines())


def test_missing_files_and_unknown_names(tmp_path):
    with pytest.raises(ConfigError, match="cannot read it: No such file"):
        find_device(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        find_device("h10")
    with pytest.raises(ConfigError, match="did you mean 'adamw'"):
        find_optimizer("adamww")


def test_times_follow_the_device():
    model, x = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))), torch.zeros(8192, 2048, device="meta")
    plans = {
        name: compile_model(model, x, pipeline_parallel_degree=2, microbatches=4, device=name).plan
        for name in ("h100", "l4")
    }
    assert plans["l4"].device == "L4"
    assert plans["l4"].stages[0].forward_time > 2 * plans["h100"].stages[0].forward_time
    assert plans["l4"].schedule.step_time > plans["h100"].schedule.step_time


def torch_state_bytes(make, dtype):
    parameter = nn.Parameter(torch.ones(1000, dtype=dtype))
    optimizer = make([parameter])
    parameter.sum().backward()
    optimizer.step()
    return sum(value.nbytes for value in optimizer.state[parameter].values() if value is not None and value.dim())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("sgd-momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_optimizers_keep_what_torch_keeps(name, make, dtype):
    spec = TensorSpec((1000,), str(dtype).removeprefix("torch."), (1,), True)
    assert OPTIMIZERS[name].state_bytes(spec) == torch_state_bytes(make, dtype)


def test_masters_are_for_narrow_parameters():
    optimizer = find_optimizer("adamw-fp32-master-fp32-grad")
    wide, narrow = (TensorSpec((10,), dtype, (1,), True) for dtype in ("float32", "bfloat16"))
    assert (optimizer.state_bytes(wide), optimizer.gradient_bytes(wide)) == (80, 40)
    assert (optimizer.state_bytes(narrow), optimizer.gradient_bytes(narrow)) == (120, 60)
    optimizer = find_optimizer("adamw-fp32-master-wide-grad").replicated(2)  # and a bucket, which is like the gradient
    assert (optimizer.state_bytes(wide), optimizer.gradient_bytes(wide)) == (120, 40)
    assert (optimizer.state_bytes(narrow), optimizer.gradient_bytes(narrow)) == (160, 40)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("1.5 gib", 3 * 2**29), ("512", 512), (".5kb", 500), ("2e3MB", 2 * 10**9), (7.0, 7)],
)
def test_sizes(text, size):
    assert parse_bytes(text, "size") == size


def test_a_size_rounded_up_is_enough():
    for size in (1, 1023, 1024, 1025, 10**6, 10**9 + 1, 12_345_678_901_234):
        assert size <= parse_bytes(at_least(size), "size") <= 1.011 * size + 1


def test_replicas_hold_buckets_and_may_share_the_state():
    spec = TensorSpec((1000,), "bfloat16", (1,), True)
    optimizer = find_optimizer("adamw-fp32-master")
    assert optimizer.replicated(1, sharded=True) is optimizer
    assert optimizer.state_bytes(spec) == 12_000
    assert optimizer.replicated(8).state_bytes(spec) == 12_000 + 2_000  # a bucket has a copy of the gradients
    sharded = optimizer.replicated(8, sharded=True)
    assert sharded.state_bytes(spec) == 12_000 // 8 + 2_000
    assert sharded.name == "adamw-fp32-master, sharded over 8"
    assert sharded.gradient_bytes(spec) == optimizer.gradient_bytes(spec)


def test_replicas_may_hold_parts_of_everything():
    spec = TensorSpec((1000, 3), "bfloat16", (3, 1), True)
    optimizer = find_optimizer("adamw-fp32-master-wide-grad")
    assert optimizer.fully_sharded(1) is optimizer
    assert (optimizer.parameter_bytes(spec), optimizer.part_bytes(spec), optimizer.gathered_bytes(spec)) == (
        6000,
        6000,
        0,
    )
    sharded = optimizer.fully_sharded(8)
    assert sharded.name == "adamw-fp32-master-wide-grad, fully sharded over 8"
    assert (sharded.part_bytes(spec), sharded.gathered_bytes(spec), sharded.parameter_bytes(spec)) == (750, 6000, 6750)
    assert (sharded.gradient_bytes(spec), sharded.apart_bytes(spec)) == (12_000, 6000)
    assert sharded.state_bytes(spec) == 36_000 // 8  # and no buckets
    odd = TensorSpec((3, 5), "float32", (5, 1), True)  # each of two ranks takes two rows
    assert (optimizer.fully_sharded(2).part_bytes(odd), optimizer.fully_sharded(2).parameter_bytes(odd)) == (40, 120)
    scalar = TensorSpec((), "float32", (), True)  # without dimensions: whole on every rank, which was an IndexError
    assert (sharded.part_bytes(scalar), sharded.gathered_bytes(scalar), sharded.parameter_bytes(scalar)) == (4, 0, 4)


KERNELS = """
[kernels]
launch = 4e-6
processors = 114
memory = [[1e3, 0.1], [1e9, 0.9]]
attention = [0.4, 0.3]
[kernels.products]
bfloat16 = 0.7
float32 = [[1e6, 0.2], [1e12, 0.8]]
"""


def test_what_kernels_reach_from_a_file(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(GOOD + KERNELS)
    kernels = find_device(str(path)).kernels
    assert (kernels.launch, kernels.processors, kernels.attention) == (4e-6, 114, (0.4, 0.3))
    assert kernels.products == {"bfloat16": ((1.0, 0.7),), "float32": ((1e6, 0.2), (1e12, 0.8))}
    assert kernels.memory_time(1e6, 1e9) == pytest.approx(1e6 / (1e9 * 0.3))  # half way, by the logarithms of both
    assert kernels.memory_time(10.0, 1e9) == pytest.approx(10 / (1e9 * 0.1))


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("0.4, 0.3", "0.4", "kernels.attention: expected [forward, backward], two shares of the peak, found [0.4]"),
        ("bfloat16 = 0.7", "bfloat16 = 7", "kernels.products.bfloat16: expected a share of the peak from 1e-06 to 1"),
        ("[1e3, 0.1], [1e9, 0.9]", "[1e9, 0.1], [1e3, 0.9]", "kernels.memory: expected a share of the peak"),
        ("launch = 4e-6", "launch = -1", "kernels.launch: expected a number from 0 to 3600, found -1"),
        ("processors = 114", "procesors = 114", "unknown key kernels.procesors; did you mean kernels.processors?"),
        ("bfloat16 = 0.7", "bf16 = 0.7", "kernels.products.bf16: expected the name of a torch dtype"),
    ],
)
def test_what_is_wrong_about_kernels_in_a_file(tmp_path, before, after, text):
    path = tmp_path / "device.toml"
    path.write_text(GOOD + KERNELS.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        find_device(str(path))
    assert text in str(caught.value)
