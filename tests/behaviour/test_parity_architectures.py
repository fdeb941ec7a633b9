"""Models that need no edit to be traced, cut in 2 and 4, and trained: bitwise equal to one process, in loopback."""

import architectures
import parity
import pytest

from smpc.compile import compile_model
from smpc.tracer import NodeKind

# What these call whole, and why: experts route tokens by value, and a branch is taken by value. There are no others.
OPAQUE = {"MixtralForCausalLM": "MixtralExperts", "branching": "Choice"}


@pytest.mark.long
@pytest.mark.matrix(3)
@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*architectures.HUGGING_FACE, *architectures.PLAIN])
def test_training_equals_one_process(name, stages):
    model, batch = architectures.build(name)
    compilation = compile_model(model, batch, pipeline_parallel_degree=stages, microbatches=2)
    whole = {
        type(model.get_submodule(node.target)).__name__
        for node in compilation.trace.nodes
        if node.kind is NodeKind.CALL_MODULE
    }
    assert whole == ({OPAQUE[name]} if name in OPAQUE else set())
    shared = tuple(item.name for item in compilation.plan.shared_parameters)
    parity.assert_same(parity.run_eager(model, batch, 2), parity.run_loopback(model, compilation, batch), shared)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", [name for name, inputs in architectures.HUGGING_FACE.items() if "labels" in inputs])
def test_without_a_mask_attention_runs_as_in_one_process(name):
    """Eager leaves the causal mask, and the heads that queries share, to the kernel where nothing is padded: so does the program."""
    model, batch = architectures.build(name, without="attention_mask")
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2)
    shared = tuple(item.name for item in compilation.plan.shared_parameters)
    parity.assert_same(parity.run_eager(model, batch, 2), parity.run_loopback(model, compilation, batch), shared)
    attention = [dict(node.kwargs) for node in compilation.trace.nodes if node.target.endswith("dot_product_attention")]
    if model.config.is_encoder_decoder or model.config._attn_implementation != "sdpa":
        return
    assert attention
    assert all(found["attn_mask"] is None and found["is_causal"] for found in attention)
    grouped = getattr(model.config, "num_key_value_heads", 4) < model.config.num_attention_heads
    assert all(found.get("enable_gqa", False) == grouped for found in attention)
