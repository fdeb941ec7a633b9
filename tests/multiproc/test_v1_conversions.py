"""A router in half precision whose forward converts its weights to float32, on replicas: an error on every rank that says how."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import PeerError, StepError


class Routed(nn.Module):
    """As Switch Transformers' routers: `dtype` is asked for in every call."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router, self.dtype = nn.Linear(4, 4), nn.Linear(4, 3), dtype

    def forward(self, x):
        hidden = self.first(x)
        self.router = self.router.to(self.dtype)
        return self.router(hidden.to(self.dtype)).softmax(-1).to(hidden.dtype)


@smp.step
def train_step(model, x):
    loss = model(x)[:, 0].square().mean()
    model.backward(loss)
    return loss


def train(dtype, options):
    """Losses of two steps of this rank's rows."""
    smp.init({"ddp": True, "bf16": True, **options})
    try:
        model = smp.DistributedModel(Routed(dtype))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        losses = []
        for _ in range(2):
            losses.append(float(train_step(model, rows()).reduce_mean()))
            optimizer.step()
            optimizer.zero_grad()
        return losses
    finally:
        smp.shutdown()


def rows():
    return torch.linspace(-1, 1, 16).reshape(4, 4)  # alike on both ranks


OPTIONS = {"replicas": {"microbatches": 2}, "shards": {"microbatches": 1, "fully_shard": True}}


def train_asked(rank, folder, options):
    return train(torch.bfloat16, options)


def train_converting(rank, folder, options):
    try:
        return train(torch.float32, options)
    except (StepError, PeerError) as error:  # of a rank that was still waiting for the other
        return str(error)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_router_that_converts_its_weights_is_refused(tmp_path, name):
    """The second microbatch's backward had been torch's "Expected BFloat16, got Float", and FSDP's "uniform gradient dtype"."""
    for text in run_workers(train_converting, 2, tmp_path, OPTIONS[name]):
        assert "forward converts router.weight from torch.bfloat16 to torch.float32, which lasts" in text
        assert "have forward ask for that type" in text


def test_one_that_is_asked_for_the_models_type_trains(tmp_path):
    """As bf16 parameters with fp32 masters in one process."""
    model = Routed(torch.bfloat16).bfloat16()
    masters = [parameter.detach().float() for parameter in model.parameters()]
    expected = []
    for _ in range(2):
        total = 0.0
        for part in rows().bfloat16().chunk(2):
            loss = model(part).float()[:, 0].square().mean()
            (loss / 2).backward()
            total += loss.item() / 2
        expected.append(total)
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                master -= 0.5 * parameter.grad.float()
                parameter.copy_(master)
                parameter.grad = None
    for losses in run_workers(train_asked, 2, tmp_path, OPTIONS["replicas"]):
        assert losses == pytest.approx(expected, rel=1e-6)
