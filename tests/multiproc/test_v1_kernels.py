"""The key `kernels` in training scripts, on two gloo processes."""

import warnings

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import ConfigError


class Block(nn.Module):
    """RMSNorm, written out, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.linspace(0.5, 2, 8)), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


@smp.step
def train_step(model, x):
    loss = (model(x) ** 2).mean()
    model.backward(loss)
    return loss


def train(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "kernels": "rms_norm,swiglu"})
    model = smp.DistributedModel(make_model())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = train_step(model, torch.linspace(-1, 1, 32).view(4, 8)).outputs
    gradients = {name: parameter.grad for name, parameter in model.local_named_parameters()}
    return [loss.item() for loss in losses], gradients, [str(warning.message) for warning in caught]


def test_a_training_step_with_replaced_operations(tmp_path):
    model, expected = make_model(), []
    for part in torch.linspace(-1, 1, 32).view(4, 8).chunk(2):
        loss = (model(part) ** 2).mean()
        (loss / 2).backward()
        expected.append(loss.item())
    results = run_workers(train, 2, tmp_path)
    found = {}
    for losses, gradients, _ in results:
        assert losses == pytest.approx(expected, rel=1e-6)
        found |= gradients
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max()
    text = "kernels: swiglu is not used: nothing in the model computes it"
    assert [text in caught for _, _, caught in results] == [True, False]
    # That it was replaced shows in the bits: the formula adds in another order.
    assert any(not torch.equal(found[name], parameter.grad) for name, parameter in model.named_parameters())


def test_a_wrong_name_stops_the_start():
    with pytest.raises(ConfigError, match="found 'rmsnorm'; did you mean 'rms_norm'"):
        smp.init({"pipeline_parallel_degree": 2, "kernels": "rmsnorm"})
