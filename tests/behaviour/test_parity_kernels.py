"""Models whose operations are replaced by ops of smpc.kernels: what is replaced, and that gradients stay those of eager PyTorch."""

import parity
import pytest
import torch
import zoo

from smpc.codegen.rewrite.kernels import REWRITES
from smpc.compile import PipelineOptions, Traced, compile_model, plan_trace, write_programs
from smpc.partitioner.graph.plan import Plan
from smpc.sample_inputs import as_inputs, first_microbatch
from smpc.tracer.record import record

EVERYTHING = tuple(rewrite.op for rewrite in REWRITES)
LAYERS = 3
# What each model has of everything: places by op.
USED = {
    "llama": {
        "cross_entropy": 1,
        "flash_attention": LAYERS,
        "add_rms_norm": LAYERS,
        "rms_norm": LAYERS + 1,
        "rotary": 2 * LAYERS,
        "swiglu": LAYERS,
    },
    "qwen3": {
        "cross_entropy": 1,
        "flash_attention": LAYERS,
        "add_rms_norm": LAYERS,
        "rms_norm": 3 * LAYERS + 1,
        "rotary": 2 * LAYERS,
        "swiglu": LAYERS,
    },
    "gemma": {
        "cross_entropy": 1,
        "flash_attention": LAYERS,
        "add_rms_norm": LAYERS,
        "rms_norm": LAYERS + 1,
        "rotary": 2 * LAYERS,
        "bias_gelu": LAYERS,
    },
    "gpt2": {"cross_entropy": 1, "flash_attention": 4, "add_layer_norm": 4, "layer_norm": 5, "bias_gelu": 4},
    "gpt_neox": {
        "cross_entropy": 1,
        "flash_attention": LAYERS,
        "layer_norm": 2 * LAYERS + 1,
        "rotary": 2 * LAYERS,
        "bias_gelu": LAYERS,
    },
    "bert": {
        "cross_entropy": 1,
        "flash_attention": LAYERS,
        "add_layer_norm": 2 * LAYERS,
        "layer_norm": 1,
        "bias_gelu": LAYERS,
    },
    "t5": {"cross_entropy": 1, "rms_norm": 12},
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name):
    if name == "gemma":
        torch.manual_seed(0)
        return zoo._decoder("Gemma", num_key_value_heads=2, head_dim=8)
    return zoo.build(name)


def used(plan):
    return {use.op: use.count for use in plan.kernels if not use.reason}


def assert_close(expected, got):
    """Outputs and gradients of two runs, within rtol 1e-5 of the largest value of each."""
    pairs = [
        (a, b) for ours, theirs in zip(got[0], expected[0], strict=True) for a, b in zip(ours, theirs, strict=True)
    ]
    assert list(got[1]) == list(expected[1])
    pairs += [(got[1][name], gradient) for name, gradient in expected[1].items() if gradient is not None]
    assert pairs
    assert all(got[1][name] is None for name, gradient in expected[1].items() if gradient is None)
    for a, b in pairs:
        # Gradients that are zero but for rounding, as those of key biases, have no digits to compare.
        assert (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-10


@pytest.mark.long
@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "t5" else name for name in USED]
)
def test_what_is_replaced_and_that_the_gradients_are_those_of_eager(name):
    model, batch = build(name)
    compilation = compile_model(
        model, batch, pipeline_parallel_degree=2, microbatches=2, kernels=EVERYTHING, warn=False
    )
    assert used(compilation.plan) == USED[name]
    sources = "".join(code.source for program in compilation.programs for code in program.stages)
    # `op.op(` is how every target ends; nothing that was replaced is computed by a module again.
    assert {op: sources.count(f".{op}')(") for op in USED[name]} == USED[name]
    assert_close(parity.run_eager(model, batch, 2), parity.run_loopback(model, compilation, batch))
    assert Plan.from_json(compilation.plan.to_json()) == compilation.plan


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.slow), True], ids=["by name", "the model's own"])
def test_inside_checkpointed_regions(own):
    model, batch = build("llama")
    if own:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    compilation = compile_model(
        model,
        batch,
        pipeline_parallel_degree=2,
        microbatches=2,
        kernels=EVERYTHING,
        recompute=() if own else ("model.layers.*",),
        warn=False,
    )
    assert used(compilation.plan) == USED["llama"]
    assert sum(len(stage.checkpoints) for stage in compilation.plan.stages) == LAYERS
    assert_close(parity.run_eager(model, batch, 2), parity.run_loopback(model, compilation, batch))


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_nothing_changes_unless_it_is_asked_for(kernels):
    model, batch = build("llama")
    args, kwargs = first_microbatch(as_inputs(batch), 2)
    trace = record(model, args, kwargs)
    plain = write_programs(plan_trace(Traced(trace), PipelineOptions(2, 2)))
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2, kernels=kernels)
    assert compilation.trace.to_json() == plain.trace.to_json()
    assert compilation.plan.to_json() == plain.plan.to_json()
    assert "kernels" not in plain.plan.to_json()
    assert [compilation.rank_source(rank) for rank in (0, 1)] == [plain.rank_source(rank) for rank in (0, 1)]
    assert "smpc.kernels" not in "".join(plain.rank_source(rank) for rank in (0, 1))


def test_what_is_not_used_is_a_warning():
    model, batch = build("t5")
    with pytest.warns(UserWarning, match="^kernels: ") as caught:
        compile_model(
            model, batch, pipeline_parallel_degree=2, microbatches=2, kernels="rms_norm, swiglu,flash_attention"
        )
    assert [str(warning.message) for warning in caught] == [
        "kernels: flash_attention is not used at encoder.block.0.layer.0.SelfAttention and 3 more: its mask needs a gradient",
        "kernels: flash_attention is not used at decoder.block.0.layer.1.EncDecAttention and 1 more: its mask float32[1,4,12,12] is "
        "added to the scores and has a row for every query",
        "kernels: swiglu is not used: nothing in the model computes it",
    ]
