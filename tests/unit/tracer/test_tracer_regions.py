"""Checkpointed regions: every way to ask for them, and patterns of names."""

import functools

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import smpc.v1 as smp
from smpc.errors import ConfigError
from smpc.tracer import Trace, record
from smpc.tracer.regions import group_size, matching_regions


class Model(nn.Module):
    """Two blocks, which `run` calls."""

    def __init__(self, run):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def traced(run, prepare=lambda model: None):
    model = Model(run)
    prepare(model)
    return record(model, (torch.zeros(2, 4),))


def names(trace):
    """Name of each region with the targets of its functions."""
    return [
        (
            region.name,
            [
                node.target.rpartition(".")[2]
                for node in trace.nodes[region.first : region.last]
                if node.kind == "call_function"
            ],
        )
        for region in trace.regions
    ]


LAYER = ["linear", "relu"]


def by_torch(model, x, **options):
    return checkpoint.checkpoint(model.blocks[1], model.blocks[0](x), **options)


@pytest.mark.parametrize(
    ("run", "own"),
    [
        (functools.partial(by_torch, use_reentrant=False), True),
        (functools.partial(by_torch, use_reentrant=True), True),
        (lambda model, x: smp.checkpoint(model.blocks[1], model.blocks[0](x)), True),
    ],
)
def test_calls_of_a_checkpoint_function(run, own):
    trace = traced(run)
    assert names(trace) == [("blocks.1", LAYER)]
    region = trace.regions[0]
    assert (region.call, region.preserve_rng_state, region.sequence, region.own) == (0, True, -1, own)
    assert Trace.from_json(trace.to_json()) == trace


def test_random_state_is_an_option():
    for run in (
        functools.partial(by_torch, use_reentrant=False, preserve_rng_state=False),
        functools.partial(by_torch, use_reentrant=True, preserve_rng_state=False),
        lambda model, x: smp.checkpoint(model.blocks[1], model.blocks[0](x), preserve_rng_state=False),
    ):
        assert [region.preserve_rng_state for region in traced(run).regions] == [False]


def test_a_function_is_named_after_the_module_whose_code_it_is():
    def run(model, x):
        return checkpoint.checkpoint(lambda y: model.blocks(y) + 1, x, use_reentrant=False)

    trace = traced(run)
    assert names(trace) == [("blocks", [*LAYER * 3, "add"])]
    assert names(
        traced(
            lambda model, x: checkpoint.checkpoint(
                lambda y: y + model.blocks[0].get_parameter("0.bias"), x, use_reentrant=False
            )
        )
    ) == [("", ["add"])]


def test_marked_modules():
    trace = traced(lambda model, x: model.blocks(x), lambda model: smp.set_activation_checkpointing(model.blocks[1][0]))
    assert names(trace) == [("blocks.1.0", ["linear"])]
    assert not trace.regions[0].own
    assert trace.calls[trace.regions[0].call].fqn == "blocks.1"


@pytest.mark.parametrize("marked", [False, True])
def test_layers_of_a_sequential_container(marked):
    def run(model, x):
        x = model.blocks(x) if marked else smp.checkpoint_sequential(model.blocks, x, strategy="group_2")
        return smp.checkpoint_sequential(model.blocks, x)

    def mark(model):
        if marked:
            smp.set_activation_checkpointing(model.blocks, strategy="group_2")

    trace = traced(run, mark)
    assert names(trace) == [(f"blocks.{i}", LAYER) for i in (0, 1, 2) * 2]
    assert [region.strategy for region in trace.regions] == ["group_2"] * 3 + ["each"] * 3
    assert [region.sequence for region in trace.regions] == [0] * 3 + [1] * 3


def test_members_of_a_list_are_the_layers_of_one_sequence():
    def run(model, x):
        for _ in range(2):
            for block in model.listed:
                x = block(x)
        return x

    def mark(model):
        model.listed = nn.ModuleList(model.blocks)
        del model.blocks
        smp.set_activation_checkpointing(model.listed, strategy="group_2")

    trace = traced(run, mark)
    assert names(trace) == [(f"listed.{i}", LAYER) for i in (0, 1, 2) * 2]
    assert {(region.strategy, region.sequence) for region in trace.regions} == {("group_2", 0)}


def test_nested_regions_come_after_those_around_them():
    def run(model, x):
        def inner(y):
            return smp.checkpoint(model.blocks[1], model.blocks[0](y))

        return checkpoint.checkpoint(inner, model.blocks[2](x) if outside else x, use_reentrant=True)

    outside = False
    assert names(traced(run)) == []  # a reentrant checkpoint of which no argument wants a gradient has none
    outside = True
    assert names(traced(run)) == [("", LAYER * 2), ("blocks.1", LAYER)]


def test_without_gradients_there_is_nothing_to_compute_again():
    with torch.no_grad():
        assert traced(functools.partial(by_torch, use_reentrant=False)).regions == ()

    def run(model, x):
        with torch.no_grad():
            return smp.checkpoint(model.blocks[0], x)

    assert traced(run).regions == ()


def test_recording_leaves_torch_as_it_was():
    before = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction.apply
    traced(functools.partial(by_torch, use_reentrant=False))
    assert (checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction.apply) == before


def test_what_is_saved_is_recorded_as_without_checkpoints():
    plain = traced(lambda model, x: model.blocks[1](model.blocks[0](x)))
    asked = traced(functools.partial(by_torch, use_reentrant=False))
    assert [node.saved for node in plain.nodes] == [node.saved for node in asked.nodes]
    assert any(node.saved for node in plain.nodes)


def test_patterns():
    trace = traced(lambda model, x: smp.checkpoint(model.blocks[0], model.blocks(x)))
    found = {
        pattern: [region.name for region in matching_regions(trace, (pattern,))]
        for pattern in ("blocks", "blocks.*", "*.0", "*", "blocks.[12].1")
    }
    assert found == {
        "blocks": ["blocks"],
        "blocks.*": ["blocks.0", "blocks.1", "blocks.2"],  # not the layers inside, not what the model asks for itself
        "*.0": ["blocks.0", "blocks.1.0", "blocks.2.0"],
        "*": ["blocks"],
        "blocks.[12].1": ["blocks.1.1", "blocks.2.1"],
    }
    with pytest.raises(
        ConfigError, match=r"no module that the model calls matches 'layers\.\*'; its modules are 'blocks', 'blocks.0'"
    ):
        matching_regions(trace, ("blocks", "layers.*"))


def test_strategies():
    assert [group_size(strategy) for strategy in ("each", "contiguous", "group_1", "group_12")] == [1, 0, 1, 12]
    for wrong in ("", "all", "group_0", "group_", "group_-1", "group_2x", None, 2):
        with pytest.raises(ConfigError, match="expected 'each', 'contiguous' or 'group_N'"):
            group_size(wrong)
