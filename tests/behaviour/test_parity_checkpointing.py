"""Checkpointing and offloading change no bit: outputs, gradients, buffers, with dropout, against the same pipeline without."""

import itertools
import warnings

import checkpointed
import parity
import pytest
import torch
from torch import nn

from smpc.compile import compile_model

SCHEDULES = {
    "simple": {"pipeline": "simple"},
    "interleaved": {},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-h2": {"schedule": "zb-h2"},
    "zb-v": {"schedule": "zb-v"},
    "two pieces": {"virtual_pipeline_degree": 2},
    "list": {"schedule": "list"},
}
CONVNETS = (
    "sequential each",
    "sequential contiguous",
    "sequential group_2",
    "sequential group_4",
    "mark group_2",
    "list group_2",
    "list contiguous",
    "smp",
    "reentrant",
    "not reentrant",
)
PATTERNS = {"gpt2": "transformer.h.*", "t5": "*.block.*", "bert": "*.layer.*", "unet": "*"}
FEW = [
    ("gpt2", "interleaved", True),
    ("gpt2", "zb-h1", False),
    ("t5", "simple", True),
    ("t5", "zb-h1", True),
    ("unet", "interleaved", False),
    ("unet", "zb-v", True),
    ("sequential group_2", "interleaved", True),
    ("sequential contiguous", "zb-h2", False),
    ("list group_2", "interleaved", True),
    ("reentrant", "zb-h1", True),
    ("smp", "two pieces", True),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compiled(name, settings, ranks=2, microbatches=4, **options):
    model, batch = checkpointed.build(name)
    patterns = (PATTERNS[name],) if name in PATTERNS else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a cut goes through is not checkpointed; other tests look at that
        compilation = compile_model(
            model,
            batch,
            pipeline_parallel_degree=ranks,
            microbatches=microbatches,
            recompute=patterns,
            **settings,
            **options,
        )
    return model, batch, compilation


def run(model, compilation, batch):
    torch.manual_seed(7)
    return parity.run_loopback(model, compilation, batch)


def check(name, schedule, offloads):
    options = {"offload_activations": offloads, "activation_loading_horizon": 1}
    # With eight microbatches, and under 1F1B three ranks, some are in flight for long enough.
    ranks = 3 if offloads and schedule == "interleaved" else 2
    model, batch, compilation = compiled(name, SCHEDULES[schedule], ranks, 8 if offloads else 4, **options)
    plain = checkpointed.without(compilation)
    parity.assert_same(run(model, plain, batch), run(model, compilation, batch))
    return compilation


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("name", "schedule", "offloads"), FEW, ids=str)
def test_no_bit_changes(name, schedule, offloads):
    compilation = check(name, schedule, offloads)
    assert any(stage.checkpoints for stage in compilation.plan.stages)
    moved = [i for program in compilation.programs for i in program.instructions if i.op in ("OFFLOAD", "RELOAD")]
    assert bool(moved) == offloads
    assert not any(i.op == "OFFLOAD" for program in compilation.evaluation_programs for i in program.instructions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "offloads"),
    list(itertools.product((*PATTERNS, *CONVNETS, "nested"), SCHEDULES, (False, True))),
    ids=str,
)
def test_no_bit_changes_all(name, schedule, offloads):
    check(name, schedule, offloads)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_gradient_checkpointing_of_transformers(name, reentrant):
    model, batch = checkpointed.build(name)
    # Not by the name that old versions of the library have and new ones deprecate.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=4, schedule="zb-h1")
    names = [region.name for stage in compilation.plan.stages for region in stage.checkpoints]
    layers = "transformer.h." if name == "gpt2" else "bert.encoder.layer."
    assert names == [f"{layers}{i}" for i in range(len(names))]
    assert len(names) >= 3
    source = compilation.rank_source(0)
    assert "self.checkpoint" not in source  # the layers stay whole, and do it themselves
    parity.assert_same(run(model, checkpointed.without(compilation), batch), run(model, compilation, batch))


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1"])
def test_nested_regions_on_one_stage(schedule):
    """A region with regions in it is on one stage only if nothing else asks for a cut there."""
    model, batch = checkpointed.build("nested")
    settings = SCHEDULES[schedule]
    compilation = compile_model(model, batch, pipeline_parallel_degree=1, microbatches=4, **settings)
    assert [len(stage.checkpoints) for stage in compilation.plan.stages] == [1 + 1 + 3 + 3]
    plain = checkpointed.without(compilation)
    parity.assert_same(run(model, plain, batch), run(model, compilation, batch))


@pytest.mark.long
def test_layers_are_computed_again():
    """Forwards of a layer in a training step: one for each microbatch, and one more where it is checkpointed."""
    for patterns, expected in (((), 4), (("transformer.h.*",), 8)):
        model, batch = checkpointed.build("gpt2")
        compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=4, recompute=patterns)
        calls = []
        for block in model.transformer.h:  # a copy of the model runs: it has the hooks too
            block.ln_1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        parity.run_loopback(model, compilation, batch)
        assert len(calls) == expected * len(model.transformer.h)


def test_a_buffer_that_changes_outside_of_the_region_that_reads_it():
    """The second run comes after the next microbatch has changed it."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("rebound", torch.ones(()))
            self.register_buffer("written", torch.ones(()))

        def forward(self, x):
            return torch.tanh(self.linear(x) * self.rebound * self.written.clone())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(Layer(), Layer(), Layer())

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                layer.rebound = layer.rebound * 1.5
                layer.written.add_(0.5)
            return x

    torch.manual_seed(0)
    model, batch = Model(), ((torch.randn(8, 4),), {})
    options = {"microbatches": 4, "pipeline": "simple", "recompute": ("layers.*",)}
    compilation = compile_model(model, batch, pipeline_parallel_degree=1, **options)
    assert [len(stage.checkpoints) for stage in compilation.plan.stages] == [3]
    parity.assert_same(parity.run_eager(model, batch, 4), run(model, compilation, batch))
