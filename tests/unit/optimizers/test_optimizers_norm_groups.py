"""Norms over ranks count slices once, replicas once and stages once: ranks are threads with gloo groups of their own."""

import copy
import math

import optimizer_rules as rules
import pytest
import tensor_ranks
import torch
from torch import nn

from smpc.optimizers import FusedLamb, FusedNovoGrad, NormGroups, clip_grad_norm_, global_norm
from smpc.optimizers.norm_groups import sum_norms

SHAPES = ((8, 6), (5,), (7, 3), (4,))
STEPS = 4


def slices(values, rank, size):
    """Tensors 0 and 2 are split by rows, unevenly; the others are whole on every rank."""
    return [x.tensor_split(size)[rank].clone() if index % 2 == 0 else x.clone() for index, x in enumerate(values)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FusedLamb, {"weight_decay": 0.1}),
        (FusedNovoGrad, {"weight_decay": 0.1}),
        (FusedNovoGrad, {"norm_type": 0, "init_zero": True}),
    ],
    ids=str,
)
def test_slices_train_as_the_whole(kind, options, size):
    whole, _ = rules.trained(kind, torch.float64, options, STEPS, shapes=SHAPES)

    groups = tensor_ranks.tensor_groups(size)

    def work(rank):
        group = groups[rank].process_group
        params = [nn.Parameter(p) for p in slices(rules.made(shapes=SHAPES), rank, size)]
        optimizer = kind(params, **options, shard_group=lambda p: group if p.dim() == 2 else None)
        for step in range(STEPS):
            for p, g in zip(params, slices(rules.gradients(step, SHAPES), rank, size), strict=True):
                p.grad = g
            optimizer.step()
        return params

    for rank, params in enumerate(tensor_ranks.run_ranks(size, work)):
        for p, q in zip(params, slices([p.detach() for p in whole], rank, size), strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


def test_stages_share_the_norm_of_all_gradients():
    """Two stages with parameters of their own, and one that both hold, with the same gradient; the first counts it."""
    values = rules.made(shapes=SHAPES)
    whole, _ = rules.trained(FusedLamb, torch.float64, {}, STEPS, shapes=SHAPES)

    groups = tensor_ranks.tensor_groups(2)

    def work(rank):
        group = groups[rank].process_group
        places = ([0, 1], [1, 2, 3])[rank]
        params = [nn.Parameter(values[place].clone()) for place in places]
        shared = params[places.index(1)]
        optimizer = FusedLamb(params)
        optimizer.norm_groups = NormGroups(None, group, lambda p: rank == 0 or p is not shared)
        for step in range(STEPS):
            every = rules.gradients(step, SHAPES)
            for p, place in zip(params, places, strict=True):
                p.grad = every[place].clone()
            optimizer.step()
        return dict(zip(places, params, strict=True))

    for found in tensor_ranks.run_ranks(2, work):
        for place, p in found.items():
            torch.testing.assert_close(p.detach(), whole[place].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [2.0, math.inf, 3.0])
def test_clipping_over_slices(order):
    grads = rules.made(3, SHAPES)
    expected = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), order))
    groups = tensor_ranks.tensor_groups(2)

    def work(rank):
        group = groups[rank].process_group
        params = [nn.Parameter(torch.zeros_like(g)) for g in slices(grads, rank, 2)]
        for p, g in zip(params, slices(grads, rank, 2), strict=True):
            p.grad = g
        found = clip_grad_norm_(params, 1.0, order, shard_group=lambda p: group if p.dim() == 2 else None)
        # A rank without gradients takes part in the sum over the stages.
        alone = clip_grad_norm_([nn.Parameter(torch.zeros(2))] if rank else params[1:2], 9.0, order, norm_group=group)
        return found, params[1].grad, alone

    for found, clipped, alone in tensor_ranks.run_ranks(2, work):
        assert float(found) == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(clipped, grads[1] / (expected + 1e-6))
        assert float(alone) == pytest.approx(float(torch.linalg.vector_norm(clipped, order)), rel=1e-6)


def test_norms_that_are_nan_or_huge():
    groups = tensor_ranks.tensor_groups(2)

    def work(rank):
        group = groups[rank].process_group
        nan = sum_norms(torch.tensor([math.nan if rank else 1.0, 2.0 + rank]), math.inf, group)
        huge = sum_norms(torch.tensor([3e25, 0.0]), 2.0, group)
        return nan, huge

    for nan, huge in tensor_ranks.run_ranks(2, work):
        assert nan[0].isnan()
        assert float(nan[1]) == 3.0
        torch.testing.assert_close(huge, torch.tensor([3e25 * 2**0.5, 0.0]))


def test_groups_are_not_part_of_the_state():
    group = tensor_ranks.tensor_groups(2)[0].process_group
    params = [nn.Parameter(torch.zeros(2))]
    optimizer = FusedLamb(params, norm_group=group)
    assert copy.deepcopy(optimizer).norm_groups.norm_group is None
    assert "norm_group" not in optimizer.state_dict()["param_groups"][0]
    assert float(global_norm([torch.ones(4)])) == 2.0
