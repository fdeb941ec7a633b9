"""Context parallelism as an option of a compilation: with a pipeline it trains as one process does; what cannot be is refused."""

import copy

import pytest
import torch
from context_models import MODELS, assert_alike, made, trained
from tensor_ranks import run_ranks, tensor_groups

from smpc.codegen import ring_order
from smpc.compile import PipelineOptions, compile_model, passes
from smpc.context_parallel import place
from smpc.errors import ConfigError, ScheduleError, UsageError
from smpc.executor.collectives import sum_over
from smpc.executor.replicas import group_hooks
from smpc.runtime import LoopbackRuntime


@pytest.fixture(scope="module")
def compiled():
    """Two stages, two ranks of each, two microbatches."""
    model, inputs = made(MODELS["llama"])
    asked = {"context_parallel_degree": 2, "context_parallel_attention": "p2p"}
    return model, inputs, compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=2, **asked)


def test_a_ring_in_the_wrong_order_is_found_before_any_program_runs(monkeypatch):
    right = ring_order.ring_steps
    monkeypatch.setattr(ring_order, "ring_steps", lambda rank, *rest, **how: right(rank, *rest, **how)[::-1])
    monkeypatch.setattr(
        passes, "_prove_ring", passes._prove_ring.__wrapped__
    )  # as in a process that has proven none yet
    model, inputs = made(MODELS["llama"])
    asked = {"context_parallel_degree": 2, "context_parallel_attention": "p2p"}
    with pytest.raises(ScheduleError, match="ring attention"):
        compile_model(model, inputs, pipeline_parallel_degree=1, **asked)


@pytest.mark.long
def test_a_pipeline_of_context_parallel_ranks_trains_as_one_process(compiled):
    model, inputs, compilation = compiled
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    parts = [inputs | {name: value.chunk(2)[m] for name, value in tensors.items()} for m in range(2)]
    whole, expected = copy.deepcopy(model), []
    for part in parts:
        expected.append(trained(whole, part)[0])
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    groups, models = tensor_groups(2), [copy.deepcopy(model) for _ in range(2)]

    def work(rank):
        place(models[rank], compilation.context, groups[rank])
        runtime, losses = LoopbackRuntime(models[rank]), {}

        def on_output(m, output):
            losses[m] = output.loss.detach()
            return [(output.loss, None)]

        runtime.run(runtime.install(compilation), [((), part) for part in parts], on_output, training=True)
        return losses, {name: parameter.grad for name, parameter in models[rank].named_parameters()}

    for losses, found in run_ranks(2, work):
        for m, loss in enumerate(expected):
            assert_alike((losses[m], found), (loss, gradients))


def test_gradients_are_summed_once_a_step_and_add_up_over_steps(compiled, monkeypatch):
    """They were all-reduced in every backward, and a plan could leave a parameter's sum on another stage than its use."""
    model, inputs, compilation = compiled
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    parts = [inputs | {name: value.chunk(2)[m] for name, value in tensors.items()} for m in range(2)]
    whole = copy.deepcopy(model)
    for part in (*parts, *parts):
        loss, _ = trained(whole, part)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    groups, models = tensor_groups(2), [copy.deepcopy(model) for _ in range(2)]
    sums = []

    def counted(tensor, group):
        sums.append(group.rank)
        return sum_over(tensor, group)

    monkeypatch.setattr(group_hooks, "sum_over", counted)

    def work(rank):
        place(models[rank], compilation.context, groups[rank])
        runtime = LoopbackRuntime(models[rank])
        program = runtime.install(compilation)
        for _ in range(2):
            runtime.run(program, [((), part) for part in parts], lambda _, output: [(output.loss, None)], training=True)
        return {name: parameter.grad for name, parameter in models[rank].named_parameters()}

    for found in run_ranks(2, work):
        assert_alike((loss, found), (loss, gradients))
    assert sorted(compilation.context.sharded.summed) == sorted(gradients)
    assert "replicate_in" not in {node.target.rpartition(".")[2] for node in compilation.trace.nodes}
    assert sorted(sums) == [0] * 4 + [1] * 4  # two steps of two stages, whose gradients are all small


def test_a_rank_computes_half_and_its_program_has_the_ring(compiled):
    model, inputs, compilation = compiled
    alone = compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=2)
    flops = [sum(node.flops for node in found.trace.nodes) for found in (compilation, alone)]
    assert 0.45 < flops[0] / flops[1] < 0.6
    assert "ring_attention" in {c.function for c in compilation.context.sharded.collectives}
    assert any("ring_attention" in compilation.rank_source(rank) for rank in range(2))


def test_a_model_must_know_its_group(compiled):
    model, _, compilation = compiled
    with pytest.raises(UsageError, match=r"smpc\.context_parallel\.place"):
        LoopbackRuntime(copy.deepcopy(model)).install(compilation)
    with pytest.raises(ConfigError, match="a group of 2 context-parallel ranks, found one of 1"):
        place(copy.deepcopy(model), compilation.context, tensor_groups(1)[0])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"context_parallel_attention": "p2p"}, "context_parallel_attention: p2p has no effect with .*degree 1"),
        ({"context_parallel_degree": 2, "context_parallel_layout": "z"}, "expected one of auto, contiguous, zigzag"),
        ({"context_parallel_degree": 2, "trace_memory_usage": True}, "not with context_parallel_degree above 1"),
        (
            {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "tensor_parallel_plan": "off"},
            "expected 'auto' with context_parallel_degree 2, found 'off'",
        ),
    ],
)
def test_options_that_do_not_go_together(asked, message):
    with pytest.raises(ConfigError, match=message):
        PipelineOptions(pipeline_parallel_degree=1, microbatches=1, **asked)
