"""FullyShardedDataParallel in scripts of `smpc.v2`: ranks that take the same way through a model train, others are told who takes which."""

import warnings

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

import smpc.v2 as tsm
from smpc.errors import StepError

CPU = torch.device("cpu")
RANKS = 2


class Block(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.up, self.down, self.recomputes = nn.Linear(6, 10), nn.Linear(10, 6), recomputes

    def forward(self, x):
        def inside(x):
            return x + self.down(torch.tanh(self.up(x)))

        return checkpoint(inside, x, use_reentrant=False) if self.recomputes else inside(x)


class Net(nn.Module):
    """Blocks that are called by number; the mean of each result."""

    def __init__(self, recomputes=False):
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList([Block(recomputes) for _ in range(4)])

    def forward(self, x, *called):
        x = self.first(x)
        return [block(x).pow(2).mean() for i, block in enumerate(self.blocks) if i in called]


def net(recomputes=False):
    torch.manual_seed(3)
    return Net(recomputes)


def batch(step, rank):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def wrapped(model, **options):
    warnings.simplefilter("ignore")
    return FullyShardedDataParallel(model, device_id=CPU, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# rank: (blocks that are called, those of their results that are differentiated; None: no backward; whether it updates)
WAYS = {
    "another block": [((0, 1), (0, 1), True), ((0, 2), (0, 1), True)],
    "a block more": [((0, 1, 2), (0, 1, 2), True), ((0, 1), (0, 1), True)],
    "the last block left out of the loss": [((0, 1), (0, 1), True), ((0, 1), (0,), True)],
    "the first block left out of the loss": [((0, 1), (0, 1), True), ((0, 1), (1,), True)],
    "no backward": [((0, 1), (0, 1), True), ((0, 1), None, True)],
    "no update": [((0, 1), (0, 1), True), ((0, 1), (0, 1), False)],
}


def step(model, optimizer, x, called, differentiated, updates):
    results = model(x, *called)
    if differentiated is not None:
        sum(results[i] for i in differentiated).backward()
    if updates:
        optimizer.step()
        optimizer.zero_grad()


def steps(*given):
    for _ in range(2):  # what differs is found in the next forward at the latest
        step(*given)


def refused(rank, folder, options):
    tsm.init({"hybrid_shard_degree": 2})
    found = []
    for ways in WAYS.values():
        model = wrapped(net(), **options)
        optimizer = optimizer_of(model)
        step(model, optimizer, batch(0, rank), (0, 1, 2, 3), (0, 1, 2, 3), True)
        with pytest.raises(StepError) as error:
            steps(model, optimizer, batch(1, rank), *ways[rank])
        found.append(str(error.value))
    tsm.state.reset()
    return found


@pytest.mark.parametrize(
    "options", [{}, {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}]
)
def test_ranks_that_take_other_ways_are_told(tmp_path, options):
    """They hung, were aborted by gloo, or added one block's gradient to another's."""
    first, second = run_workers(refused, RANKS, tmp_path, options)
    assert first == second
    found = dict(zip(WAYS, first, strict=True))
    assert "rank 0: a gather of blocks.1, rank 1: a gather of blocks.2" in found["another block"]
    assert "rank 0: a gather of blocks.2, rank 1: the end of a forward of the model" in found["a block more"]
    assert "rank 0: an update of the model, rank 1: a gather of the model" in found["no update"], first


def loss_of(model, number, microbatch, rank):
    """In one step a block is called, and left out of the loss."""
    results = model(batch(2 * number + microbatch, rank), 0, number, 3)
    return sum(results[1:]) if number == 2 else sum(results)


def trained(rank, folder, degree, cases, uneven):
    """Gradients of some microbatches are kept; replicas do not evaluate alike where parts are gathered by other ranks."""
    tsm.init({"hybrid_shard_degree": degree})
    found = []
    for recomputes, options in cases:
        model = wrapped(net(recomputes), use_orig_params=True, **options)
        optimizer = optimizer_of(model)
        for number in range(3):
            with torch.no_grad():
                for _ in range(1 + uneven * (rank // max(degree, 1))):
                    model(batch(0, 0), 0, 1)
            with model.no_sync():
                loss_of(model, number, 0, rank).backward()
            loss_of(model, number, 1, rank).backward()
            model.clip_grad_norm_(1e6)
            optimizer.step()
            optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(model):
            found.append([p.detach().clone() for p in model.parameters()])
    tsm.state.reset()
    return found


def expected(ranks):
    model = net()
    optimizer = optimizer_of(model)
    for number in range(3):
        for rank in range(ranks):
            for microbatch in range(2):
                (loss_of(model, number, microbatch, rank) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


CASES = [
    (False, {}),
    (True, {"forward_prefetch": True}),
    (False, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
]


@pytest.mark.parametrize(("degree", "ranks"), [(2, 2), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_ranks_that_take_the_same_way_train(tmp_path, degree, ranks):
    for results in run_workers(trained, ranks, tmp_path, degree, CASES if degree > 1 else CASES[:1], ranks == 4):
        for found in results:
            torch.testing.assert_close(found, expected(ranks), rtol=1e-5, atol=1e-6)
