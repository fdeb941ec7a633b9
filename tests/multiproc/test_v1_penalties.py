"""A loss that uses the model's parameters by itself: refused where ranks share them, else one process's gradients."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import StepError

TENSOR = {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, ids):
        x = self.embed(ids)
        return x + self.down(torch.tanh(self.up(x)))


def make():
    torch.manual_seed(0)
    return Tokens()


def loss_of(model, output):
    return output.square().mean() + 0.01 * sum(parameter.square().sum() for parameter in model.parameters())


@smp.step
def step(model, ids):
    loss = loss_of(model, model(ids))
    model.backward(loss)


def train(rank, folder, config):
    """The model's gradients, or the error."""
    smp.init({"microbatches": 2, "ddp": True, **config})
    model = smp.DistributedModel(make())
    try:
        step(model, torch.arange(32).view(4, 8) % 10)
    except StepError as error:
        return str(error)
    gradients = {name: p.grad for name, p in model.local_named_parameters()}
    smp.shutdown()
    return gradients


@pytest.mark.parametrize("config", [TENSOR, {"context_parallel_degree": 2}])
def test_a_penalty_on_parameters_that_ranks_share_is_refused(tmp_path, config):
    found = run_workers(train, 2, tmp_path, config)
    assert all(
        isinstance(error, str) and "uses the model's parameters by itself (a penalty on weights)" in error
        for error in found
    )


def test_a_penalty_in_replicas_is_that_of_one_process(tmp_path):
    plain = make()
    for ids in (torch.arange(32).view(4, 8) % 10).chunk(2):
        (loss_of(plain, plain(ids)) / 2).backward()
    for gradients in run_workers(train, 2, tmp_path, {}):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
