"""Parts of a step, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from smpc.codegen.program import backward, forward
from smpc.codegen.simulate import Event, Timeline
from smpc.compile import PipelineOptions, Traced, plan_trace
from smpc.compile.passes import Sharing, rewrite_trace
from smpc.compile.replica_traffic import Sharding, StepSurroundings
from smpc.compile.step_breakdown import BUCKET_BYTES, step_parts
from smpc.errors import ConfigError
from smpc.partitioner.costs.device import Device, Group, Kernels, Wire
from smpc.partitioner.costs.node_costs import collective_times
from smpc.partitioner.graph.plan import StageExchange
from smpc.tracer import record

INFINITE = float("inf")


def around(
    wire_bandwidth: float, replicas: int, memory_bandwidth: float = INFINITE, sharding=Sharding.NONE
) -> StepSurroundings:
    wire = Wire(wire_bandwidth, 0.0)
    device = Device("d", {"float32": 1.0}, memory_bandwidth, 1, 2, wire, wire)
    return StepSurroundings((device, device), Group(1, 1), Group(replicas, min(2, replicas)), sharding)


def parts_of(plan, place):
    return step_parts(TRACED, plan, TIMELINE, place)


TRACED = Traced(record(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.zeros(2, 4),)))


@pytest.fixture
def plan():
    return plan_trace(TRACED, PipelineOptions(2, 1)).plan


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
    parts = parts_of(with_gradients(plan, 0, 4), around(1.0, 2))
    assert (parts.pipeline, parts.data) == (6.0, 2.0)  # stage 1: its only bucket comes at 4 and takes 4, until 8
    assert parts_of(with_gradients(plan, 0, 2), around(1.0, 2)).data == 0.0


def test_many_buckets_overlap_with_the_last_backward(plan):
    # Ten buckets of a tenth of a second each start with the backward of stage 0, at 4; the last one ends after it, at 6.1.
    place = around(10 * BUCKET_BYTES, 2)
    assert parts_of(with_gradients(plan, 10 * BUCKET_BYTES, 0), place).data == pytest.approx(0.1)
    # Thirty of them take three seconds: until 7.
    assert parts_of(with_gradients(plan, 30 * BUCKET_BYTES, 0), place).data == pytest.approx(1.0)


def test_the_optimizer_reads_gradients_and_reads_and_writes_the_rest(plan):
    parts = parts_of(plan, around(INFINITE, 1, 80.0))
    # Adam in float32: 20 elements of 4 bytes on each rank, two moments
    assert parts.optimizer == pytest.approx((2 * 80 + 80 + 2 * 160) / 80.0)
    assert parts.total == pytest.approx(6.0 + 7.0)


def test_the_parts_of_a_rank_add_up(plan):
    parts = parts_of(plan, around(INFINITE, 1))
    assert (parts.compute, parts.bubble) == (3.0, 3.0)  # of 6 seconds, each rank works for 3
    assert parts.waiting == 0.0  # no device is slower than another
    assert parts.total == parts.compute + parts.bubble + parts.tensor + parts.data + parts.optimizer == 6.0
    assert (parts.amount, parts.unit, parts.devices) == (2, "samples", 2)


EXECUTOR = Kernels(action=0.25, step=0.5, unit=((1.0, 0.125),), deferred={"linear": ((1.0, 0.375),)})


def planned_on(kernels, schedule="1f1b", microbatches=4):
    """The parts of a step of two linear layers on two ranks, and its plan."""
    wire = Wire(INFINITE, 0.0)
    device = Device("d", {"float32": 1e3}, INFINITE, 1, 2, wire, wire, kernels=kernels)
    options = PipelineOptions(2, microbatches, device=device, schedule=schedule)
    planned = plan_trace(TRACED, options)
    place = StepSurroundings((device, device), Group(1, 1), Group(1, 1))
    return step_parts(TRACED, planned.plan, planned.timeline, place), planned.plan


def test_what_the_executor_needs_for_each_action_and_step_is_a_part_of_the_step():
    free, plan = planned_on(Kernels())
    parts, slower = planned_on(EXECUTOR)
    assert free.executor == 0.0
    assert parts.executor == pytest.approx(4 * 2 * 0.25 + 0.5)  # microbatches, a forward and a backward on each rank
    assert parts.compute == pytest.approx(free.compute)
    assert parts.total == pytest.approx(parts.pipeline + parts.optimizer)
    assert [stage.forward_time for stage in slower.stages] == pytest.approx(
        [s.forward_time + 0.25 for s in plan.stages]
    )


def test_a_split_backward_costs_what_the_device_says_of_the_calls_that_it_puts_off():
    free, _ = planned_on(Kernels(), "zb-h1")
    parts, plan = planned_on(EXECUTOR, "zb-h1")
    assert [stage.split_time for stage in plan.stages] == [0.375 + 0.25] * 2  # one linear layer, and one more action
    assert parts.executor == pytest.approx(4 * (3 * 0.25 + 0.375) + 0.5)
    assert parts.compute == pytest.approx(free.compute)
    assert type(plan).from_json(plan.to_json()) == plan


def test_plans_of_devices_that_say_nothing_of_the_executor_are_what_they_were():
    _, plan = planned_on(Kernels(), "zb-h1")
    assert "split_time" not in plan.to_json()
    assert type(plan).from_json(plan.to_json()) == plan


class Nested(nn.Module):
    """Three blocks, 80 bytes of parameters each, and a layer of 160."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(4, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parts_alone(device, sharding, microbatches=4, units=(10**6, 10**9)):
    """The parts of a step of `Nested` on two replicas."""
    traced = Traced(record(Nested(), (torch.zeros(2, 4),)), units=units)
    planned = plan_trace(
        traced, PipelineOptions(1, microbatches, device=device, data_parallel_degree=2, fully_shard=True)
    )
    place = StepSurroundings((device,), Group(1, 1), Group(2, 2), sharding)
    return step_parts(traced, planned.plan, planned.timeline, place)


def test_units_in_parts_cost_the_executor_in_each_microbatch_and_step_where_no_program_runs():
    wire = Wire(INFINITE, 0.0)
    device = Device(
        "d",
        {"float32": 1e3},
        INFINITE,
        1,
        2,
        wire,
        wire,
        kernels=Kernels(unit=((1.0, 0.125),), unit_step=((1.0, 0.5),)),
    )
    per_unit = 4 * 0.125 + 0.5
    for sharding, expected in ((Sharding.FULL, 4 * per_unit), (Sharding.NONE, 0.0)):  # three layers and the model
        assert parts_alone(device, sharding).executor == pytest.approx(expected)


def test_larger_units_may_cost_the_executor_more():
    wire = Wire(INFINITE, 0.0)
    kernels = Kernels(unit=((80.0, 0.125), (160.0, 0.25)), unit_step=((160.0, 0.5),))
    device = Device("d", {"float32": 1e3}, INFINITE, 1, 2, wire, wire, kernels=kernels)
    assert parts_alone(device, Sharding.FULL).executor == pytest.approx(4 * (3 * 0.125 + 0.25) + 4 * 0.5)


def test_units_in_parts_have_collectives_of_their_own_and_gloo_hides_none():
    """A message takes 1 s, and 16 bytes another. Of what two ranks gather or sum, each sends the half."""
    wire, slow = Wire(16.0, 1.0), {"float32": 1e-3}  # computing takes far longer than all collectives
    gathers = sums = 3 * (1.0 + 40 / 16) + 1.0 + 80 / 16
    gloo = Device("d", slow, INFINITE, 1, 2, wire, wire, transport="gloo")
    assert parts_alone(gloo, Sharding.FULL).data == pytest.approx(gathers + sums)
    nccl = replace(gloo, transport="nccl")  # small units: all gathers before the step, all sums after it
    assert parts_alone(nccl, Sharding.FULL).data == pytest.approx(gathers + sums)


def test_larger_units_gather_and_sum_in_each_microbatch_and_wait_for_what_is_not_hidden():
    """It was priced as one gather and one sum in a step, however many microbatches."""
    wire, small, model = Wire(16.0, 1.0), 1.0 + 40 / 16, 1.0 + 80 / 16
    once = 3 * small + model
    told = 1.0 + 8 / 16  # what a rank calls, and that a backward begins
    gloo = Device("d", {"float32": 1e-3}, INFINITE, 1, 2, wire, wire, transport="gloo")
    kept, never = (0, 10**9), (0, 0)
    assert parts_alone(gloo, Sharding.FULL, units=kept).data == pytest.approx(4 * (2 * once + 5 * told))
    assert parts_alone(gloo, Sharding.FULL, units=never).data == pytest.approx(4 * (3 * once + 5 * told))
    # Where computing takes far longer, what is left are the ends: the model's own, which comes first in a forward and last in a backward,
    # and the first block's, as nothing runs before it, and after its backward.
    nccl = replace(gloo, transport="nccl")
    ends = model + small
    assert parts_alone(nccl, Sharding.FULL, units=kept).data == pytest.approx(4 * (2 * ends + told))
    assert parts_alone(nccl, Sharding.FULL, units=never).data == pytest.approx(4 * (2 * ends + model + told))
    # Where computing takes no time, nothing is hidden
    quick = replace(nccl, peak_flops={"float32": 1e12})
    assert parts_alone(quick, Sharding.FULL, units=never).data == pytest.approx(4 * (3 * once + told), rel=1e-3)


def test_stages_in_parts_gather_before_their_first_forward_and_sum_after_their_last_backward():
    """A pipeline was taken to hide gathers behind forwards, and sums behind backwards: a stage is one unit, which waits for all of it."""
    wire = Wire(16.0, 1.0)
    device = Device("d", {"float32": 1e-3}, INFINITE, 1, 8, wire, wire)
    for schedule in ("1f1b", "zb-h1"):
        options = PipelineOptions(2, 4, device=device, schedule=schedule)
        plain, parts = (
            plan_trace(TRACED, replace(options, data_parallel_degree=2, fully_shard=is_full))
            for is_full in (False, True)
        )
        one = 1.0 + 80 / 2 / 16
        assert [stage.exchange.in_step(4) for stage in parts.plan.stages] == pytest.approx([2 * one] * 2)
        # The first microbatch waits for the gathers of both stages, the last one's gradients for their sums
        chained = 4 if schedule == "1f1b" else 3
        assert parts.timeline.makespan - plain.timeline.makespan >= chained * one * (1 - 1e-6)
        assert type(parts.plan).from_json(parts.plan.to_json()) == parts.plan
        place = StepSurroundings.of(replace(options, data_parallel_degree=2, fully_shard=True))
        found = step_parts(TRACED, parts.plan, parts.timeline, place)
        assert found.data == pytest.approx(2 * one)
        assert found.total == pytest.approx(found.pipeline + found.data + found.optimizer)
        assert found.compute == pytest.approx(step_parts(TRACED, plain.plan, plain.timeline, place).compute)


def test_parts_on_some_replicas_are_gathered_there_and_summed_over_their_copies():
    """Steps with sharded_data_parallel_degree were timed as if nothing were in parts."""
    wire = Wire(16.0, 1.0)
    device = Device("d", {"float32": 1e-3}, INFINITE, 1, 8, wire, wire)
    options = PipelineOptions(2, 1, device=device, data_parallel_degree=4, sharded_data_parallel_degree=2)
    gather, scatter = (1.0 + 80 / 2 / 16,) * 2
    copies = 1.0 + 2 * 40 / 2 / 16
    for chosen in (options, replace(options, fully_shard=True)):  # the degree counts, as in scripts
        for stage in plan_trace(TRACED, chosen).plan.stages:
            assert stage.exchange == StageExchange(gather, 0.0, 0.0, pytest.approx(scatter + copies))
            assert stage.parameter_bytes == 80 + 40
    for degree in (2, 3):
        with pytest.raises(ConfigError, match=f"a divisor of data_parallel_degree 1, found {degree}.*-d {degree}"):
            PipelineOptions(2, sharded_data_parallel_degree=degree)  # memory was divided all the same


def test_useful_flops_are_those_of_forward_and_backward_at_the_peak():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    traced = Traced(record(model, (torch.zeros(2, 4),)))
    planned = plan_trace(traced, PipelineOptions(2, 1))
    parts = step_parts(traced, planned.plan, TIMELINE, around(INFINITE, 1))
    flops = 2 * 2 * 4 * 4  # of one layer; the first one needs no gradient of its input
    assert parts.useful == pytest.approx((2 * flops + 3 * flops) / 2)
    assert parts.mfu == pytest.approx(parts.useful / 6.0)


def test_replicas_that_share_state_gather_the_parameters(plan):
    place = around(10.0, 2, 80.0, Sharding.STATE)
    stages = tuple(replace(stage, gradient_bytes=80, optimizer_bytes=80 + 80) for stage in plan.stages)  # bucket, half
    parts = parts_of(replace(plan, stages=stages), place)
    whole = parts_of(replace(plan, stages=stages), replace(place, sharding=Sharding.NONE))
    assert parts.data == pytest.approx(whole.data + 80 / 2 / 10.0)
    assert parts.optimizer == pytest.approx((2 * 80 + 80) / 2 / 80.0 + 2 * 80 / 80.0)


def test_tokens_are_what_whole_numbers_of_two_dimensions_are():
    ids = torch.zeros(3, 5, dtype=torch.long)
    traced = Traced(record(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)), (ids,)))
    planned = plan_trace(traced, PipelineOptions(2, 1, data_parallel_degree=2))
    place = StepSurroundings.of(PipelineOptions(2, 1, data_parallel_degree=2))
    parts = step_parts(traced, planned.plan, planned.timeline, place)
    assert (parts.amount, parts.unit, parts.devices) == (2 * 15, "tokens", 4)
    assert parts.rate == pytest.approx(30 / 4 / parts.total)


def test_collectives_of_tensor_parallel_ranks_are_a_part(plan):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)))
    options = PipelineOptions(2, 3, tensor_parallel_degree=2)
    traced = rewrite_trace(record(model, (torch.zeros(8, 64),)), options, Sharing.of(model, options))
    planned = plan_trace(traced, options)
    parts = step_parts(planned.traced, planned.plan, planned.timeline, StepSurroundings.of(options))
    forward, backward = collective_times(traced.trace, traced.sharded.collectives, Group(2, 2), options.devices[0])
    assert parts.tensor == pytest.approx(3 * (forward.sum() + backward.sum()) / 2)
    assert parts.tensor > 0
    slowdown = options.devices[0].slowdown(4)  # the slowest of four devices
    assert parts.pipeline == pytest.approx(planned.timeline.makespan * (1 + slowdown))
