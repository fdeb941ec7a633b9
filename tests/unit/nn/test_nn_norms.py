"""FusedLayerNorm and FusedRMSNorm stand in for apex's and torch's, and a tracer sees what they call."""

import pytest
import torch
from torch import nn

import smpc.v1.nn as smp_nn
from smpc.nn import FusedLayerNorm, FusedRMSNorm
from smpc.tracer import record, verify

PAIRS = pytest.mark.parametrize(
    ("fused", "plain"), [(FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)], ids=["layer", "rms"]
)


@PAIRS
@pytest.mark.parametrize("shape", [7, (3, 7)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("memory_efficient", [True, False])
def test_equals_torch(fused, plain, shape, affine, memory_efficient):
    mine = fused(shape, 1e-4, affine, memory_efficient)
    reference = plain(shape, eps=1e-4, elementwise_affine=affine)
    for parameter in reference.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    mine.load_state_dict(reference.state_dict())
    x = torch.randn(5, 3, 7, requires_grad=True)
    grad = torch.randn(5, 3, 7)
    found = torch.autograd.grad(mine(x), (x, *mine.parameters()), grad)
    expected = torch.autograd.grad(reference(x), (x, *reference.parameters()), grad)
    torch.testing.assert_close(mine(x), reference(x))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@PAIRS
def test_half_precision_inputs_of_fp32_weights(fused, plain):
    mine, reference = fused(33), plain(33, eps=1e-5)
    x = torch.randn(5, 33).half()
    assert mine(x).dtype == torch.float16
    torch.testing.assert_close(mine(x).float(), reference(x.float()), rtol=2e-3, atol=2e-3)


def test_apexs_words():
    assert repr(FusedLayerNorm(7)) == "FusedLayerNorm((7,), eps=1e-05, elementwise_affine=True)"
    assert smp_nn.FusedLayerNorm is FusedLayerNorm
    assert FusedLayerNorm(7, device="meta", dtype=torch.float16).weight.dtype == torch.float16


@pytest.mark.parametrize("fused", [FusedLayerNorm, FusedRMSNorm])
def test_bad_arguments(fused):
    with pytest.raises(ValueError, match=r"sizes of at least 1, found \(0,\)"):
        fused(0)
    with pytest.raises(ValueError, match="eps > 0, found -1"):
        fused(3, eps=-1)


def test_a_trace_shows_the_op_and_replays_it():
    model = nn.Sequential(nn.Linear(4, 7), FusedLayerNorm(7, memory_efficient=True), nn.Linear(7, 2))
    x = torch.randn(3, 4)
    trace = record(model, (x,))
    assert "torch.ops.smpc.layer_norm.default" in [node.target for node in trace.nodes]
    verify(trace, model, (x,))
