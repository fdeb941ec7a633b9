"""No plan of another size, nor of ranks that share a microbatch, holds less than the bound that one recorded microbatch gives."""

from __future__ import annotations

import pytest
import torch
import transformers

from smpc.codegen.rewrite.outputs import keep_outputs
from smpc.compile import PipelineOptions, Traced
from smpc.compile.passes import plan_trace
from smpc.compile.search.working_set import largest_working_set
from smpc.compile.search.workloads import Load, Workloads
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.planner import rank_peaks
from smpc.tracer import record

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 5000, "use_cache": False}


def llama(**others):
    sizes = {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**SIZES, **sizes, **others)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=5000, n_positions=64)
    )


MODELS = {"llama": llama, "attention in steps": lambda: llama(attn_implementation="eager"), "gpt2": gpt2}
BLOCKS = {"llama": ("model.layers.*",), "attention in steps": ("model.layers.*",), "gpt2": ("transformer.h.*",)}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", [False, True])
def test_no_plan_holds_less_than_the_largest_working_set(name, recompute):
    ids = torch.zeros(4, 64, dtype=torch.int64)
    found = Workloads(MODELS[name](), ((), {"input_ids": ids, "labels": ids}), find_device("h100"), ())
    base, ratios = found.get(Load(1)).trace, []
    for load in (Load(1), Load(4), Load(2, 2), Load(2, 1, 2), Load(4, 2, 2)):
        traced, outputs = found.get(load), found.outputs(load)
        assert isinstance(traced, Traced), traced
        first = base if outputs is None else keep_outputs(base, outputs)
        for ranks, schedule in ((1, None), (2, "1f1b"), (2, "zb-h1"), (4, "gpipe")):
            if load.context > 1 and name == "attention in steps":
                continue  # ranks may have it as one operation
            options = PipelineOptions(
                ranks, 4, schedule=schedule, optimizer="sgd", recompute=BLOCKS[name] if recompute else ()
            )
            plan = plan_trace(traced, options, prove=False).plan
            bound = largest_working_set(first, is_whole=ranks == 1) * load.size / load.tensor / load.context
            peak = max(rank_peaks(plan).values())
            assert bound <= peak, (load, ranks, schedule)
            ratios.append(bound / peak)
    assert max(ratios) > 0.2  # or it says nothing


def test_what_one_operation_reads_and_writes():
    class Wide(torch.nn.Module):
        def forward(self, x):
            wide = x.repeat(1, 10)
            mask = torch.ones(1000, 1000)
            return (wide.double() * wide).sum() + mask.sum()

    trace = record(Wide(), (torch.randn(4, 5, requires_grad=True),))
    double, narrow = 4 * 50 * 8, 4 * 50 * 4
    assert largest_working_set(trace, is_whole=False) == double
    assert largest_working_set(trace, is_whole=True) == 2 * double + narrow
