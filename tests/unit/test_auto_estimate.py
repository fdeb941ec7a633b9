"""Steps of replicas, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from smpc.auto.estimate import BUCKET_BYTES, all_reduce_time, step_time
from smpc.codegen.actions import backward, forward
from smpc.codegen.simulate import Event, Timeline
from smpc.compile import PipelineOptions, make_plan
from smpc.partitioner.device import Wire
from smpc.tracer import record

FREE = Wire(float("inf"), 0.0)


def test_a_ring_moves_each_byte_twice_but_for_ones_own():
    assert all_reduce_time(100e6, 4, Wire(50e9, 0.0)) == pytest.approx(3e-3)
    assert all_reduce_time(100e6, 1, Wire(50e9, 1.0)) == 0.0
    assert all_reduce_time(0, 8, Wire(1.0, 1.0)) == 6.0


@pytest.fixture
def plan():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    trace = record(model, (torch.zeros(2, 4),))
    return make_plan(trace, PipelineOptions(2, 1))


def with_gradients(plan, *sizes):
    stages = (replace(stage, gradient_bytes=size) for stage, size in zip(plan.stages, sizes, strict=True))
    return replace(plan, stages=tuple(stages))


TIMELINE = Timeline(
    2,
    (
        Event(0, forward(0, 0), 0.0, 1.0),
        Event(1, forward(1, 0), 1.0, 2.0),
        Event(1, backward(1, 0), 2.0, 4.0),
        Event(0, backward(0, 0), 4.0, 6.0),
    ),
)


def test_what_ends_before_the_pipeline_costs_nothing(plan):
    seconds = step_time(with_gradients(plan, 0, 4), TIMELINE, 2, Wire(1.0, 0.0), float("inf"))
    assert (seconds.pipeline, seconds.reduce) == (6.0, 2.0)  # stage 1: its only bucket comes at 4 and takes 4, until 8
    seconds = step_time(with_gradients(plan, 0, 2), TIMELINE, 2, Wire(1.0, 0.0), float("inf"))
    assert seconds.reduce == 0.0


def test_many_buckets_overlap_with_the_last_backward(plan):
    # Ten buckets of a tenth of a second each start with the backward of stage 0, at 4; the last one ends after it, at 6.1.
    wire = Wire(10 * BUCKET_BYTES, 0.0)
    seconds = step_time(with_gradients(plan, 10 * BUCKET_BYTES, 0), TIMELINE, 2, wire, float("inf"))
    assert seconds.reduce == pytest.approx(0.1)
    # Thirty of them take three seconds: until 7.
    seconds = step_time(with_gradients(plan, 30 * BUCKET_BYTES, 0), TIMELINE, 2, wire, float("inf"))
    assert seconds.reduce == pytest.approx(1.0)


def test_the_optimizer_reads_gradients_and_reads_and_writes_the_rest(plan):
    seconds = step_time(plan, TIMELINE, 1, FREE, 80.0)
    # Adam in float32: 20 elements of 4 bytes on each rank, two moments
    assert seconds.optimizer == pytest.approx((2 * 80 + 80 + 2 * 160) / 80.0)
    assert seconds.total == pytest.approx(6.0 + 7.0)
