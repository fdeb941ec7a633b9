"""Pipelines on devices of several kinds: cuts follow the devices, times are each device's, limits hold on each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from smpc.compile import PipelineOptions, Traced, compile_plan, plan_trace
from smpc.errors import ConfigError, MemoryLimitError, PartitionError
from smpc.partitioner.costs.device import Device, Wire
from smpc.partitioner.costs.device_file import find_device, find_devices
from smpc.partitioner.graph.plan import Plan
from smpc.partitioner.manual import ManualPartition
from smpc.report.tables import stage_table
from smpc.tracer import record

SLOW = Device("slow", {"float32": 1e12}, 1e11, 10**9, 8, Wire(1e11, 0.0), Wire(1e11, 0.0))
FAST = replace(SLOW, name="fast", peak_flops={"float32": 3e12}, memory_bandwidth=3e11)
SMALL = replace(SLOW, name="small", memory_bytes=10**6)
SHARP = replace(SLOW, name="sharp", peak_flops={"float32": 8e12})  # products alone are faster


class Mixed(nn.Module):
    """Products and normalisations: what takes long on one device need not on another."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            layer for _ in range(4) for layer in (nn.Linear(512, 512, bias=False), nn.LayerNorm(512), nn.GELU())
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def linears(depth, width=64):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    return record(model, (torch.zeros(256, width),))


def plan_of(trace, devices, microbatches=4, **settings):
    options = PipelineOptions(len(devices), microbatches, memory_weight=0.0, device=devices, **settings)
    return plan_trace(Traced(trace), options).plan


def sizes(plan):
    return [len(stage.modules) for stage in plan.stages]


def slowest(plan):
    return max(stage.forward_time + stage.backward_time for stage in plan.stages)


def test_faster_ranks_get_more_layers():
    trace = linears(8)
    assert sizes(plan_of(trace, (SLOW, SLOW))) == [4, 4]
    assert sizes(plan_of(trace, (FAST, SLOW))) == [6, 2]
    assert sizes(plan_of(trace, (SLOW, FAST))) == [2, 6]
    plan = plan_of(trace, (FAST, SLOW))
    first, last = plan.stages
    assert first.forward_time == pytest.approx(last.forward_time)  # three times the work, three times as fast
    assert plan.schedule.step_time < plan_of(trace, (SLOW, SLOW)).schedule.step_time
    assert (plan.device, [stage.device for stage in plan.stages]) == ("1 x fast, 1 x slow", ["fast", "slow"])


def test_times_are_those_of_the_ranks_own_device():
    trace = record(Mixed(), (torch.zeros(256, 512),))
    for devices in ((SHARP, SLOW), (SLOW, SHARP), (FAST, SHARP, SLOW)):
        plan = plan_of(trace, devices)
        for stage, device in zip(plan.stages, devices, strict=True):
            options = PipelineOptions(len(devices), 4, memory_weight=0.0, device=device)
            alone = plan_trace(Traced(trace), options, like=compile_plan(trace, plan)).plan.stages[stage.index]
            assert stage.forward_time == pytest.approx(alone.forward_time)
            assert stage.backward_time == pytest.approx(alone.backward_time)


@pytest.mark.parametrize("devices", [(SHARP, SLOW), (SLOW, SHARP), (FAST, SHARP)])
def test_near_the_best_of_all_cuts(devices):
    model = Mixed()
    trace = record(model, (torch.zeros(256, 512),))
    names = [f"layers.{i}" for i in range(len(model.layers))]
    found = []
    for cut in range(1, len(names)):
        marks = tuple((name, int(i >= cut)) for i, name in enumerate(names))
        options = PipelineOptions(2, 4, memory_weight=0.0, device=devices, manual=ManualPartition(marks, 1))
        found.append(slowest(plan_trace(Traced(trace), options).plan))
    assert slowest(plan_of(trace, devices)) <= min(found) * 1.03


def test_virtual_stages_use_the_device_of_their_rank():
    plan = plan_of(linears(16), (FAST, SLOW), virtual_pipeline_degree=2)
    assert [stage.device for stage in plan.stages] == ["fast", "slow", "fast", "slow"]
    assert sizes(plan)[0] > sizes(plan)[1]


def test_the_memory_of_every_device_is_a_limit():
    trace = linears(8)  # 16 KiB of weights each, 64 KiB of state
    free = plan_of(trace, (SLOW, replace(SLOW, name="other")))
    assert sizes(free) == [4, 4]
    room = free.stages[0].peak_memory_bytes
    tight = replace(SMALL, memory_bytes=int(0.7 * room))
    for devices in ((tight, SLOW), (SLOW, tight)):
        plan = plan_of(trace, devices)
        for stage, device in zip(plan.stages, devices, strict=True):
            assert stage.peak_memory_bytes <= device.memory_bytes
        assert sizes(plan)[devices.index(tight)] < 4
    with pytest.raises(MemoryLimitError, match=r"with [\d.]+ times the memory on every rank there would be one"):
        plan_of(trace, (replace(SMALL, memory_bytes=1000), SLOW))


def test_a_limit_by_hand_is_that_of_each_rank():
    trace = linears(4)
    marks = ManualPartition(tuple((str(i), int(i > 0)) for i in range(4)), 0)
    plan_of(trace, (SLOW, FAST), manual=marks)
    with pytest.raises(PartitionError, match=r"rank 1 needs .* of 97\.66 KiB"):
        plan_of(trace, (SLOW, replace(SMALL, memory_bytes=100_000)), manual=marks)


def test_the_report_names_the_devices():
    table = stage_table(plan_of(linears(4), (FAST, SLOW)))
    column = table.headers.index("Device")
    assert [row[column] for row in table.rows] == ["fast", "slow"]
    assert "Device" not in stage_table(plan_of(linears(4), (FAST, FAST))).headers


def test_a_mixed_plan_survives_json():
    plan = plan_of(linears(4), (FAST, SLOW))
    assert Plan.from_json(plan.to_json()) == plan


def test_devices_by_rank(tmp_path):
    h100, a100 = find_device("h100"), find_device("a100")
    assert find_devices("h100", 3) == (h100,) * 3
    assert find_devices(("2xh100", "2 x A100"), 4) == (h100, h100, a100, a100)
    path = tmp_path / "cluster.toml"
    path.write_text('ranks = ["2xh100", "a100"]')
    assert find_devices(str(path), 3) == (h100, h100, a100)
    assert find_devices((str(path), a100), 4) == (h100, h100, a100, a100)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('ranks = ["h100", "a100", "l4"]', "one for each of 2 pipeline ranks, found 3"),
        ('ranks = ["h100", "h10"]', "did you mean 'h100'"),
        ('ranks = ["h100", "cpu"]', "one transport, found H100 SXM: nccl, CPU: gloo"),
        ('ranks = ["h100", 3]', "expected ranks = "),
        ('ranks = ["h100", "h100"]\nname = "x"', "and nothing else"),
        ("ranks = []", "found 0"),
    ],
)
def test_wrong_lists(tmp_path, text, says):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        PipelineOptions(2, 1, device=str(path))
