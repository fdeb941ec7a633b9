"""What forward keeps in buffers and in Python, on the rank of its stage: other ranks have no old values of it to go on with."""

import copy

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import SmpcError, UsageError

STEPS = 3


class Counts(nn.Module):
    """Counts rows in a buffer, calls in Python, and keeps the last mean."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.last = nn.Linear(6, 6), 0, None
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.rows += x.shape[0]
            self.last = x.detach().mean()
        return x + torch.tanh(self.linear(x)) / self.calls


def make():
    torch.manual_seed(0)
    return nn.Sequential(Counts(), nn.Linear(6, 6), nn.BatchNorm1d(6), Counts(), nn.Linear(6, 6)).double()


def batches():
    return torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, x):
    return model(x).square().mean()


@smp.step
def reads_calls(model, x, place):
    loss = model(x).square().mean()
    return loss * model.module[place].calls


def work(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = make()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses, evaluated = [], []
    for x in batches():
        losses.append(train(model, x).reduce_mean().item())
        optimizer.step()
        optimizer.zero_grad()
        own = {name.partition(".")[0] for name, _ in model.local_named_parameters()}
        for place, counts in (("0", net[0]), ("3", net[3])):
            assert counts.calls == 2 * len(losses)
            if place in own:
                assert counts.rows.item() == 8.0 * len(losses)
                assert counts.last.dim() == 0
                continue
            with pytest.raises(UsageError, match=rf"item: buffer '{place}.rows' is on pipeline rank {1 - rank}"):
                counts.rows.item()
            with pytest.raises(
                UsageError, match=r"its values of before the last step alone; take it from model.state_dict"
            ):
                torch.ones(1).mul_(counts.rows)
            with pytest.raises(
                UsageError, match=rf"'last' of module '{place}', on pipeline rank {1 - rank}: forward sets it there"
            ):
                counts.last.item()
            assert f"{counts.last}" == f"<attribute 'last' of module '{place}', on pipeline rank {1 - rank}>"
        assert "Counts" in str(net)
        copied = copy.deepcopy(net)
        assert [name for name, _ in copied.named_buffers()] == [name for name, _ in net.named_buffers()]
        evaluated.append(evaluate(model.eval(), x).reduce_mean().item())
        model.train()
    whole = copy.deepcopy(model.state_dict())
    model.load_state_dict(whole)
    for name, buffer in net.named_buffers():
        buffer.copy_(whole[name])  # all of it anew
        assert torch.equal(buffer, whole[name])
    with pytest.raises(SmpcError, match="'calls' of module '0', on pipeline rank 0: forward sets it there"):
        reads_calls(model, batches()[0], 0)
    torch.save((losses, evaluated, whole), folder / f"found{rank}.pt")
    smp.shutdown()


@pytest.mark.long
def test_old_values_are_refused_and_the_right_ones_are_gathered(tmp_path):
    net = make()
    optimizer, losses, evaluated = torch.optim.SGD(net.parameters(), lr=0.1), [], []
    for x in batches():
        found = []
        for part in x.chunk(2):
            loss = net(part).square().mean()
            (loss / 2).backward()
            found.append(loss.item())
        losses.append(sum(found) / 2)
        optimizer.step()
        optimizer.zero_grad()
        evaluated.append(sum(net.eval()(part).square().mean().item() for part in x.chunk(2)) / 2)
        net.train()
    whole = net.state_dict()
    run_workers(work, 2, tmp_path)
    for rank in range(2):
        own, own_evaluated, gathered = torch.load(tmp_path / f"found{rank}.pt")
        assert own == pytest.approx(losses, rel=1e-12)
        assert own_evaluated == pytest.approx(evaluated, rel=1e-12)
        torch.testing.assert_close(gathered, whole, rtol=1e-12, atol=1e-12)
