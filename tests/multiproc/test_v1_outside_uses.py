"""Sharded parameters that code uses without calling their block, and what forwards write into parameters."""

import copy

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.utils.checkpoint import checkpoint
from v1_harness import FOR_A_MICROBATCH, FOR_THE_STEP, WHILE_RUNNING, Block

import smpc.v1 as smp
from smpc.errors import ConfigUnsupportedError, PeerError, StepError

STEPS, MB, REPLICAS = 3, 2, 2


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def body(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids):
        return nn.functional.cross_entropy(self.head(self.body(self.embed(ids))).flatten(0, 1), ids.flatten())


class Borrows(Base):
    """Before the blocks run, after them, several weights together, and a penalty on all of them."""

    def forward(self, ids):
        x = self.embed(ids)
        x = nn.functional.linear(nn.functional.linear(x, self.blocks[0].up.weight), self.blocks[2].down.weight)
        x = self.body(x) * torch.stack([block.down.bias for block in self.blocks]).mean(0).exp()
        x = x @ self.blocks[1].up.weight.T[:, :6]
        penalty = sum(p.pow(2).sum() for p in self.blocks.parameters())
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()) + 1e-2 * penalty


class Writes(Base):
    """A table of bounded rows, a clamped weight, and a second body that follows the first one."""

    def __init__(self, assigns):
        super().__init__()
        self.assigns, self.table = assigns, nn.Embedding(9, 6, max_norm=0.7)
        self.second = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids) + self.table(torch.arange(9)).mean(0)
        with torch.no_grad():
            self.head.weight.clamp_(-0.2, 0.2)
            for mine, other in zip(self.second.parameters(), self.blocks.parameters(), strict=True):
                if self.assigns:
                    mine.data = mine.data * 0.9 + other.data * 0.1
                else:
                    mine.data.mul_(0.9).add_(other.data, alpha=0.1)
            y = x
            for block in self.second:
                y = block(y)
        x = self.body(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()) + (x - y).pow(2).mean()


MODELS = {"borrows": Borrows, "writes": lambda: Writes(False), "assigns": lambda: Writes(True)}


@smp.step
def train_step(model, ids):
    loss = model(ids)
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, ids):
    return model(ids)


def make(name):
    torch.manual_seed(3)
    return MODELS[name]().double()


def batch(step, part):
    return torch.randint(9, (2 * MB, 8), generator=torch.Generator().manual_seed(10 * step + part))


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, eps=1.0)


def expected(name):
    """Losses and the state of a model whose replicas are copies, which write the same."""
    model = make(name)
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = []
        for part in range(REPLICAS):
            replica = copy.deepcopy(model)
            for own, parameter in zip(replica.parameters(), model.parameters(), strict=True):
                own.grad = parameter.grad
            for ids in batch(step, part).chunk(MB):
                found.append(replica(ids))
                (found[-1] / MB / REPLICAS).backward()
            for own, parameter in zip(replica.parameters(), model.parameters(), strict=True):
                parameter.grad = own.grad
        model.load_state_dict(replica.state_dict())
        optimizer.step()
        losses.append(torch.stack(found).mean().item())
    with torch.no_grad():
        losses.append(model(batch(STEPS, 0)).item())
    return losses, model.state_dict()


def trained(rank, folder, cases):
    results = []
    for name, config in cases:
        smp.init({"microbatches": MB, "ddp": True, **config})
        model = smp.DistributedModel(make(name))
        optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = train_step(model, batch(step, smp.data_rank())).reduce_mean()
            optimizer.step()
            losses.append(torch.stack(smp.allgather(loss.detach(), smp.WORLD)).mean().item())
        with torch.no_grad():
            losses.append(model(batch(STEPS, 0)).item())
        results.append((name, losses, model.state_dict()))
        smp.shutdown()
    return results


@pytest.mark.long
@pytest.mark.parametrize("config", [FOR_THE_STEP, FOR_A_MICROBATCH, WHILE_RUNNING])
def test_training_is_that_of_one_process(tmp_path, config):
    """Uses were an error of torch's that names nothing; of what was written nothing stayed, without a word."""
    for results in run_workers(trained, REPLICAS, tmp_path, [(name, config) for name in MODELS]):
        for name, *found in results:
            torch.testing.assert_close(found, list(expected(name)), rtol=1e-10, atol=1e-11)


class WritesElsewhere(Base):
    def forward(self, ids):
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(torch.full((10, 6), 0.5))
        return super().forward(ids)


def refused(rank, folder):
    smp.init({"microbatches": MB, "ddp": True, **WHILE_RUNNING})
    model = smp.DistributedModel(WritesElsewhere())
    with pytest.raises((ConfigUnsupportedError, PeerError)) as error:
        train_step(model, batch(0, rank))
    return str(error.value)


def test_writes_of_ordinary_tensors_into_blocks_that_do_not_run_are_refused_by_name(tmp_path):
    for text in run_workers(refused, REPLICAS, tmp_path):
        assert "blocks.1.up.weight: expected its block to write into it, found mul_ outside of it" in text


class BorrowsByRank(Base):
    def forward(self, ids):
        x = nn.functional.linear(self.embed(ids), self.blocks[int(ids[0, 0])].up.weight)
        return nn.functional.cross_entropy(self.head(self.body(x[..., :6])).flatten(0, 1), ids.flatten())


def borrows_other_ones(rank, folder):
    smp.init({"microbatches": 1, "ddp": True, **WHILE_RUNNING})
    model = smp.DistributedModel(BorrowsByRank().double())
    with pytest.raises((StepError, PeerError)) as error:
        train_step(model, torch.full((2, 4), rank))
    return str(error.value)


def test_ranks_that_use_the_parameters_of_different_blocks_are_told(tmp_path):
    """One parameter had been gathered in the place of the other."""
    for text in run_workers(borrows_other_ones, REPLICAS, tmp_path):
        assert "rank 0: a use of blocks.0.up.weight, rank 1: a use of blocks.1.up.weight" in text


class Recomputes(Base):
    """Weights of blocks in what a backward computes again; the second loss is in some steps. `anew`: torch's older way."""

    def __init__(self, anew):
        super().__init__()
        self.anew = anew

    def forward(self, ids):
        x = self.embed(ids)
        x = checkpoint(lambda x: x + nn.functional.linear(x, self.blocks[1].up.weight[:6]), x, use_reentrant=self.anew)
        second = checkpoint(lambda x: (x * self.blocks[2].down.bias).tanh(), x, use_reentrant=self.anew)
        loss = nn.functional.cross_entropy(self.head(self.body(x)).flatten(0, 1), ids.flatten())
        return loss, (second - 1).pow(2).mean()


def loss_of_recomputed(model, ids, has_second):
    loss, second = model(ids)
    return loss + second if has_second else loss


@smp.step
def recompute_step(model, ids, has_second):
    loss = loss_of_recomputed(model, ids, bool(has_second[0]))
    model.backward(loss)
    return loss.detach()


def recomputed(rank, folder, anew):
    found = []
    for has_steps in (True, False):
        torch.manual_seed(3)
        smp.init({"microbatches": 1, "ddp": True, **WHILE_RUNNING})
        model = smp.DistributedModel(Recomputes(anew).double())
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        for step in range(STEPS):
            optimizer.zero_grad()
            has_second = step == 1
            if has_steps:
                recompute_step(model, recomputed_batch(step, rank), torch.tensor([has_second, has_second]))
            else:
                loss_of_recomputed(model, recomputed_batch(step, rank), has_second).backward()
            optimizer.step()
        found.append(model.state_dict())
        smp.shutdown()
    return found


def recomputed_batch(step, part):
    return torch.randint(9, (2, 8), generator=torch.Generator().manual_seed(10 * step + part))


@pytest.mark.long
@pytest.mark.parametrize("anew", [False, True])
def test_uses_that_a_backward_computes_again(tmp_path, anew):
    """They were torch's error about tensors and DTensors."""
    torch.manual_seed(3)
    model = Recomputes(anew).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(REPLICAS):
            (loss_of_recomputed(model, recomputed_batch(step, part), step == 1) / REPLICAS).backward()
        optimizer.step()
    for states in run_workers(recomputed, REPLICAS, tmp_path, anew):
        torch.testing.assert_close(states, [dict(model.state_dict())] * 2, rtol=1e-10, atol=1e-11)
