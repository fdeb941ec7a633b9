"""Tensor and data parallelism without a pipeline need no step functions: plain calls and backward passes train as one process does."""

import types

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import SmpcError

STEPS, SAMPLES, WIDTH = 6, 8, 8


class Model(nn.Module):
    """Distributed and plain modules, a buffer that training writes, and a parameter that every other step leaves out."""

    def __init__(self):
        super().__init__()
        self.layer = smp.nn.DistributedTransformerLayer(
            4, 2, WIDTH, 16, 0.0, 0.0, pre_layernorm=True, post_layernorm=False
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.ones(WIDTH))
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x, with_extra):
        self.calls += 1
        hidden = self.head(self.norm(self.layer((x, None))[0]))
        return {"hidden": hidden * self.extra if with_extra else hidden, "norm": hidden.norm()}


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(SAMPLES, 3, WIDTH, generator=generator) for _ in range(STEPS)]


def train(rank, folder, tp, options):
    smp.init({"tensor_parallel_degree": tp, "pipeline_parallel_degree": 1, "ddp": True})
    torch.manual_seed(1)
    model = smp.DistributedModel(Model(), **options)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step, batch in enumerate(batches()):
        own = batch.chunk(smp.dp_size())[smp.dp_rank()]
        with torch.no_grad():
            model(own, True)
        model(own, True)  # nobody differentiates it
        optimizer.zero_grad()
        loss = (model(own, step % 2 == 0)["hidden"] - own.roll(1, -1)).square().mean()
        if step % 3 == 0:
            loss.backward()
        elif step % 3 == 1:
            model.backward(loss)
        else:
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
        optimizer.step()
        losses.append(torch.stack(smp.allgather(loss.detach(), smp.WORLD)).mean().item())
    assert all(p.grad is not None for name, p in model.named_parameters() if name != "extra")
    torch.save(losses, folder / f"losses{rank}.pt")
    smp.shutdown()


CASES = [
    (2, 2, {}),
    (1, 2, {}),
    pytest.param(2, 4, {}, marks=pytest.mark.slow),
    pytest.param(1, 2, {"overlapping_allreduce": False}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("tp", "world", "options"), CASES)
def test_plain_calls_train_as_one_process(tmp_path, tp, world, options):
    def losses_of(name, world, *args):
        folder = tmp_path / name
        folder.mkdir()
        run_workers(train, world, folder, *args)
        return torch.load(folder / "losses0.pt")

    alone = losses_of("alone", 1, 1, {})
    together = losses_of("together", world, tp, options)
    assert together[-1] < together[0]
    assert together == pytest.approx(alone, rel=1e-5)


class Outputs(dict):
    """What the model returns: a class of the script's own."""


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x):
        hidden = self.layer(x)
        return Outputs(hidden=hidden) if self.kind == "a dict of its own" else types.SimpleNamespace(hidden=hidden)


def train_what_returns(rank, folder, kind):
    smp.init({"pipeline_parallel_degree": 1, "ddp": True})
    torch.manual_seed(1)
    model = smp.DistributedModel(Returns(kind))
    output = model(batches()[0].chunk(smp.dp_size())[smp.dp_rank()])
    (output["hidden"] if isinstance(output, Outputs) else output.hidden).square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    smp.shutdown()
    return gradients


@pytest.mark.parametrize("kind", ["a dict of its own", "an object"])
def test_replicas_are_averaged_whatever_holds_the_output(tmp_path, kind):
    torch.manual_seed(1)
    model = Returns(kind)
    model.layer(batches()[0]).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for found in run_workers(train_what_returns, 2, tmp_path, kind):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def give_different_batches(rank, folder):
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "ddp": True, "prescaled_batch": True})
    model = smp.DistributedModel(Model())
    with pytest.raises(SmpcError, match="different values of argument 0; shard the data by"):
        model(batches()[rank], True)
    smp.shutdown()


def test_different_batches_with_prescaled_batch_are_refused(tmp_path):
    assert run_workers(give_different_batches, 2, tmp_path) == [None] * 2
