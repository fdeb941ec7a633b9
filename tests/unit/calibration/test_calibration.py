"""`smpc calibrate`: what is made of measured times, the file, and wrong usage.

How good predictions are depends on the machine's load, and is for benchmarks/predicted_time.py.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import tomllib

import numpy as np
import pytest
import torch
from torch import nn

from smpc.calibration import CalibrationRanks, calibrate, to_toml
from smpc.calibration.operations import (
    Sample,
    _operation_samples,
    _Running,
    _seconds_of_looking_at_operation,
    rates,
    steady,
    views,
)
from smpc.calibration.probes import ImageProbe, TextProbe, probes
from smpc.cli import main
from smpc.errors import ConfigError
from smpc.partitioner.costs.collective_times import (
    IN_OPERATIONS,
    MOVES_IN_OPERATIONS,
    CollectiveKind,
    collective_time,
    sent_time,
)
from smpc.partitioner.costs.device import NONE, Device, Group, Kernels, Wire
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.costs.node_costs import CostModel, NodeTimes, node_times, work_of
from smpc.tracer import record

ALONE = CalibrationRanks(0, 1, 1, torch.device("cpu"))
WIRE = Wire(1e9, 1e-4)


def traces():
    yield record(TextProbe(64), (torch.zeros(2, 64, dtype=torch.int64),))
    yield record(ImageProbe(8), (torch.zeros(2, 8, 32, 32),))


def test_steady_times_are_those_that_nothing_interrupted():
    assert steady([1.0, 1.1, 1.04, 9.0, 5.0]) == 1.04
    assert steady([3.0]) == 3.0


def test_nodes_take_together_as_long_as_the_passes_that_nothing_interrupted():
    """A median of each node would leave out what interrupts each of them rarely, and some of them always."""
    trace = record(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.zeros(2, 4),))
    places = [work.position for work in work_of(trace)]
    passes = []
    for slow in (0, 1, None):
        times = np.zeros((2, len(trace.nodes)))
        times[:, places] = 1.0
        if slow is not None:
            times[:, places[slow]] = 1.2
        passes.append(NodeTimes(*(10.0 * times if slow is None else times)))  # the last pass was interrupted all along
    probe = next(probes(torch.float32, torch.device("cpu")))
    found = list(_operation_samples(_Running(probe, trace, None, passes, []), ALONE, (0.1, 0.2)))
    assert sum(sample.forward for sample in found) == pytest.approx(2.2 - 2 * 0.1)
    assert sum(sample.backward for sample in found) == pytest.approx(2.2 - 2 * 0.2)


def test_what_looking_takes_is_what_a_probe_takes_less_by_itself():
    trace = record(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.zeros(2, 4),))
    times = np.zeros(len(trace.nodes))
    times[[work.position for work in work_of(trace)]] = 1.0
    probe = next(probes(torch.float32, torch.device("cpu")))
    item = _Running(probe, trace, None, [NodeTimes(times, 2 * times)], [(1.5, 3.0), (9.0, 9.0)])
    assert _seconds_of_looking_at_operation(item, ALONE) == pytest.approx((0.25, 0.5))


def test_probes_have_what_training_spends_its_time_in():
    names = {work.name for trace in traces() for work in work_of(trace)}
    wanted = "linear bmm conv attention attention_causal attention_dropout softmax layer_norm batch_norm group_norm gelu silu relu tanh"
    assert set(wanted.split()) | {"dropout", "embedding", "cross_entropy", "add", "mul", "pow", "rsqrt", "cat"} <= names
    sizes = [probe.size for probe in probes(torch.float32, torch.device("cpu")) if probe.family == "text"]
    assert sizes == sorted(sizes)


def test_times_are_predicted_as_they_were_measured():
    """Each kind of operation at a rate of its own, forward and backward: the device says so of every node."""
    random.seed(0)
    speed: dict[str, float] = {}
    for trace in traces():
        samples = [
            Sample(
                work,
                *(w / speed.setdefault(work.name, random.uniform(1e9, 1e10)) for w in (work.forward, work.backward)),
            )
            for work in work_of(trace)
            if work.size
        ]
        looks = {w.name: random.uniform(1e-6, 1e-5) for w in work_of(trace) if not w.size}
        samples += [Sample(w, looks[w.name], 2 * looks[w.name] * w.backward) for w in work_of(trace) if not w.size]
        found = rates(samples)
        peak, bandwidth = 2e10, 3e10
        shares = {
            name: tuple(
                tuple((s, r / (peak if item.is_product else bandwidth)) for s, r in c)
                for c in (item.forward, item.backward)
            )
            for name, item in found.items()
        }
        kernels = Kernels(operations=shares, views=views(samples))
        device = Device("x", {"float32": peak}, bandwidth, 10**9, 1, WIRE, WIRE, kernels=kernels)
        times = node_times(trace, CostModel.of(device, 1))
        assert samples
        for sample in samples:
            place, name = sample.work.position, sample.work.name
            if sample.work.size and sample.work.size < shares[name][0][1][0]:
                continue  # smaller than the smallest on average, for which that one's time counts
            assert times.forward[place] == pytest.approx(sample.forward, rel=1e-6)
            assert times.backward[place] == pytest.approx(sample.backward, rel=1e-6)


def test_collectives_that_were_measured_count_inside_a_host():
    curve = ((1.0, 1e4), (1e4, 1e8), (1e8, 1e9))
    device = Device(
        "x",
        {"float32": 1e9},
        1e9,
        1,
        2,
        WIRE,
        WIRE,
        collectives={CollectiveKind.ALL_REDUCE: curve, IN_OPERATIONS: curve},
    )
    assert collective_time(CollectiveKind.ALL_REDUCE, 1e8, Group(2, 2), device) == pytest.approx(0.1)
    assert sent_time(1e4, Group(2, 2), device) == pytest.approx(1e-4)
    assert sent_time(1e4, Group(2, 2), device, moves=True) == pytest.approx(1e-4)  # as sums where nobody measured it
    apart = dataclasses.replace(device, collectives={**device.collectives, MOVES_IN_OPERATIONS: ((1.0, 5e7),)})
    assert sent_time(1e4, Group(2, 2), apart, moves=True) == pytest.approx(2e-4)
    assert sent_time(1e4, Group(2, 2), apart) == pytest.approx(1e-4)
    assert collective_time(CollectiveKind.ALL_REDUCE, 1e8, Group(4, 2), device) == pytest.approx(0.15 + 1e-4)
    assert collective_time(CollectiveKind.ALL_GATHER, 1e8, Group(2, 2), device) == pytest.approx(0.05 + 1e-4)


@pytest.mark.long
def test_a_machine_is_measured_written_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("smpc.calibration.probes._WIDTHS", (64, 128))
    monkeypatch.setattr("smpc.calibration.probes._CHANNELS", (8, 16))
    monkeypatch.setattr("smpc.calibration.programs._ROUNDS", 3)
    device = calibrate(ALONE, 0.2)
    assert {"float32", "bfloat16", "float64"} <= set(device.peak_flops)
    assert device.transport == "gloo"
    assert device.kernels.view > 0
    assert {"view", "transpose", "getitem"} <= set(device.kernels.views)
    assert set(device.kernels.deferred) == {"linear", "conv"}
    assert device.kernels.unit == NONE  # there is nobody to share parameters with
    assert 1e7 < device.host.rate < 1e12
    assert device.host.latency < 1e-2
    path = tmp_path / "here.toml"
    path.write_text(to_toml(device, 'made by "a test"'), encoding="utf-8")
    again = find_device(str(path))
    assert again.source == 'made by "a test"'
    assert again.host.rate == pytest.approx(device.host.rate, rel=1e-3)
    assert dict(again.peak_flops) == pytest.approx(dict(device.peak_flops), rel=1e-3)
    assert set(again.kernels.operations) == set(device.kernels.operations)
    for key in ("action", "step"):
        assert getattr(again.kernels, key) == pytest.approx(getattr(device.kernels, key), rel=1e-3)
    for key, curve in device.kernels.deferred.items():
        assert again.kernels.deferred[key] == tuple(pytest.approx(point, rel=1e-3) for point in curve)
    assert again.kernels.views["view"] == pytest.approx(device.kernels.views["view"], rel=1e-3)
    for trace in traces():
        one, other = (node_times(trace, CostModel.of(d, 1)) for d in (device, again))
        assert one.forward.sum() == pytest.approx(other.forward.sum(), rel=1e-2)
        assert one.backward.sum() > 0


@pytest.mark.parametrize("seed", range(40))
def test_damaged_files_are_refused_or_read_as_devices(tmp_path, seed):
    """Values of other types and sizes, in any place of a file that `smpc calibrate` writes."""
    operations = {"gelu": (((1.0, 1e-3), (9.0, 0.5)), ((1.0, 0.1),))}
    device = Device(
        "x", {"float32": 1e12}, 1e11, 10**9, 2, WIRE, WIRE, "", "gloo", Kernels(1e-6, operations=operations),
        collectives={"all-reduce": ((1.0, 1e4),)},
    )  # fmt: skip
    more = {
        "views": {"view": (1e-6, 2e-6)},
        "action": 1e-5,
        "unit": ((1.0, 1e-4),),
        "deferred": {"conv": ((1e6, 1e-4),)},
    }
    device = dataclasses.replace(device, kernels=dataclasses.replace(device.kernels, **more))
    data = tomllib.loads(to_toml(device, ""))
    generator = random.Random(seed)
    damage(data, generator)
    path = tmp_path / "device.toml"
    path.write_text("\n".join(as_toml(data)), encoding="utf-8")
    found = outcome(path)
    assert isinstance(found, float) or str(found).startswith("device "), found


def outcome(path):
    """Seconds of a collective on the device of a file, or why there is none."""
    try:
        return collective_time(CollectiveKind.ALL_REDUCE, 1e6, Group(2, 2), find_device(str(path)))
    except ConfigError as error:
        return error


def damage(table, generator):
    """Puts something else in some place of nested tables."""
    key = generator.choice(list(table))
    if isinstance(table[key], dict) and table[key] and generator.random() < 0.8:
        damage(table[key], generator)
        return
    table[key] = copy.copy(
        generator.choice([-1, 0, 1e300, "x", True, [], [[1, 2], [1, 3]], [[0, 1]], {"a": 1}, 10**30, [[1, "x"]]])
    )


def as_toml(data, prefix=""):
    """Lines of nested tables."""
    inner = {key: value for key, value in data.items() if isinstance(value, dict)}
    yield from (f"{json.dumps(key)} = {json.dumps(value)}" for key, value in data.items() if key not in inner)
    for key, value in inner.items():
        name = f"{prefix}{json.dumps(key)}"
        yield f"[{name}]"
        yield from as_toml(value, f"{name}.")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing option '--out'"),
        (["--out", "device.json"], "--out 'device.json': expected a file name that ends in .toml"),
        (["--out", "no-such-folder/device.toml"], "--out 'no-such-folder/device.toml': "),
        (["--out", "x.toml", "--ranks", "0"], "--ranks: expected 1 to 1024, found 0"),
        (["--out", "x.toml", "--seconds", "1"], "--seconds: expected 5 to 3600, found 1.0"),
    ],
)
def test_bad_usage_measures_nothing(capsys, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_a_job_start_no_others(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["calibrate", "--out", str(tmp_path / "x.toml"), "--ranks", "2"]) == 2
    assert "a rank of a job already" in capsys.readouterr().err
