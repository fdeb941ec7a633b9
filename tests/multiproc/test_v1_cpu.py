"""`model.cpu()` has the whole model on every rank, stages and slices of it, and the next step goes on as if nothing had been."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp


class Net(nn.Module):
    def __init__(self, has_modules):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        with smp.tensor_parallelism(has_modules):
            self.up = nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.up(self.embed(x)))))


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def train(rank, folder, config, goes_to_cpu):
    smp.init({"microbatches": 2, "ddp": True, "prescaled_batch": True, "tensor_parallel_degree": 2, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(Net("tensor_parallel_plan" not in config))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(train_step(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).stack())
        optimizer.step()
        if step == 1 and goes_to_cpu:
            assert any(model.is_distributed_parameter(p) for p in model.parameters())
            expected, moments = model.state_dict(), optimizer.state_dict()["state"]
            assert model.cpu() is model
            held = dict(model.get_module().named_parameters()) | dict(model.get_module().named_buffers())
            for name, value in held.items():
                assert torch.equal(value, expected[name]), name
                assert value.device.type == "cpu"
            assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
            again = optimizer.state_dict()["state"]
            assert all(torch.equal(again[i][key], moments[i][key]) for i in moments for key in moments[i])
            if config.get("pipeline_parallel_degree", 1) == 1:
                model.cpu()
                optimizer.zero_grad()
                model.load_state_dict(expected)
    return losses, model.state_dict()


CASES = [
    ({"pipeline_parallel_degree": 1}, 2),
    ({"pipeline_parallel_degree": 1, "tensor_parallel_plan": {"up": "colwise"}, "bf16": True}, 2),
    pytest.param({"pipeline_parallel_degree": 2}, 4, marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_degree": 2, "tensor_parallel_plan": {"up": "colwise"}}, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("config", "world"), CASES)
def test_the_whole_model_and_back(tmp_path, config, world):
    """Slices stayed slices: half of each weight of a tensor-parallel module was what `cpu()` left."""
    results = []
    for goes in (False, True):
        (folder := tmp_path / str(goes)).mkdir()
        results.append(run_workers(train, world, folder, config, goes))
    for (losses, state), (others, other) in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(losses, others, strict=True))
        assert all(torch.equal(value, other[name]) for name, value in state.items())
