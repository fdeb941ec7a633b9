"""Models whose Python depends on the values of inputs, in training scripts on two gloo processes."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import StepError


class UpToLongest(nn.Module):
    """Cuts the batch at its longest length."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, lengths):
        x = x[:, : int(lengths.max())]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@smp.step
def train_step(model, x, lengths):
    loss = (model(x, lengths) ** 2).mean()
    model.backward(loss)
    return loss


def data(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return torch.randn(len(lengths), 5, 6, generator=generator), torch.tensor(lengths)


BATCHES = (data(3, 1, 2, 3), data(5, 1, 1, 5), data(3, 3, 3, 3), data(5, 2, 5, 5))


def train(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(0)
    model = smp.DistributedModel(UpToLongest())
    empty = (torch.empty(0), torch.empty(0))
    losses = []
    for batch in BATCHES:
        losses += train_step(model, *(batch if smp.pp_rank() == 0 else empty)).outputs
    uneven = data(3, 1, 2, 5)
    with pytest.raises(StepError, match=r"3 in microbatch 0, 5 in microbatch 1"):
        train_step(model, *(uneven if smp.pp_rank() == 0 else empty))
    return losses, {name: p.grad for name, p in model.local_named_parameters()}


def test_every_answer_gets_a_program_of_its_own(tmp_path):
    results = run_workers(train, 2, tmp_path)
    torch.manual_seed(0)
    model, losses = UpToLongest(), []
    for x, lengths in BATCHES:
        for part, some in zip(x.chunk(2), lengths.chunk(2), strict=True):
            loss = (model(part, some) ** 2).mean()
            (loss / 2).backward()
            losses.append(loss.detach())
    for got, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(got, losses, strict=True))
    gradients = results[0][1] | results[1][1]
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name
