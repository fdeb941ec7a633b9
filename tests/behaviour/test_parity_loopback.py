"""Every model of the zoo, cut and run in one process, equals the single-process microbatched run bit for bit."""

import itertools

import parity
import pytest
import torch
import zoo

from smpc.compile import compile_model

ALL = list(itertools.product(zoo.MODELS, (2, 3), (1, 2, 4), ("simple", "interleaved")))
# Every fifth: each model with several cuts, numbers of microbatches, and both orders.
CASES = [pytest.param(*case, marks=() if number % 5 == 0 else pytest.mark.slow) for number, case in enumerate(ALL)]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("name", "stages", "microbatches", "pipeline"), CASES, ids=lambda value: str(value))
def test_outputs_gradients_and_buffers_are_bitwise_equal(name, stages, microbatches, pipeline):
    model, batch = zoo.build(name)
    compilation = compile_model(
        model, batch, pipeline_parallel_degree=stages, microbatches=microbatches, pipeline=pipeline
    )
    assert len(compilation.plan.stages) == stages
    expected = parity.run_eager(model, batch, microbatches)
    got = parity.run_loopback(model, compilation, batch)
    parity.assert_same(expected, got, tuple(shared.name for shared in compilation.plan.shared_parameters))


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "unet"))])
def test_more_microbatches_than_stages_in_one_sample_pieces(name):
    model, batch = zoo.build(name)
    compilation = compile_model(model, batch, pipeline_parallel_degree=3, microbatches=8, active_microbatches=2)
    got = parity.run_loopback(model, compilation, batch)
    shared = tuple(item.name for item in compilation.plan.shared_parameters)
    parity.assert_same(parity.run_eager(model, batch, 8), got, shared)
