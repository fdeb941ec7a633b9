"""Context parallelism on real ranks: loss and gradients of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from context_models import MODELS, assert_alike, made, on_ranks, trained
from executor_harness import run_workers

from smpc import context_parallel, tensor_parallel
from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED
from smpc.compile import compile_model
from smpc.executor.collectives import TensorGroup
from smpc.executor.parameter_slices import whole_of
from smpc.runtime import LoopbackRuntime

EVERY_DAY = (("llama", "p2p"), ("llama_padded", "a2a"))


def train(rank, folder, cases, dtypes):
    found = {}
    for name, attention in cases:
        for dtype in dtypes:
            ((_, own),), whole = on_ranks([dist.group.WORLD], MODELS[name], dtype, attention=attention)
            found[name, attention, dtype] = own, whole
    return found


def check(tmp_path, ranks, cases, dtypes):
    for found in run_workers(train, ranks, tmp_path, cases, dtypes):
        for (*_, dtype), (own, whole) in found.items():
            assert_alike(own, whole, dtype)


@pytest.mark.long
def test_two_ranks_have_one_process_s_numbers(tmp_path):
    check(tmp_path, 2, EVERY_DAY, (torch.float32,))


def train_both(rank, folder):
    """Two tensor-parallel groups of two, whose ranks of one place share the sequence."""
    model, inputs = made(MODELS["llama"])
    whole = trained(copy.deepcopy(model), inputs)
    compilation = compile_model(
        model, inputs, pipeline_parallel_degree=1, microbatches=1, tensor_parallel_degree=2, context_parallel_degree=2,
        context_parallel_attention="p2p",
    )  # fmt: skip
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tensor = TensorGroup.of(groups[rank // 2])
    tensor_parallel.place(model, compilation.sharded, tensor)
    context_parallel.place(model, compilation.context, groups[2 + rank % 2])
    runtime, losses = LoopbackRuntime(model), []

    def on_output(_, output):
        losses.append(output.loss.detach())
        return [(output.loss, None)]

    runtime.run(runtime.install(compilation), [((), inputs)], on_output, training=True)
    layouts = dict(compilation.sharded.layouts)
    gradients = {name: whole_of(p.grad, layouts.get(name, REPLICATED), tensor) for name, p in model.named_parameters()}
    ring = next(c for c in compilation.context.sharded.collectives if c.function == "ring_attention")
    heads = compilation.trace.node(ring.node).spec.shape[1]
    return (losses[0], gradients), whole, heads


@pytest.mark.long
def test_with_tensor_parallel_ranks(tmp_path):
    """Each of the rings has half of the heads."""
    for own, whole, heads in run_workers(train_both, 4, tmp_path):
        assert_alike(own, whole)
        assert heads == 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_model(tmp_path, ranks):
    cases = tuple((name, attention) for name in MODELS for attention in ("p2p", "a2a", "all_gather"))
    check(tmp_path, ranks, cases, (torch.float32, torch.float64))
