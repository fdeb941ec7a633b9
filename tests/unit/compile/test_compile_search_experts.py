"""A search knows what experts cost, whichever way the model computes them, and what ranks save that divide them."""

import pytest
import torch
import transformers

import smpc
from smpc.codegen.rewrite.expert_parallel import divide_experts
from smpc.compile.divided_experts import experts_to_divide
from smpc.compile.search import Verdict, searcher
from smpc.tracer import record

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = 256, 64, 96, 8, 2


def mixtral(implementation):
    config = transformers.MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        use_cache=False,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(config).to(torch.bfloat16)


def batch(size=2):
    ids = torch.zeros(size, TOKENS // 2, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def inside(trace):
    """The nodes in which experts are computed."""
    return [node for node in trace.nodes if node.target == "model.layers.0.mlp.experts" or "grouped_mm" in node.target]


@pytest.mark.parametrize("leaves", [(), ("model.layers.0.mlp.experts",)])
def test_grouped_products_count_as_many_flops_as_a_product_for_each_row(leaves):
    nodes = inside(record(mixtral("grouped_mm"), (), batch(), leaf_modules=leaves))
    assert sum(node.flops for node in nodes) == 2 * TOKENS * CHOSEN * 3 * HIDDEN * INNER
    rows = 2 * TOKENS * CHOSEN * (2 * HIDDEN + 3 * INNER) if not leaves else 2 * TOKENS * 2 * HIDDEN  # bytes
    weights = 2 * EXPERTS * 3 * HIDDEN * INNER  # bytes, which are read once
    assert sum(node.bytes_moved for node in nodes) == pytest.approx(weights + rows, rel=0.05)


def test_ranks_that_divide_experts_read_those_that_they_have():
    model = mixtral("grouped_mm")
    trace = record(model, (), batch(), leaf_modules=("model.layers.0.mlp.experts",))
    divided = divide_experts(trace, experts_to_divide(model, 4), 4).trace
    (whole,), (own,) = inside(trace), inside(divided)
    assert whole.bytes_moved - own.bytes_moved == 2 * (EXPERTS - EXPERTS // 4) * 3 * HIDDEN * INNER
    assert own.flops == whole.flops  # tokens of all ranks, for some of the experts


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_a_search_divides_experts_that_are_recorded_inside(implementation):
    """Such experts were said to be none that can be divided: a mixture of 671 billion parameters had no plan on 2,048 ranks."""
    model = mixtral(implementation)
    found = smpc.search(model, batch(4), world_size=4, device="h100", tensor_parallel_degrees=[1], effort=10)
    tried = [result for result in found.results if result.candidate.expert_parallel_degree > 1]
    assert {result.candidate.expert_parallel_degree for result in tried} == {2, 4}
    assert Verdict.IMPOSSIBLE not in {
        result.verdict for result in tried if result.candidate.pipeline_parallel_degree == 1
    }


def test_of_a_large_model_a_plan_is_shown_before_its_experts_are_tried(monkeypatch):
    """Experts of a Mixtral 8x22B are tried and recorded in 15 s, and no plan was shown before. What is found does not depend on it."""
    seen, found = [], {}
    for large in (10, 10**6):
        monkeypatch.setattr(searcher, "_LARGE", large)
        phases = []
        show = lambda phase, done, total, phases=phases: phases.append(phase)  # noqa: E731
        found[large] = smpc.search(mixtral("grouped_mm"), batch(8), world_size=4, device="h100", show_progress=show)
        seen.append([phase for phase in dict.fromkeys(phases) if phase.startswith("Searching")])
    assert "best so far" in seen[0][0]
    assert seen[0][0].endswith("others still to be looked at")
    assert "best" not in seen[1][0]
    assert found[10].best == found[10**6].best
