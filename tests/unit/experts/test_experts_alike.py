"""Experts that are not alike, or keep something of their rows, stay whole beside others that are divided: numbers of one process.

All of these were divided, and trained to other numbers without a word.
"""

import copy

import pytest
import torch
from expert_models import HandWritten, LoopBlock, one_process, tokens
from tensor_ranks import run_ranks, tensor_groups
from torch import nn
from torch.nn import functional as F

from smpc.errors import ConfigError
from smpc.expert_parallel import shard


class Loop(nn.Module):
    """All experts in one module, in a loop that skips those without tokens."""

    def __init__(self, num_experts):
        super().__init__()
        self.num = num_experts
        self.up, self.down = (nn.Parameter(torch.randn(num_experts, 16, 16) * 0.3) for _ in range(2))
        self.register_buffer("scale", torch.ones(num_experts))

    def one(self, expert, x):
        return F.gelu(x @ self.up[expert]) @ self.down[expert]

    def forward(self, tokens, chosen, gates):
        found = torch.zeros_like(tokens)
        for expert in range(self.num):
            row, slot = torch.where(chosen == expert)
            if len(row):
                found = found.index_add(0, row, self.one(expert, tokens[row]) * gates[row, slot, None])
        return found


class EveryOther(Loop):
    def one(self, expert, x):
        inner = x @ self.up[expert]
        return (F.gelu(inner) if expert % 2 else inner.relu().square()) @ self.down[expert]


class LastIsNone(Loop):
    def one(self, expert, x):
        return x if expert == self.num - 1 else super().one(expert, x)


class FromFive(Loop):
    def one(self, expert, x):
        return super().one(expert, x) * (2 if expert > 4 else 1)


class ScaleOfEach(Loop):
    """Its buffer has a value for each expert, alike at first."""

    def one(self, expert, x):
        return super().one(expert, x) * self.scale[expert]


class WithCopies(Loop):
    """Numbers beyond the experts return their tokens."""

    def forward(self, tokens, chosen, gates):
        return super().forward(tokens, chosen, gates) + tokens * (gates * (chosen >= self.num)).sum(-1, keepdim=True)


class Noting(Loop):
    """The load of the last call, which its block makes a loss of."""

    def forward(self, tokens, chosen, gates):
        self.load = [(chosen == expert).sum().item() for expert in range(self.num)]
        return super().forward(tokens, chosen, gates)


class Block(nn.Module):
    more = 0

    def __init__(self, kind=Loop, num_experts=4):
        super().__init__()
        self.router, self.inner = nn.Linear(16, num_experts + self.more), kind(num_experts)

    def forward(self, x):
        flat = x.reshape(-1, 16)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        return self.inner(flat, chosen, weights).view_as(x) * (1 + max(getattr(self.inner, "load", [0])))


class BlockWithCopies(Block):
    more = 2


def mixed(first, second):
    """A model with two blocks."""
    torch.manual_seed(0)
    model = HandWritten(Block)
    model.blocks = nn.ModuleList([first(), second()])
    return model.double()


def check(make, match, prepared=lambda model: None):
    batches = [tokens(seed) for seed in (1, 2)]
    whole, models = make(), [make() for _ in batches]
    modules = [shard(model, group) for model, group in zip(models, tensor_groups(2), strict=True)]
    for model in (whole, *models):
        prepared(model)

    def work(rank):
        modules[rank](**batches[rank])["loss"].backward()
        modules[rank].average_gradients()
        return modules[rank].whole_gradients()

    _, gradients = one_process(whole, batches)
    for found in run_ranks(2, work):
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    assert list(modules[0].experts) == [
        name for name in ("blocks.0.inner", "blocks.1.experts") if name in modules[0].experts
    ]
    assert len(modules[0].experts) == len(modules[0].left_whole) == 1
    assert match in next(iter(modules[0].left_whole.values()))


@pytest.mark.parametrize(
    ("kind", "num_experts", "match"),
    [
        (EveryOther, 6, "returned something else for some of its experts"),
        (LastIsNone, 4, "returned something else for some of its experts"),
        (LastIsNone, 6, "returned something else for experts with the same parameters and other numbers"),
        (FromFive, 8, "returned something else for experts with the same parameters and other numbers"),
        (Noting, 4, "keeps something of the rows that it is called with, in load"),
    ],
)
def test_experts_in_one_module(kind, num_experts, match):
    check(lambda: mixed(Block, lambda: Block(kind, num_experts)), match)


def test_experts_without_parameters():
    check(
        lambda: mixed(Block, lambda: BlockWithCopies(WithCopies)), "returned tokens for expert 4, for which it has no"
    )


def test_a_value_for_each_expert_that_changes_later():
    def trained(model):
        model.blocks[1].inner.scale.copy_(torch.arange(1.0, 5.0))

    check(lambda: mixed(Block, lambda: Block(ScaleOfEach)), "returned something else for some of its experts", trained)


class Average(nn.Linear):
    """An expert with a buffer of what it has seen."""

    def __init__(self):
        super().__init__(16, 16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean(0)
        return super().forward(x)


class Counting(nn.Linear):
    """An expert with a number of its calls in a buffer."""

    def __init__(self):
        super().__init__(16, 16)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Keeping(nn.Linear):
    """An expert whose block may look at its last result."""

    def __init__(self):
        super().__init__(16, 16)

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Average, "keeps something of the rows that it is called with, in seen"),
        (Counting, "changes its buffer calls"),
        (Keeping, "keeps something of the rows that it is called with, in last"),
    ],
)
def test_experts_that_are_modules_of_their_own(kind, match):
    def block():
        found = LoopBlock()
        found.experts = nn.ModuleList(kind() for _ in range(4))
        return found

    check(lambda: mixed(Block, block), match)


def test_shared_parameters():
    """The gradient of what experts share was that of those on one rank."""

    def shares_a_parameter(first, second):
        second.inner.up = first.inner.up

    def shares_a_module(first, second):
        second.experts[1].up = first.experts[2].up

    def shares_in_a_block(first, second):
        for expert in second.experts:
            expert.down = second.experts[0].down

    def shares_an_expert(first, second):
        second.experts[1] = first.experts[1]

    for block, share in (
        (Block, shares_a_parameter), (LoopBlock, shares_a_module), (LoopBlock, shares_in_a_block), (LoopBlock, shares_an_expert),
    ):  # fmt: skip
        model = HandWritten(block)
        share(*model.blocks)
        with pytest.raises(ConfigError, match=r"blocks.1.* other modules share its parameters"):
            shard(model, tensor_groups(2)[0], experts=["blocks.1.*"])


def test_a_shared_module_with_all_experts():
    model = mixed(Block, Block)
    model.blocks[1].inner = model.blocks[0].inner
    batches = [tokens(seed) for seed in (1, 2)]
    _, gradients = one_process(copy.deepcopy(model), batches)
    modules = [shard(copy.deepcopy(model), group) for group in tensor_groups(2)]

    def work(rank):
        modules[rank](**batches[rank])["loss"].backward()
        modules[rank].average_gradients()
        return modules[rank].whole_gradients()

    for found in run_ranks(2, work):
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
