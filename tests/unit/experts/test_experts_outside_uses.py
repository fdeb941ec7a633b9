"""Code outside of divided experts that uses their parameters or numbers: an error that names it, or the numbers of one process."""

import copy

import pytest
import torch
from expert_models import HandWritten, LoopBlock, StackBlock, make, one_process, tokens
from tensor_ranks import run_ranks, tensor_groups
from torch import nn
from torch.nn import functional as F

from smpc.errors import UsageError
from smpc.expert_parallel import shard


class Adding(nn.Module):
    """A block of experts, and something else that is added to what it returns."""

    def __init__(self, block, more):
        super().__init__()
        self.block, self.more = block(), more

    def forward(self, x):
        found = self.block(x)
        found = found[0] if isinstance(found, tuple) else found
        return found + self.more(self.block, x)


def built(block, more):
    torch.manual_seed(0)
    return HandWritten(lambda: Adding(block, more)).double()


def on_ranks(model):
    """What ranks of two find, each with tokens of its own, and one process."""
    batches = [tokens(seed) for seed in (1, 2)]
    modules = [shard(copy.deepcopy(model), group) for group in tensor_groups(2)]

    def work(rank):
        modules[rank](**batches[rank])["loss"].backward()
        modules[rank].average_gradients()
        return modules[rank].whole_gradients()

    return run_ranks(2, work), one_process(model, batches)[1]


def check(model):
    results, gradients = on_ranks(model)
    for found in results:
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def penalty(block, x):
    return block.inner.w1.square().mean()


def shape(block, x):
    return x * block.inner.w1.shape[0]


def of_all(block, x):
    return sum(p.square().mean() for p in block.experts.parameters())


def by_hand(block, x):
    return F.linear(F.linear(x, block.experts[0].up.weight), block.experts[3].down.weight)


@pytest.mark.parametrize(
    ("block", "more", "match"),
    [
        (StackBlock, penalty, r"blocks.0.block.inner.w1: .* found square of it"),
        (StackBlock, shape, r"blocks.0.block.inner.w1: .* found shape of it"),
        (LoopBlock, of_all, r"blocks.0.block.experts.\d.gate.weight: .* found square of it"),
        (LoopBlock, by_hand, r"blocks.0.block.experts.0.up.weight: .* found linear of it"),
    ],
)
def test_uses_of_parameters_are_refused(block, more, match):
    """They were those of this rank's experts, without a word, or a torch error about tensors on the meta device."""
    with pytest.raises(UsageError, match=match):
        on_ranks(built(block, more))


def test_what_is_the_same_of_a_part_may_be_read():
    check(built(StackBlock, lambda block, x: x.to(block.inner.w1.dtype).to(block.inner.w1.device) * 0))


def test_the_number_of_experts_is_that_of_all():
    """It was that of this rank's: a loss that counts experts was half as large."""
    check(built(StackBlock, lambda block, x: x * block.inner.n / 40))


class Looking(LoopBlock):
    """Calls an expert once more, without gradients."""

    def forward(self, x):
        found, index = super().forward(x)
        with torch.no_grad():
            target = self.experts[0](x)
        return found + target, index


def test_calls_without_gradients_have_none():
    """Gradients flowed through them."""
    torch.manual_seed(0)
    check(HandWritten(Looking).double())


class Casting(LoopBlock):
    """Calls an expert once more, with autocast."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            more = self.experts[0](x)
        found, index = super().forward(x)
        return found + more, index


def test_experts_with_an_autocast_of_their_own_are_refused():
    """They ran without it."""
    torch.manual_seed(0)
    model = HandWritten(Casting)
    one_process(copy.deepcopy(model), [tokens(1)])
    with pytest.raises(UsageError, match="to be called with the autocast of their block"):
        on_ranks(model)


def test_a_copied_model_looks_at_nothing():
    module = shard(make("stack"), tensor_groups(2)[0])
    copied = copy.deepcopy(module.model)
    assert type(copied) is type(module.model)
