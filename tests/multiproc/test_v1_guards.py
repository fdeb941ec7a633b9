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


class Warming(nn.Module):
    """Counts its calls in a buffer, and takes another way from the fifth on: it is called whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) if self.calls > 4 else self.linear(x).sin()


class Configured(nn.Module):
    """Python that reads buffers: a flag, numbers and sizes."""

    def __init__(self):
        super().__init__()
        self.first, self.warming, self.last = nn.Linear(6, 6), Warming(), nn.Linear(6, 6)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("scale", torch.tensor(0.75))
        self.register_buffer("sizes", torch.tensor([2, 1, 3]))

    def forward(self, x):
        x = self.warming(self.first(x))
        if self.flag:
            x = x * self.scale.item()
        small, middle, large = self.last(x).split(self.sizes.tolist(), dim=-1)
        return torch.cat([large * self.scale, small, middle], dim=-1)


@smp.step
def train_configured(model, x):
    loss = (model(x) ** 2).mean()
    model.backward(loss)
    return loss


def steps_of(model, module, run):
    """Trains for five steps; after the second another flag, after the third other buffers are loaded."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(5):
        if step == 2:
            module.flag.fill_(False)
        if step == 3:
            other = {"flag": torch.tensor(True), "scale": torch.tensor(0.5), "sizes": torch.tensor([1, 1, 4])}
            model.load_state_dict(other, strict=False)
        optimizer.zero_grad()
        losses += run(torch.arange(48.0).reshape(8, 6).sin() * (step + 1))
        optimizer.step()
    return losses


def train_with_buffers(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(0)
    module = Configured()
    model = smp.DistributedModel(module)
    losses = steps_of(model, module, lambda x: [loss.item() for loss in train_configured(model, x).outputs])
    return (
        losses,
        {name: value.clone() for name, value in model.local_named_parameters()},
        sorted(dict(model.local_named_buffers())),
    )


@pytest.mark.long
def test_python_may_read_buffers(tmp_path):
    results = run_workers(train_with_buffers, 2, tmp_path)
    torch.manual_seed(0)
    module = Configured()

    def run(x):
        found = []
        for part in x.chunk(2):
            loss = (module(part) ** 2).mean()
            (loss / 2).backward()
            found.append(loss.item())
        return found

    expected = steps_of(module, module, run)
    assert [losses for losses, *_ in results] == [expected, expected]
    parameters = results[0][1] | results[1][1]
    assert all(torch.equal(parameters[name], value) for name, value in module.named_parameters())
    for _, _, local in results:  # what is asked for is read on the first rank, and loaded there
        assert {"flag", "scale", "sizes"} <= set(local)
    assert sum("warming.calls" in local for _, _, local in results) == 1
