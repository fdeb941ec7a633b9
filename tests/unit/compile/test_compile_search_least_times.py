"""No microbatch of another size, and no rank of those that share it, takes less than the bound that one recorded microbatch gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from smpc.codegen.rewrite.outputs import keep_outputs
from smpc.compile import PipelineOptions, Traced
from smpc.compile.search.least_times import least_times
from smpc.compile.search.workloads import Load, Workloads
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.costs.node_costs import node_times, weight_times

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 1000, "use_cache": False}
# Scalars and masks that are the same for every size count as if they grew.
SAME = 3e-4


def llama(**others):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=128, intermediate_size=256, num_key_value_heads=2, max_position_embeddings=64, **SMALL, **others
        )
    )


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=128, intermediate_size=256, num_key_value_heads=2, num_local_experts=4, **SMALL
        )
    )


MODELS = {"llama": llama, "attention in steps": lambda: llama(attn_implementation="eager"), "mixtral": mixtral}


def loads(is_mixture):
    """Sizes, with every number of ranks that can share them."""
    for size in (1, 2, 8):
        for tensor, context, expert in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)):
            if is_mixture or expert == 1:
                yield Load(size, tensor, context, expert)


def longest_chain(trace, times, *, is_split):
    """Seconds of the longest chain of nodes, tried from each to each; `is_split`: without what backwards may do later."""
    later = weight_times(trace, times.backward, ()) if is_split else 0.0
    own = dict(zip((node.name for node in trace.nodes), times.forward + times.backward - later, strict=True))
    until = {}
    for node in trace.nodes:
        until[node.name] = own[node.name] + max((until[name] for name in node.inputs), default=0.0)
    return max(until.values())


@pytest.mark.parametrize("name", MODELS)
def test_no_other_microbatch_takes_less(name):
    ids = torch.zeros(8, 64, dtype=torch.int64)
    ratios = []
    found = Workloads(MODELS[name](), ((), {"input_ids": ids, "labels": ids}), find_device("h100"), ())
    base = found.get(Load(1)).trace
    for load in loads(name == "mixtral"):
        own, outputs = found.get(load), found.outputs(load)
        assert isinstance(own, Traced), own
        for device in ("h100", "cpu"):
            for accumulated in (0.0, 0.5):
                costs = PipelineOptions(1, device=find_device(device)).cost_model
                costs = replace(costs, accumulated=accumulated)
                times = node_times(own.trace, costs)
                seconds = float((times.forward + times.backward).sum())
                first = base if outputs is None else keep_outputs(base, outputs)
                least = least_times(first, costs)
                bound = least.of(load.size, load.tensor, load.context, load.expert)
                assert bound <= seconds * (1 + SAME), (load, device)
                assert least_times(own.trace, costs).of(1.0) <= seconds * (1 + 1e-9), (load, device)
                ratios.append(bound / seconds)
                for is_split in (False, True):
                    path = least.path(load.size, load.tensor, load.context, load.expert, is_split=is_split)
                    assert 0.0 < path <= longest_chain(own.trace, times, is_split=is_split) * (1 + SAME), (load, device)
    assert max(ratios) > 0.7  # or it says nothing


class Transposed(torch.nn.Module):
    """Reads its parameter through a view."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(512, 512))

    def forward(self, x):
        return (x @ self.weight.T).sum()


def test_a_parameter_that_is_read_through_a_view_does_not_grow_with_the_microbatch():
    found = Workloads(Transposed(), ((torch.zeros(64, 512),), {}), find_device("h100"), ())
    for device in ("h100", "cpu"):
        for accumulated in (0.0, 0.5):
            costs = replace(PipelineOptions(1, device=find_device(device)).cost_model, accumulated=accumulated)
            least = least_times(found.traced(Load(1)).trace, costs)
            for size in (1, 64):
                times = node_times(found.traced(Load(size)).trace, costs)
                assert least.of(size) <= float((times.forward + times.backward).sum()) * (1 + SAME), (device, size)


def test_more_ranks_that_divide_experts_send_as_much_at_least():
    """So a search makes its bounds of the fewest that divide them."""
    ids = torch.zeros(8, 64, dtype=torch.int64)
    found = Workloads(mixtral(), ((), {"input_ids": ids, "labels": ids}), find_device("h100"), ())
    sent = []
    for expert in (2, 4):
        traced = found.get(Load(1, 1, 1, expert))
        assert isinstance(traced, Traced), traced
        assert traced.divided is not None
        sent.append(sum(each.forward_bytes + each.backward_bytes for each in traced.divided.collectives))
    assert 0 < sent[0] <= sent[1]
