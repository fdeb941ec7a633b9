"""`list` in compiled plans: the true costs of the stages reach the search, and its figures equal the documentation's."""

import re

import pytest
import torch
from locations import REPOSITORY
from torch import nn

from smpc.codegen.program import of_program, peaks, rank_peaks
from smpc.compile import compile_model
from smpc.errors import MemoryLimitError
from smpc.partitioner.costs.device import Device, Wire
from smpc.report.predict import plan_timeline

WIDTH, LENGTH = 48, 16
PRODUCT = 2.0 * LENGTH * WIDTH**2  # FLOPs of a layer's linear, which takes a second
DOCS = REPOSITORY / "docs" / "schedules.md"


class Layer(nn.Module):
    """F = I = W. With `mixes`, two products of activations are 0.4 of the forward, so I = 1.4 F and W = 0.6 F."""

    def __init__(self, mixes):
        super().__init__()
        self.mixes, self.linear = mixes, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.linear(x)
        return (y @ y.mT) @ y if self.mixes else y


class Layers(nn.Module):
    def __init__(self, number, mixes):
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)  # takes no time: memory is infinitely fast
        self.layers = nn.Sequential(*(Layer(mixes) for _ in range(number)))

    def forward(self, ids):
        return self.layers(self.embed(ids))


def compiled(p, m, v, mixes, latency, **options):
    """A layer to a stage; a message takes `latency` of a rank's forward."""
    wire = Wire(1e30, latency * v * (5 / 3 if mixes else 1))
    device = Device("even", {"float32": PRODUCT}, 1e30, 10**15, 8, wire, wire)
    with torch.device("meta"):
        model, ids = Layers(p * v, mixes), torch.zeros(m, LENGTH, dtype=torch.long)
    return compile_model(
        model, ids, pipeline_parallel_degree=p, microbatches=m, schedule="list", virtual_pipeline_degree=v,
        memory_weight=0.0, device=device, **options,
    )  # fmt: skip


def schedule_of(compilation):
    return tuple(of_program(program.instructions) for program in compilation.programs)


@pytest.mark.parametrize(("mixes", "forward"), [(False, 1.0), (True, 5 / 3)])
def test_costs_and_memory_are_those_of_the_stages(mixes, forward):
    p, m, v = 2, 4, 3
    compilation = compiled(p, m, v, mixes, 0.1)
    plan, schedule = compilation.plan, schedule_of(compilation)
    for stage in plan.stages:
        assert (stage.forward_time, stage.backward_time, stage.weight_time) == pytest.approx(
            (forward, 2 * forward, 1.0)
        )
    assert tuple(stage.num_in_flight for stage in plan.stages) == peaks(schedule, p * v)
    assert max(rank_peaks(schedule)) <= p * v
    assert plan_timeline(plan).makespan == pytest.approx(compilation.timeline().makespan)
    assert compilation.timeline().makespan == pytest.approx(plan.schedule.step_time)


def test_a_memory_limit_binds_the_search():
    free = compiled(2, 4, 3, True, 0.1)
    limit = max(sum(stage.peak_memory_bytes for stage in free.plan.stages if stage.rank == rank) for rank in range(2))
    for share in (1.0, 0.9, 0.8):
        try:
            found = compiled(2, 4, 3, True, 0.1, memory_limit=int(share * limit))
        except MemoryLimitError:
            assert share < 1.0
            continue
        for rank in range(2):
            held = sum(stage.peak_memory_bytes for stage in found.plan.stages if stage.rank == rank)
            assert held <= share * limit


def documented():
    """(torch's best, ours, pieces per rank) of each row of the table of `list`."""
    rows = re.findall(r"\| ([\d.]+) \([^|]*\) \| [\d.]+ \| ([\d.]+) \(v = (\d)\) \| 8 \|", DOCS.read_text())
    return [(float(best), float(ours), int(v)) for best, ours, v in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "mixes", "latency", "points"),
    [(0, False, 0.0, 0.0), (1, True, 0.0, 2.0), (2, False, 0.1, 2.0)],
    ids=["F=I=W", "I=1.4, W=0.6", "slow messages"],
)
def test_the_figures_of_the_documentation(row, mixes, latency, points):
    p, m = 8, 16
    best, ours, v = documented()[row]
    compilation = compiled(p, m, v, mixes, latency)
    found = 100 * compilation.plan.schedule.bubble_fraction
    assert found == pytest.approx(ours, abs=0.05)
    assert found <= best - points
    assert max(rank_peaks(schedule_of(compilation))) <= p * v
