"""Numbers of what one rank has, where scripts use them for all: thresholds of clipping, arguments of step functions, factors of a loss."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import smpc.v1 as smp
from smpc.errors import SmpcError, UsageError

X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


def make():
    torch.manual_seed(0)
    layers = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return nn.Sequential(*layers).double()


@smp.step(non_split_inputs=["factor"])
def train(model, x, factor=1.0):
    loss = factor * model(x).square().mean()
    model.backward(loss)
    return loss


def slices(rank, folder):
    smp.init({"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True, "ddp": True})
    net = make()
    model = smp.DistributedModel(net)
    train(model, X)
    parameters = list(model.parameters())
    cut = next(each for each in parameters if model.is_distributed_parameter(each))
    outside = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        norm, total = cut.norm(), sum(each.norm() for each in parameters)
    before = [each.grad.clone() for each in parameters]
    wrong = (
        lambda: clip_grad_norm_(parameters, 0.02 * norm),
        lambda: clip_grad_norm_(parameters, 0.02 * norm.item()),
        lambda: clip_grad_norm_(parameters, total),
        lambda: smp.optimizers.clip_grad_norm_(parameters, 0.02 * norm.item()),
        lambda: clip_grad_value_(parameters, 0.02 * norm.item()),
        lambda: clip_grad_value_(parameters, clip_value=0.02 * norm.item()),
        lambda: train(model, X, norm),
        lambda: train(model, X, factor=norm.item()),
        lambda: (outside.sum() * norm).backward(),
        lambda: outside.sum() + norm.detach(),
    )
    for line in wrong:
        with pytest.raises(SmpcError, match=r"of this rank's slice of '.*' alone"):
            line()
    assert all(torch.equal(each.grad, kept) for each, kept in zip(parameters, before, strict=True))
    assert outside.grad is None
    clip_grad_norm_(parameters, 0.5)
    clip_grad_value_(parameters, 0.01)
    (outside.sum() * torch.tensor(norm.item())).backward()
    smp.shutdown()


def stages(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(make())
    train(model, X)
    with torch.no_grad():
        own = sum(each.square().sum() for each in model.local_parameters()) ** 0.5
    before = [each.grad.clone() for each in model.local_parameters()]
    for clip in (clip_grad_norm_, smp.optimizers.clip_grad_norm_):
        with pytest.raises(UsageError, match="max_norm: expected the same number on all ranks, found"):
            clip(list(model.parameters()), 0.02 * float(own))
    assert all(torch.equal(each.grad, kept) for each, kept in zip(model.local_parameters(), before, strict=True))
    with pytest.raises(UsageError, match=r"clip_value: expected the same number on all ranks, found"):
        clip_grad_value_(list(model.parameters()), 0.02 * float(own), foreach=False)
    clip_grad_value_(model.local_parameters(), 0.5)
    whole = sum(value.square().sum() for value in model.state_dict().values()) ** 0.5
    clip_grad_norm_(model.parameters(), 0.02 * float(whole))
    smp.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("work", [slices, stages])
def test_numbers_of_one_rank_are_refused_wherever_one_process_has_another(tmp_path, work):
    run_workers(work, 2, tmp_path)
