"""Which nodes stay together and which values any stage can compute again, on recorded models."""

from __future__ import annotations

import torch
from torch import nn

from smpc.partitioner.costs.node_costs import CostModel
from smpc.partitioner.graph.recompute_regions import find_recomputable
from smpc.partitioner.graph.trace_graph import build_graph, find_clusters
from smpc.tracer import record


def clusters_of(model, *args):
    trace = record(model, args)
    found = find_clusters(build_graph(trace))
    names = [node.name for node in trace.nodes]
    members = [tuple(names[i] for i in cluster) for cluster in found.members]
    return members, {name for name, only in zip(names, found.input_only, strict=True) if only}, trace


def recomputed(trace):
    graph = build_graph(trace)
    found = find_recomputable(graph, find_clusters(graph), CostModel())
    names = [node.name for node in trace.nodes]
    return {names[i]: tuple(names[j] for j in cone) for i, cone in found.items()}


def test_parts_of_a_tuple_stay_with_it():
    class Split(nn.Module):
        def forward(self, x):
            a, b = x.chunk(2)
            return a * b

    members, _, _ = clusters_of(Split(), torch.zeros(4, 2))
    assert members == [("chunk", "chunk_0", "chunk_1")]


def test_writers_stay_together_up_to_the_last_write():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            y = x * self.scale
            row = y[0]
            early = y.sum()
            row.add_(1)
            return y.exp() + early

    members, input_only, _ = clusters_of(Writes(), torch.zeros(2, 3))
    assert members == [("mul", "getitem", "sum", "add")]
    assert input_only == set()


def test_masks_written_in_place_depend_on_inputs_alone():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("offset", torch.arange(4.0))

        def forward(self, x):
            mask = torch.zeros(4)
            mask[0] = 1.0
            shifted = mask + self.offset
            return (x * self.scale) * shifted

    members, input_only, trace = clusters_of(Masked(), torch.zeros(2, 4))
    assert members == [("zeros", "setitem")]
    assert input_only == {"zeros", "setitem", "add"}
    assert recomputed(trace)["add"] == ("zeros", "setitem", "add")


def test_a_mask_written_from_a_parameter_does_not():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x):
            mask = torch.zeros(4)
            mask[:] = self.scale
            return x * mask

    _, input_only, trace = clusters_of(Masked(), torch.zeros(2, 4))
    assert input_only == set()
    assert recomputed(trace) == {}


def test_a_module_that_counts_is_never_run_twice():
    _, input_only, trace = clusters_of(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), torch.zeros(4, 3))
    assert [node.name for node in trace.nodes if node.mutates]
    assert input_only == set()


def test_a_normalisation_used_twice_stays_on_one_stage():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x):
            return self.norm(self.linear(self.norm(x)))

    members, _, _ = clusters_of(Twice(), torch.zeros(4, 3))
    assert any({"batch_norm", "batch_norm_1"} <= set(cluster) for cluster in members)


def test_all_users_of_a_rebound_buffer_stay_together():
    class Rebinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            y = x + self.count
            self.count = self.count + 1
            return self.linear(y)

    members, input_only, _ = clusters_of(Rebinds(), torch.zeros(4, 3))
    assert [set(cluster) for cluster in members] == [{"add", "add_1", "set_count"}]
    assert input_only == set()


def test_random_values_are_drawn_once():
    class Noise(nn.Module):
        def forward(self, x):
            return x * torch.rand(3) + torch.arange(3)

    _, input_only, _ = clusters_of(Noise(), torch.zeros(2, 3))
    assert input_only == {"arange"}


def test_an_expensive_value_is_sent():
    class Heavy(nn.Module):
        def forward(self, x):
            heavy = x
            for _ in range(80):
                heavy = heavy @ x
            return x.mean(), heavy.sum()

    _, input_only, trace = clusters_of(Heavy(), torch.zeros(64, 64))
    assert {"mean", "sum"} <= input_only
    assert "mean" in recomputed(trace)
    assert "sum" not in recomputed(trace)
