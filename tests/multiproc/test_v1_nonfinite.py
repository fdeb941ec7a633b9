"""A loss that is NaN or infinite: all ranks skip the step or stop together, whichever rank computes it."""

import warnings

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import NonFiniteLossError

MB = 4


@smp.step
def train_step(model, x, factors):
    loss = model(x).square().mean() * factors.sum()
    model.backward(loss)
    return loss


@smp.step
def logits_step(model, x):
    """Backward from outputs, not from a loss: what they are is the user's business."""
    out = model(x)
    masked = out.masked_fill(out < 0, float("-inf"))
    model.backward([masked], [torch.zeros_like(out)])
    return masked


def run(rank, folder, world, degree, policy, value, culprit):
    """Steps with finite losses before and after one in which the last microbatch but one of replica `culprit` has this loss."""
    smp.init({"pipeline_parallel_degree": degree, "microbatches": MB, "ddp": world > degree, "nan_policy": policy})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    found, states = [], []
    for step in range(3):
        factors = torch.ones(MB)
        if step == 1 and smp.rdp_rank() == culprit:
            factors[2] = value
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                train_step(model, torch.ones(MB, 4), factors)
                found.append("")
            except NonFiniteLossError as error:
                found.append(str(error))
        found[-1] += "".join(str(w.message) for w in caught)
        optimizer.step()
        states.append({name: p.detach().clone() for name, p in model.local_named_parameters()})
    logits_step(model, torch.ones(MB, 4))
    return found, states


def same(before, after):
    return all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("world", "degree", "policy", "value", "culprit"),
    [
        (2, 2, "raise", float("nan"), 0),
        (2, 2, "ignore", float("nan"), 0),
        (4, 2, "skip", float("inf"), 1),
        pytest.param(2, 1, "raise", float("-inf"), 1, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_do_the_same(tmp_path, world, degree, policy, value, culprit):
    results = run_workers(run, world, tmp_path, world, degree, policy, value, culprit)
    for rank, (found, states) in enumerate(results):
        assert (found[0], found[2]) == ("", "") or policy == "ignore"
        says = policy == "raise" or (policy == "skip" and rank == 0)
        where = "microbatch 2" + (f" of replica {culprit}" if world > degree else "")
        assert (f"expected a finite loss, found {value} in {where}" in found[1]) == says, found[1]
        assert same(states[0], states[1]) == (policy != "ignore")
        if policy == "ignore":
            assert all(value.isnan().all() for value in states[1].values())
        else:
            assert not same(states[1], states[2]), "training goes on"
            assert all(value.isfinite().all() for value in states[2].values())
