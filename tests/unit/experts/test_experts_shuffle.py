"""Tokens shuffled over ranks that are threads: a permutation of all of them, and back."""

import pytest
import torch
from tensor_ranks import run_ranks, tensor_groups

from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup
from smpc.experts.shuffle import shuffle, unshuffle


@pytest.mark.parametrize("counts", [[6], [5, 5], [7, 2], [4, 0, 6]])
def test_shuffled_is_the_drawn_permutation_of_all(counts):
    groups, every = tensor_groups(len(counts)), torch.randn(sum(counts), 3)
    parts = every.split(counts)

    def work(rank):
        own = parts[rank].clone().requires_grad_()
        mixed, ticket = shuffle(own, 5, groups[rank])
        mixed.square().sum().backward()
        return mixed.detach(), unshuffle(mixed, ticket, groups[rank]).detach(), own.grad

    found = run_ranks(len(counts), work)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.cat([mixed for mixed, _, _ in found]), every[order])
    assert [len(mixed) for mixed, _, _ in found] == counts
    for part, (_, back, gradient) in zip(parts, found, strict=True):
        assert torch.equal(back, part)
        assert torch.equal(gradient, 2 * part)


def test_seeds_differ():
    tokens = torch.arange(50.0).view(50, 1)
    first, second = (shuffle(tokens, seed, TensorGroup())[0] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_another_number_of_tokens_is_refused():
    mixed, ticket = shuffle(torch.randn(4, 2), 0, TensorGroup())
    with pytest.raises(UsageError, match="expected 4 tokens, as shuffle gave, found 3"):
        unshuffle(mixed[:3], ticket, TensorGroup())
