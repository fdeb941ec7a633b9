"""Offloading: predicted by a compile, told by its report, and found by the search where memory makes it useful, and only there."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys

import pytest
import torch
from torch import nn

import smpc
from smpc.cli import main
from smpc.codegen.program import Op
from smpc.compile import PipelineOptions, Traced, compile_model, plan_trace
from smpc.compile.passes import schedule_plan
from smpc.compile.replica_traffic import StepSurroundings
from smpc.compile.search import Verdict
from smpc.compile.search.space import HORIZONS
from smpc.compile.step_breakdown import step_parts
from smpc.config import Config
from smpc.errors import MemoryLimitError
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.graph.plan import Plan
from smpc.partitioner.planner import rank_peaks
from smpc.report.perfetto import perfetto_json
from smpc.report.tables import _most_away, host_lines
from smpc.tracer import record

DEVICE = dataclasses.replace(find_device("h100"), variation=0.0)
RANKS = 8
FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(16))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}

def build():
    with torch.device("meta"):
        return Stack(), torch.zeros(31, 512, dtype=torch.int64)  # 31: one pipeline of all ranks alone can take it
"""


def built():
    space: dict = {}
    exec(FACTORY, space)
    return space["build"]()


@pytest.fixture(scope="module")
def target():
    return built()


def search(target, limit, **others):
    model, batch = target
    fixed = {"tensor_parallel_degrees": [1], "context_parallel_degrees": [1], "schedules": ["1f1b"]}
    return smpc.search(
        model, batch, world_size=RANKS, device=DEVICE, memory_limit=limit, effort=math.inf, **fixed, **others
    )


@pytest.fixture(scope="module")
def ways(target):
    """(seconds, peak, horizon) of the best cuts of each way for 31 microbatches, by hand: none of the search's own code."""
    model, batch = target
    trace = record(model, (batch[:1],))
    blocks = tuple(f"blocks.{i}" for i in range(16))
    found = []
    for again in ((), blocks[::2], blocks):
        for horizon in (0, *HORIZONS):
            options = PipelineOptions(
                pipeline_parallel_degree=RANKS,
                microbatches=31,
                memory_weight=0.0,
                device=DEVICE,
                schedule="1f1b",
                recompute=again,
                memory_limit=1 << 60,
                offload_activations=horizon > 0,
                activation_loading_horizon=max(1, horizon),
            )
            planned = plan_trace(Traced(trace), options, prove=False)
            parts = step_parts(Traced(trace), planned.plan, planned.timeline, StepSurroundings.of(options), again)
            found.append((parts.total, max(rank_peaks(planned.plan).values()), horizon))
    return found


@pytest.mark.long
def test_offloading_is_found_where_nothing_else_fits_and_only_there(target, ways):
    least = {bool(moves): min(peak for _, peak, horizon in ways if (horizon > 0) == moves) for moves in (False, True)}
    assert least[True] < 0.8 * least[False]
    found = search(target, least[True])
    best = found.best
    assert best.candidate.offload in HORIZONS
    assert max(rank_peaks(found.plan).values()) <= least[True]
    assert best.step_time <= min(seconds for seconds, peak, _ in ways if peak <= least[True]) * 1.0102
    assert best.without > least[True]  # the same cut without
    settings = Config.parse(found.config())
    assert settings.offload_activations
    assert settings.activation_loading_horizon == best.candidate.offload
    assert any(copy.op is Op.OFFLOAD for copy in schedule_plan(found.trace, found.plan).timeline.copies)
    again = search(target, least[True])
    assert again.to_json() == found.to_json()

    # Where a way fits without, no other is looked at: its twin with offloading is no faster.
    plenty = search(target, 10**9)
    assert not any(result.candidate.offload for result in plenty.results)
    assert plenty.best.without == 0


def test_a_better_cut_fits_with_offloading(target, ways):
    """Within a limit that cuts could be changed for, offloading keeps the fastest cut."""
    fastest = min(ways, key=lambda way: (way[1], way[0]))
    limit = int(1.1 * fastest[1])
    found = search(target, limit)
    unoffloaded = [
        r for r in found.results if not r.candidate.offload and r.verdict is Verdict.SLOWER and not r.step_is_bound
    ]
    assert found.best.candidate.offload
    assert all(result.step_time >= found.best.step_time for result in unoffloaded)


@pytest.mark.long
def test_the_least_memory_counts_offloading(target):
    with pytest.raises(MemoryLimitError, match="schedule, offloading activations; raise memory_limit") as caught:
        search(target, 1000)
    least = caught.value.least_bytes
    assert search(target, least).best.peak_bytes <= least
    with pytest.raises(MemoryLimitError):
        search(target, least - 1)


def test_offloading_makes_no_step_faster(ways):
    """What the search leaves out by: the same cut is as fast without, for every way and horizon."""
    by_way: dict[int, dict[int, float]] = {}
    for i, (seconds, _, horizon) in enumerate(ways):
        by_way.setdefault(i // (1 + len(HORIZONS)), {})[horizon] = seconds
    assert len(by_way) == 3
    for times in by_way.values():
        assert min(times.values()) == times[0]


OFFLOADED = {
    "pipeline_parallel_degree": 4,
    "microbatches": 31,
    "recompute": ("blocks.*",),
    "schedule": "1f1b",
    "memory_weight": 0.0,
    "offload_activations": True,
    "activation_loading_horizon": 1,
}


def slow_link(rate):
    return dataclasses.replace(DEVICE, host=dataclasses.replace(DEVICE.host, bandwidth=rate))


def test_a_slow_link_makes_the_step_longer_and_reports_say_so(target):
    plain = compile_model(*target, **{**OFFLOADED, "offload_activations": False}, device=DEVICE)
    fast, slow = (compile_model(*target, **OFFLOADED, device=device) for device in (slow_link(1e14), slow_link(2e9)))
    assert fast.plan.schedule.step_time == pytest.approx(plain.plan.schedule.step_time, rel=0.01)
    assert slow.plan.schedule.step_time > 1.2 * plain.plan.schedule.step_time
    timeline = slow.timeline()
    assert timeline.stalled == pytest.approx(slow.plan.schedule.step_time - plain.plan.schedule.step_time)
    options = PipelineOptions(**OFFLOADED, device=slow_link(2e9))
    parts = step_parts(slow.planned.traced, slow.plan, timeline, StepSurroundings.of(options), OFFLOADED["recompute"])
    assert parts.offload == timeline.stalled
    assert parts.total == pytest.approx(timeline.makespan + parts.optimizer)
    ((label, text),) = host_lines(slow.plan, timeline)
    assert label == "Host"
    moved = (
        sum(i.op is Op.OFFLOAD for i in slow.programs[0].instructions)
        * slow.plan.stages[0].offloaded_bytes_per_microbatch
    )
    assert sum(copy.num_bytes for copy in timeline.copies if copy.rank == 0 and copy.op is Op.OFFLOAD) == moved
    assert "the step is" in text
    assert "longer" in text
    assert Plan.from_json(slow.plan.to_json()) == slow.plan
    assert '"host_link"' not in plain.plan.to_json()
    events = json.loads(perfetto_json(slow.plan, timeline))["traceEvents"]
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert {"rank 0, to the host", "rank 0, from the host"} <= set(tracks)
    assert sum(event["name"].startswith("RELOAD") for event in events) == sum(
        c.op is Op.RELOAD for c in timeline.copies
    )


def test_the_most_that_is_away_at_once_is_what_a_walk_counts(target):
    plan = compile_model(*target, **OFFLOADED, device=DEVICE)
    timeline = plan.timeline()
    most = 0
    for copy in (copy for copy in timeline.copies if copy.rank == 1):
        away = sum(
            out.num_bytes
            for out in timeline.copies
            if out.rank == 1 and out.op is Op.OFFLOAD and out.start <= copy.start
            and not any(
                back.op is Op.RELOAD and (back.stage, back.microbatch) == (out.stage, out.microbatch) and back.end <= copy.start
                for back in timeline.copies
            )
        )  # fmt: skip
        most = max(most, away)
    assert _most_away([copy for copy in timeline.copies if copy.rank == 1]) == most


def test_where_nothing_is_away_for_long_enough_the_report_says_so(target):
    few = compile_model(*target, **{**OFFLOADED, "activation_loading_horizon": 30}, device=DEVICE)
    assert few.timeline().copies == ()
    ((_, text),) = host_lines(few.plan, few.timeline())
    assert text == "nothing is offloaded: no backward of a checkpointed module is more than 32 tasks behind its forward"


@pytest.mark.long
def test_the_command_finds_it(ways, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"offload_factory_{random.randrange(10**9)}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    limit = min(peak for _, peak, _ in ways)
    asked = ["--world-size", str(RANKS), "--memory-limit", str(limit), "--effort", "3", "--out", str(tmp_path / "out")]
    status = main(["compile", f"{tmp_path / name}.py:build", "--auto", *asked])
    out = capsys.readouterr().out
    assert not status, out
    assert "offload_activations: true" in " ".join(out.split())
    assert "offloads" in out
    settings = json.loads((tmp_path / "out" / "smp_config.json").read_text())
    assert settings["offload_activations"] is True
    assert any("OFFLOAD" in (tmp_path / "out" / f"rank_{rank}.py").read_text() for rank in range(8))
    plan = Plan.from_json((tmp_path / "out" / "plan.json").read_text())
    assert max(rank_peaks(plan).values()) <= limit


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_what_a_weight_backward_reads_counts_until_then(target, schedule):
    """The peak of a rank that offloads nothing was less than without offloading: W holds what its B has left."""
    asked = {**OFFLOADED, "schedule": schedule, "activation_loading_horizon": 100}
    moved, plain = (
        compile_model(*target, **{**asked, "offload_activations": moves}, device=DEVICE) for moves in (True, False)
    )
    assert moved.timeline().copies == ()
    assert rank_peaks(moved.plan) == rank_peaks(plain.plan)


class Frozen(nn.Module):
    """Its blocks read what needs no gradient: there is nothing to offload."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x.detach())
        return x.sum()


def test_what_needs_no_gradient_stays():
    compilation = compile_model(
        Frozen(), torch.zeros(16, 8), pipeline_parallel_degree=2, microbatches=16, pipeline="simple", recompute=("blocks.*",),
        offload_activations=True, activation_loading_horizon=1,
    )  # fmt: skip
    plan = compilation.plan
    assert all(stage.offloaded_bytes_per_microbatch == 0 for stage in plan.stages)
    ((_, text),) = host_lines(plan, compilation.timeline())  # it said that no backward is late enough, and all are
    assert text == "nothing is offloaded: no checkpointed module keeps an activation that can be"
