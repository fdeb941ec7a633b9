"""Modules whose forward computes, writes or packs parameters and buffers, in parts on two replicas: training is that of one process."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.nn.utils import parametrizations
from v1_harness import FOR_A_MICROBATCH, FOR_THE_STEP, WHILE_RUNNING

import smpc.v1 as smp

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
STEPS, MB, REPLICAS = 3, 2, 2


class Around(nn.Module):
    """A residual block around a module."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.out = inner, nn.Linear(6, 6)

    def forward(self, x):
        y = self.inner(x)
        return x + torch.tanh(self.out(y[0] if isinstance(y, tuple) else y))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Codebook(nn.Module):
    """Vectors that follow what was quantized to them, by a running average."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("codes", torch.randn(5, 6))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x):
        flat = (x * self.scale).reshape(-1, 6)
        nearest = torch.cdist(flat.detach(), self.codes).argmin(1)
        chosen = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hot = nn.functional.one_hot(nearest, 5).to(flat.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_(hot.T @ flat / self.counts[:, None], alpha=0.1)
        return (flat + (chosen - flat).detach() + chosen.detach() * flat).view_as(x)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([8, 5]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


MODULES = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(6, 6)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    "batch norm": Norm,
    "codebook": Codebook,
    "gru": lambda: nn.GRU(6, 6, num_layers=2, batch_first=True),
    "packed": Packed,
}


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.blocks = nn.ModuleList([Around(MODULES[name]()) for _ in range(2)])

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def make(name):
    torch.manual_seed(3)
    return Model(name).double()


def batch(step, part):
    return torch.randint(9, (2 * MB, 8), generator=torch.Generator().manual_seed(10 * step + part))


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-2)


def expected(name):
    """Of one process; each replica begins a step with the first one's buffers."""
    model = make(name)
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        found, before = [], {n: buffer.clone() for n, buffer in model.named_buffers()}
        for part in reversed(range(REPLICAS)):
            for n, buffer in model.named_buffers():
                buffer.data = before[n].clone()
            for ids in batch(step, part).chunk(MB):
                found.append(model(ids))
                (found[-1] / (REPLICAS * MB)).backward()
        optimizer.step()
        losses.append((sum(found) / len(found)).item())
    return losses, model.state_dict()


@smp.step
def train_step(model, ids):
    loss = model(ids)
    model.backward(loss)
    return loss.detach()


def trained(rank, folder, config, names):
    found = {}
    for name in names:
        smp.init({"microbatches": MB, "ddp": True, **config})
        model = smp.DistributedModel(make(name))
        optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = train_step(model, batch(step, smp.data_rank())).reduce_mean()
            optimizer.step()
            losses.append(torch.stack(smp.allgather(loss, smp.DP_GROUP)).mean().item())
        state = model.state_dict()
        if smp.data_rank():  # buffers are each replica's own until the next step
            state = {name: state[name] for name, _ in make(name).named_parameters()}
        found[name] = losses, state
        smp.shutdown()
    return found


def check(folder, config, world, names):
    references = {name: expected(name) for name in names}
    for results in run_workers(trained, world, folder, config, names):
        for name, (losses, state) in results.items():
            expected_losses, expected_state = references[name]
            torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=1e-10, msg=name)
            for key, value in state.items():
                torch.testing.assert_close(value, expected_state[key], rtol=1e-10, atol=1e-10, msg=f"{name}: {key}")


@pytest.mark.long
@pytest.mark.parametrize("config", [FOR_THE_STEP, WHILE_RUNNING], ids=["step", "running"])
def test_training_is_that_of_one_process(tmp_path, config):
    check(tmp_path, config, REPLICAS, list(MODULES))


@pytest.mark.slow
@pytest.mark.parametrize("config", [FOR_THE_STEP, FOR_A_MICROBATCH], ids=["step", "microbatch"])
def test_training_in_a_pipeline_is_that_of_one_process(tmp_path, config):
    check(tmp_path, config | {"pipeline_parallel_degree": 2}, 2 * REPLICAS, list(MODULES))
