"""A pipeline of all ranks in one process on the GPU, against the model by itself there."""

import copy

import parity
import pytest
import torch
import zoo

from smpc.compile import compile_model
from smpc.runtime import LoopbackRuntime
from smpc.tracer import flatten

DEVICE = "cuda"
MICROBATCHES = 4


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("t5", {}),
        ("gpt2", {"schedule": "zb-h1"}),
        ("gpt2", {"recompute": ("transformer.h.*",), "offload_activations": True}),
    ],
)
def test_outputs_and_gradients_are_those_of_the_model(name, options):
    """Not bitwise: some of CUDA's backwards sum in an order of their own."""
    model, batch = zoo.build(name)
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=MICROBATCHES, **options)
    model = model.to(DEVICE)
    leaves, structure = flatten(batch)
    batch = structure.unflatten([leaf.to(DEVICE) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
    expected = parity.run_eager(model, batch, MICROBATCHES)
    own = copy.deepcopy(model)
    runtime = LoopbackRuntime(own, DEVICE)
    outputs = {}

    def on_output(m, output):
        outputs[m] = output
        return [(parity.loss_of(output) / MICROBATCHES, None)]

    runtime.run(runtime.install(compilation), parity.split(batch, MICROBATCHES), on_output, training=True)
    for found, wanted in zip(parity.results(own, outputs), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
