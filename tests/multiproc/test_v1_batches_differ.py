"""Sharded parameters of which replicas use different ones in a step: a head for each task, a layer that some batches skip."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.distributed.tensor import DTensor
from v1_harness import FOR_A_MICROBATCH, FOR_THE_STEP, WHILE_RUNNING, Block

import smpc.v1 as smp
from smpc.errors import PeerError, StepError

STEPS, MB, REPLICAS = 4, 2, 2


class More(Block):
    """Whether its last layer is used depends on the batch."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(6, 6)

    def forward(self, x, uses_more):
        x = super().forward(x)
        return x + self.more(x) if uses_more else x


class Tasks(nn.Module):
    """A head of one size for each of three tasks; the third one never comes. `swaps`: so do blocks."""

    def __init__(self, swaps):
        super().__init__()
        self.embed, self.swaps = nn.Embedding(9, 6), swaps
        self.blocks = nn.ModuleList([More() for _ in range(3)])
        self.heads = nn.ModuleDict({str(task): nn.Linear(6, 9) for task in range(3)})

    def forward(self, ids):
        task = int(ids[0, 0]) % 2
        x = self.blocks[0](self.embed(ids), uses_more=task == 1)
        x = self.blocks[1 + (task if self.swaps else 0)](x, uses_more=task == 0)
        return nn.functional.cross_entropy(self.heads[str(task)](x).flatten(0, 1), ids.flatten())


@smp.step
def train_step(model, ids):
    loss = model(ids)
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, ids):
    return model(ids)


def make(swaps):
    torch.manual_seed(3)
    return Tasks(swaps).double()


def batch(step, part):
    """In the first step each replica has a task of its own, and in the last one all have the same."""
    ids = torch.randint(9, (2 * MB, 8), generator=torch.Generator().manual_seed(10 * step + part))
    tasks = torch.tensor([[part, part], [part, 1 - part], [0, part], [1, 1]])[step]
    ids[::2, 0] = tasks + 2
    return ids


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, eps=1.0)  # whose decay tells a gradient of zero from none


def expected(swaps):
    """Losses, parameters after each step, and who has a gradient, of one process over all samples; it clears every other step."""
    model = make(swaps)
    optimizer, losses, states, reached = optimizer_of(model.parameters()), [], [], []
    for step in range(STEPS):
        if step % 2 == 0:
            optimizer.zero_grad()
        found = [model(ids) for part in range(REPLICAS) for ids in batch(step, part).chunk(MB)]
        (sum(found) / len(found)).backward()
        optimizer.step()
        losses.append((sum(found) / len(found)).item())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        reached.append({name for name, p in model.named_parameters() if p.grad is not None})
    return losses, states, reached


def begin(config, swaps):
    smp.init({"microbatches": MB, "ddp": True, **config})
    model = smp.DistributedModel(make(swaps))
    return model, smp.DistributedOptimizer(optimizer_of(model.parameters()))


def trained(rank, folder, cases):
    found = []
    for config, swaps in cases:
        model, optimizer = begin(config, swaps)
        losses, states, reached = [], [], []
        for step in range(STEPS):
            if step % 2 == 0:
                optimizer.zero_grad()
            loss = train_step(model, batch(step, smp.data_rank())).reduce_mean()
            optimizer.step()
            losses.append(torch.stack(smp.allgather(loss.detach(), smp.WORLD)).mean().item())
            states.append(model.state_dict())
            reached.append({name for name, p in model.named_parameters() if p.grad is not None})
            assert all(isinstance(p, DTensor) for p in model.local_parameters())
        if not swaps:
            evaluate(model, batch(0, smp.data_rank()))
        found.append((swaps, losses, states, reached))
        smp.shutdown()
    return found


@pytest.mark.long
def test_replicas_may_use_different_parameters(tmp_path):
    """Heads of one size got each other's gradients, without a word; of other sizes, or different blocks, ranks hung or were aborted."""
    cases = [(FOR_THE_STEP, False), (FOR_THE_STEP, True), (FOR_A_MICROBATCH, False), (WHILE_RUNNING, False)]
    for results in run_workers(trained, REPLICAS, tmp_path, cases):
        for swaps, *numbers, reached in results:
            *reference, with_gradients = expected(swaps)
            torch.testing.assert_close(numbers, reference, rtol=1e-10, atol=1e-11)
            assert reached == with_gradients


def refused(rank, folder, config, trains):
    model, _ = begin(config, swaps=True)
    if not trains:
        train_step(model, batch(3, smp.data_rank()))
    with pytest.raises((StepError, PeerError)) as error, torch.set_grad_enabled(trains):
        (train_step if trains else evaluate)(model, batch(0, smp.data_rank()))
    return str(error.value)


@pytest.mark.parametrize("config", [FOR_A_MICROBATCH, WHILE_RUNNING])
def test_replicas_that_call_different_blocks_are_told(tmp_path, config):
    """One block's parameters were gathered in the place of another's, without a word."""
    for text in run_workers(refused, REPLICAS, tmp_path, config, True):
        assert "rank 0: blocks.1, rank 1: blocks.2" in text


def test_evaluations_that_call_different_blocks_are_told(tmp_path):
    for text in run_workers(refused, REPLICAS, tmp_path, FOR_THE_STEP, False):
        assert "rank 0: blocks.1, rank 1: blocks.2" in text


def refused_outside_of_steps(rank, folder):
    model, _ = begin(FOR_THE_STEP, swaps=True)
    train_step(model, batch(3, smp.data_rank()))
    with pytest.raises((StepError, PeerError)) as error:
        model(batch(0, smp.data_rank())).backward()
    return str(error.value)


def test_calls_outside_of_steps_with_different_blocks_are_told(tmp_path):
    """The backward gathers each block anew, and had taken one block's parameters for another's."""
    for text in run_workers(refused_outside_of_steps, REPLICAS, tmp_path):
        assert "rank 0: blocks.1, rank 1: blocks.2" in text


class Sliced(nn.Module):
    """Heads by task, of which tensor-parallel ranks have slices."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)])
        self.heads = nn.ModuleDict({str(task): nn.Linear(8, 8) for task in range(2)})

    def forward(self, x, task):
        for block in self.blocks:
            x = x + block(x)
        return self.heads[str(int(task[0]))](x).pow(2).mean()


@smp.step
def train_sliced(model, x, task):
    loss = model(x, task)
    model.backward(loss)
    return loss


def rows(rank):
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(rank)).double()


def trained_in_slices(rank, folder, tasks, config):
    smp.init({"microbatches": 1, "ddp": True, "tensor_parallel_degree": 2, **config})
    torch.manual_seed(3)
    with smp.tensor_parallelism():
        model = Sliced()
    model = smp.DistributedModel(model.double())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        train_sliced(model, rows(rank), torch.tensor([tasks[rank]] * 2))
    except (StepError, PeerError) as error:
        return str(error)
    optimizer.step()
    return model.state_dict()


def test_ranks_with_slices_of_one_model_call_the_same_layers(tmp_path):
    """A head acted on the batches of both ranks by slices of two heads, without a word."""
    for text in run_workers(trained_in_slices, 2, tmp_path, (0, 1), {}):
        assert "rank 0: heads.0, rank 1: heads.1" in text


@pytest.mark.parametrize("config", [FOR_THE_STEP, WHILE_RUNNING])
def test_replicas_of_slices_may_use_different_heads(tmp_path, config):
    tasks = (0, 0, 1, 1)
    torch.manual_seed(3)
    model = Sliced().double()
    for rank, task in enumerate(tasks):
        (model(rows(rank), torch.tensor([task])) / len(tasks)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for state in run_workers(trained_in_slices, 4, tmp_path, tasks, config):
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-10, atol=1e-11)
