"""Findings of a report, against plans made with what they advise."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

from smpc.compile import PipelineOptions, Traced, plan_trace
from smpc.compile.replica_traffic import StepSurroundings
from smpc.compile.step_breakdown import StepParts, step_parts
from smpc.report.advice import advice
from smpc.report.tables import step_lines
from smpc.tracer import record

WIDTH = 2048


@pytest.fixture(scope="module")
def traced():
    """Layers whose activations weigh more and more, so that memory and time pull apart."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(6)]
    model = nn.Sequential(*layers, *(nn.GELU() for _ in range(12))).to("meta")
    return Traced(record(model, (torch.zeros(4096, WIDTH, device="meta"),)))


def seconds(traced, options):
    planned = plan_trace(traced, options, prove=False)
    return step_parts(planned.traced, planned.plan, planned.timeline, StepSurroundings.of(options)).total, planned


def test_what_is_advised_gains_what_is_said(traced):
    options = PipelineOptions(4, 4, memory_weight=0.8)
    planned = plan_trace(traced, options)
    now = step_parts(planned.traced, planned.plan, planned.timeline, StepSurroundings.of(options)).total
    found = advice(options, planned)
    assert 1 <= len(found) <= 3
    for text in found:
        flags = dict(re.findall(r"--([a-z-]+) ([^ :]+)", text))
        given = {name.replace("-", "_"): value for name, value in flags.items()}
        if "memory_weight" in given:
            changed = dataclasses.replace(options, memory_weight=float(given["memory_weight"]))
        else:
            pieces = int(given.get("virtual_pipeline_degree", 1))
            changed = dataclasses.replace(options, schedule=given["schedule"], virtual_pipeline_degree=pieces)
        gain = 1 - seconds(traced, changed)[0] / now
        assert f"step {gain:.1%} shorter" in text
        assert gain > 0.01


def test_where_nothing_nearly_fits_no_other_way_is_planned(traced, monkeypatch):
    """405 billion parameters without recomputation: a minute went into four schedules that could not fit either."""
    options = PipelineOptions(4, 4)
    planned = plan_trace(traced, options)
    peak = max(stage.peak_memory_bytes for stage in planned.plan.stages)
    asked = []
    monkeypatch.setattr("smpc.report.advice.plan_trace", lambda *given, **how: asked.append(given) or planned)
    assert advice(dataclasses.replace(options, memory_limit=peak // 2), planned) == ()
    assert not asked
    advice(dataclasses.replace(options, memory_limit=peak), planned)
    assert asked


def test_what_does_not_fit_is_not_advised(traced):
    options = PipelineOptions(4, 4, memory_weight=0.8)
    planned = plan_trace(traced, options)
    peak = max(stage.peak_memory_bytes for stage in planned.plan.stages)
    tight = dataclasses.replace(options, memory_limit=peak)
    for text in advice(tight, plan_trace(traced, tight)):
        assert "of 74.5 GiB" not in text


def test_a_large_bubble_always_has_a_way_out():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))).to("meta")
    traced = Traced(record(model, (torch.zeros(2, 4, device="meta"),)))
    options = PipelineOptions(2, 1, memory_weight=0.0)
    planned = plan_trace(traced, options)
    assert planned.timeline.bubble_fraction > 0.25
    assert any("bubble" in text for text in advice(options, planned))


def test_a_large_bubble_has_a_way_out_beside_other_findings(traced, monkeypatch):
    """What memory weight 0 gains was taken for the way out of a bubble of 43%, which it leaves as it is."""
    monkeypatch.setattr("smpc.report.advice._schedules", lambda *given: [])  # as where none fits
    options = PipelineOptions(4, 4, memory_weight=0.8)
    planned = plan_trace(traced, options)
    assert planned.timeline.bubble_fraction > 0.25
    found = advice(options, planned)
    assert "--memory-weight 0" in found[0]
    assert "bubble" in found[1]


def test_what_is_computed_again_for_memory_that_nobody_needs_is_named(traced):
    """A Llama of 1.5 billion parameters gave away a fifth of its step at 11 of 74 GiB, without a word."""
    options = PipelineOptions(1, 4, memory_weight=0.0, recompute=("0", "1", "2", "3", "4", "5"))
    planned = plan_trace(traced, options)
    now = step_parts(planned.traced, planned.plan, planned.timeline, StepSurroundings.of(options), options.recompute)
    plain, without = seconds(traced, dataclasses.replace(options, recompute=()))
    (text,) = advice(options, planned)
    assert text.startswith(f"without --recompute: step {1 - plain / now.total:.1%} shorter, peak")
    peak = max(stage.peak_memory_bytes for stage in without.plan.stages)
    tight = dataclasses.replace(options, memory_limit=peak - 1)
    assert advice(tight, plan_trace(traced, tight)) == ()


def test_one_rank_at_full_speed_needs_no_advice(traced):
    options = PipelineOptions(1, 4, memory_weight=0.0)
    assert advice(options, plan_trace(traced, options)) == ()


def test_lines_say_where_the_time_goes():
    parts = StepParts(2.0, 1.0, 0.5, 0.25, 0.25, useful=1.0, amount=8000, unit="tokens", devices=4)
    assert step_lines(parts) == (
        ("Time", "step 4 s: compute 50.0%, bubble 25.0%, TP 12.5%, DP 6.2%, optimizer 6.2%"),
        ("Rate", "500 tokens/s per device, MFU 25.0% of 4 devices"),
    )
    lines = dict(step_lines(parts, is_assumed=True))
    assert "not on this machine" in lines["Time"]
    assert "smpc calibrate" in lines["Note"]
    assert step_lines(StepParts(0, 0, 0, 0, 0))[0] == ("Time", "step 0 s")
