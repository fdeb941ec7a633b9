"""Products of experts on rows that are grouped by expert, inside of a block that is called whole: ranks have some of the experts each."""

import copy

import pytest
import torch
from tensor_ranks import run_ranks, tensor_groups
from torch import nn
from torch.nn import functional as F

from smpc.experts.segmented import find_segmented
from smpc.tensor_parallel import shard
from smpc.tracer.replay import replay

EXPERTS, WIDTH, INNER = 4, 12, 8


class Products(nn.Module):
    """`form`: plain; counted, by an attribute; biased; mixed, every row gets something of all others; drawn, in part dropped."""

    def __init__(self, given, returned, form):
        super().__init__()
        self.form, self.num_experts = form, EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, returned, given) * 0.3)
        if form == "biased":
            self.bias = nn.Parameter(torch.randn(EXPERTS, returned))

    def forward(self, rows, sizes):
        parts = rows.split(sizes)
        count = self.num_experts if self.form == "counted" else len(sizes)
        found = [parts[expert] @ self.weight[expert].T for expert in range(count)]
        if self.form == "biased":
            found = [part + self.bias[expert] for expert, part in enumerate(found)]
        whole = torch.cat(found)
        whole = whole + whole.mean() if self.form == "mixed" else whole
        return F.dropout(whole, 0.5, self.training) if self.form == "drawn" else whole


class Block(nn.Module):
    """The router is inside, and what it chooses are numbers of Python."""

    def __init__(self, form):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = Products(WIDTH, 2 * INNER, form), Products(INNER, WIDTH, form)

    def forward(self, hidden):
        weights, index = self.router(hidden).softmax(-1).topk(2)
        order = index.flatten().argsort(stable=True)
        sizes = index.flatten().bincount(minlength=EXPERTS).tolist()
        gate, rest = self.up(hidden[order // 2], sizes).chunk(2, -1)
        slots = self.down(F.silu(gate) * rest, sizes) * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, order // 2, slots)


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(32, WIDTH), Block(form), nn.Linear(WIDTH, 32)

    def forward(self, ids):
        hidden = self.embedding(ids).view(-1, WIDTH)
        return self.head(hidden + self.block(hidden)).square().mean()


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "ranks"), [pytest.param("plain", 4, marks=pytest.mark.slow), ("counted", 2), ("biased", 4)]
)
def test_ranks_have_some_of_the_experts(form, ranks):
    """All were on every rank. Of four ranks one has an expert without a token, and nothing else."""
    torch.manual_seed(0)
    model, ids = Model(form), torch.randint(0, 32, (2, 8))
    with torch.no_grad():
        model.block.router.bias[1] = -99.0
    loss = model(ids)
    loss.backward()
    modules = [shard(copy.deepcopy(model), {"ids": ids}, group) for group in tensor_groups(ranks)]

    def work(rank):
        own = modules[rank](ids=ids)
        own.backward()
        again = replay(modules[rank].rewritten.trace, modules[rank].model, (), {"ids": ids})
        return own.detach(), again.detach(), modules[rank].whole_gradients()

    for own, again, gradients in run_ranks(ranks, work):
        torch.testing.assert_close(own, loss.detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(again, own, rtol=0, atol=0)
        for name, parameter in model.named_parameters():
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5 * scale)
    block = modules[0].model.block
    assert len(block.up.weight) == len(block.down.weight) == EXPERTS // ranks
    assert block.up.num_experts == EXPERTS
    assert "forward" not in vars(block.up)
    assert modules[0].rewritten.sent_bytes > 0


@pytest.mark.parametrize("form", ["mixed", "drawn"])
def test_what_only_looks_so_stays_whole(form):
    """Rows of one expert that depend on those of others, and random numbers that would be others on each rank."""
    assert find_segmented(Model("plain")) == {"block.up": (), "block.down": ()}
    assert not find_segmented(Model(form))
