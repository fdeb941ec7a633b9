"""Which regions are computed again, on which stage, and what that costs in time."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import smpc.v1 as smp
from smpc.compile import compile_model, plan_warnings
from smpc.errors import ConfigError, PartitionError
from smpc.partitioner.graph.plan import Plan
from smpc.partitioner.graph.recompute_regions import requested_regions
from smpc.partitioner.manual import ManualPartition
from smpc.tracer import record


class Layers(nn.Module):
    """Five layers, as the reference has them in its example."""

    def __init__(self, strategy="each"):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)))
        self.strategy = strategy

    def forward(self, x):
        return smp.checkpoint_sequential(self.layers, x, strategy=self.strategy)


def cut(model, ranks, **options):
    """The model with its layers on these ranks."""
    marks = tuple((f"layers.{i}", rank) for i, rank in enumerate(ranks))
    manual = ManualPartition(marks, 0)
    return compile_model(
        model, torch.zeros(4, 4), pipeline_parallel_degree=max(ranks) + 1, microbatches=2, manual=manual, **options
    )


def groups(compilation):
    return [[region.name.replace("layers.", "") for region in stage.checkpoints] for stage in compilation.plan.stages]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("each", [["0", "1"], ["2", "3", "4"]]),
        ("contiguous", [["0 to 1"], ["2 to 4"]]),
        ("group_2", [["0 to 1"], ["2 to 3", "4"]]),
        ("group_3", [["0 to 1"], ["2 to 4"]]),
        ("group_9", [["0 to 1"], ["2 to 4"]]),
    ],
)
def test_groups_of_layers(strategy, expected):
    """The reference's own example: a, b on rank 0 and c, d, e on rank 1."""
    assert groups(cut(Layers(strategy), (0, 0, 1, 1, 1))) == expected


def test_layers_that_lie_on_several_stages_of_a_rank():
    assert groups(cut(Layers("contiguous"), (1, 1, 0, 1, 1))) == [["0 to 1"], ["2"], ["3 to 4"]]


def test_a_manual_cut_through_a_region_is_an_error():
    marks = ManualPartition((("layers.0", 0), ("layers.1.0", 0), ("layers.1.1", 1), ("layers.2", 1)), 1)
    with pytest.raises(
        PartitionError, match=r"every checkpointed module on one partition, found that layers\.1 is on stages 0, 1"
    ):
        compile_model(Layers(), torch.zeros(4, 4), pipeline_parallel_degree=2, manual=marks)


def test_an_automatic_cut_through_a_region_is_a_warning():
    class Model(Layers):
        def forward(self, x):
            return smp.checkpoint(self.layers, x)

    with pytest.warns(UserWarning, match="layers is not checkpointed: the partition puts it on stages 0, 1"):
        compilation = compile_model(Model(), torch.zeros(4, 4), pipeline_parallel_degree=2)
    assert groups(compilation) == [[], []]
    assert [stage.recompute_time for stage in compilation.plan.stages] == [0.0, 0.0]
    assert Plan.from_json(compilation.plan.to_json()) == compilation.plan


def test_the_automatic_partition_does_not_cut_through_small_regions():
    """One heavy layer in the middle: the best cut goes through it, unless it is checkpointed."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
            self.heavy = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            self.tail = nn.Linear(64, 64)

        def forward(self, x):
            return self.tail(self.last(self.heavy(self.first(x))))

    def stages(*patterns):
        options = {"pipeline_parallel_degree": 2, "memory_weight": 0.0, "recompute": patterns}
        plan = compile_model(Model(), torch.zeros(8, 64), **options).plan
        owners = dict(plan.assignment)
        return plan, owners["linear_1"], owners["linear_2"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan, one, other = stages("heavy")
        assert one == other
        assert [len(stage.checkpoints) for stage in plan.stages].count(1) == 1


def test_the_time_of_the_second_forward_belongs_to_the_backward():
    model = nn.Sequential(Layers().layers)
    plain = compile_model(model, torch.zeros(4, 4), pipeline_parallel_degree=1)
    again = compile_model(model, torch.zeros(4, 4), pipeline_parallel_degree=1, recompute=("*",))
    (before,), (after,) = plain.plan.stages, again.plan.stages
    assert [region.name for region in after.checkpoints] == ["0"]
    assert after.forward_time == before.forward_time
    assert after.recompute_time == pytest.approx(before.forward_time, rel=1e-12)
    assert after.backward_time == pytest.approx(before.backward_time + before.forward_time, rel=1e-12)
    assert after.activation_bytes_per_microbatch < before.activation_bytes_per_microbatch
    assert again.timeline().makespan == pytest.approx(after.forward_time + after.backward_time)


def test_a_region_that_writes_into_what_it_reads_is_left_out():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.act(self.first(x)))

    trace = record(Model(), (torch.zeros(2, 4),))
    found = requested_regions(trace, ("act", "last"))
    assert [region.name for region in found.regions] == ["last"]
    assert found.notes == (
        "act is not checkpointed: it reads 'linear', which is written in place afterwards, so it could not be computed again",
    )
    with pytest.warns(UserWarning, match="act is not checkpointed"):
        compilation = compile_model(Model(), torch.zeros(2, 4), pipeline_parallel_degree=2, recompute=("act",))
    assert plan_warnings(compilation.plan) == found.notes


def test_bad_patterns_are_found_before_anything_starts():
    with pytest.raises(ConfigError, match="recompute: no module that the model calls matches 'blocks'"):
        compile_model(Layers(), torch.zeros(4, 4), pipeline_parallel_degree=2, recompute=("blocks",))


def test_offloading_without_a_region_is_a_warning():
    with pytest.warns(UserWarning, match="offload_activations has no effect: no module is checkpointed"):
        compile_model(Layers().layers, torch.zeros(4, 4), pipeline_parallel_degree=2, offload_activations=True)
    with pytest.raises(ConfigError, match="activation_loading_horizon: expected at least 1, found 0"):
        compile_model(Layers(), torch.zeros(4, 4), pipeline_parallel_degree=2, activation_loading_horizon=0)
