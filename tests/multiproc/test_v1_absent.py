"""What a script does with parameters that are on other ranks: right, or an error or a warning that says so."""

import copy
import math
import warnings

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from v1_harness import MB, batches, feed, make_model, start, train_step

import smpc.v1 as smp
from smpc.errors import UsageError


def scripts_lines(rank, folder):
    module, model, optimizer, kwargs = start()
    parameters, ids = list(model.parameters()), batches(kwargs)
    train_step(model, feed(ids[0]), 1.0)
    local = {id(p) for p in model.local_parameters()}
    absent = [p for p in parameters if id(p) not in local]
    other, name = absent[0], next(n for n, p in model.named_parameters() if p is absent[0])
    here = torch.ones(3, requires_grad=True)
    wrong = [
        lambda: sum(p.square().sum() for p in model.parameters()),  # a weight penalty
        lambda: torch.linalg.vector_norm(torch.stack([p.detach().norm() for p in model.parameters()])),
        lambda: torch._foreach_norm(parameters),
        lambda: parameters_to_vector(model.parameters()),
        lambda: vector_to_parameters(torch.ones(10**6), absent),
        lambda: other + 1,
        lambda: here.detach().add_(other),
        lambda: other.data.mean().item(),
        lambda: nn.functional.linear(torch.ones(2, 3), other),
        lambda: module(input_ids=ids[0]),
        lambda: torch.save(module.state_dict(), folder / "state.pt"),
        lambda: torch.save(module, folder / "module.pt"),
        lambda: setattr(other, "data", torch.ones(7, 7, 7)),
    ]
    for line in wrong:
        with pytest.raises(
            UsageError, match=rf"on pipeline ranks? .*{1 - rank}.*pipeline rank {rank} has no values of it"
        ):
            line()
    with pytest.raises(UsageError, match=f"^sum: parameter '{name}' is on pipeline rank {1 - rank}"):
        other.sum()
    with pytest.warns(UserWarning, match=r"but a sum over all of them \(a norm\) is that of this rank alone") as found:
        assert [p.grad for p in absent for _ in range(2)] == [None] * 2 * len(absent)
    assert [w.filename for w in found] == [__file__], "once for each line that asks, and it is this one"
    for line in wrong[:2]:  # a closure is the script's code, too
        with pytest.raises(UsageError, match=f"pipeline rank {rank} has no values of it"):
            optimizer.step(line)
    # What each rank does to its own parameters is done to all of them.
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for parameter in model.parameters():
            parameter.mul_(0.5)
            parameter.data.add_(0.25)
            parameter.data = parameter.data.clone()
            nn.init.constant_(parameter[:0] if id(parameter) in local else parameter, 3.0)
        model.get_module().transformer.h[0].ln_1.weight[0] = 5.0
        model.get_module().transformer.h[1].ln_1.weight[0] = 5.0
        copied = copy.deepcopy(module)
        for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 0.5)
        torch._foreach_mul_(parameters, 2.0)
        assert (other.numel(), other.dim(), other.requires_grad, other.device.type) == (0, 2, True, "cpu")
        assert isinstance(other, nn.Parameter)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        model.to("cpu").float()
    state = model.state_dict()
    model.cpu()
    assert type(other) is nn.Parameter
    assert math.isfinite(other.sum())
    train_step(model, feed(ids[1]), 1.0)
    assert other.numel() == 0
    with pytest.raises(UsageError, match="is on pipeline rank"):
        other.sum()
    return state


@pytest.mark.long
def test_lines_that_use_parameters_of_other_ranks(tmp_path):
    """They counted as zero: a weight penalty, a norm, an average of weights silently covered one stage only."""
    first, second = run_workers(scripts_lines, 2, tmp_path)
    model, _, kwargs = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in batches(kwargs)[0].chunk(MB):
        (model(input_ids=ids, labels=ids).loss / MB).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.25)
        for layer in model.transformer.h[:2]:
            layer.ln_1.weight[0] = 5.0
        for parameter in model.parameters():
            parameter.mul_(2.0)
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name


@smp.step
def with_penalty(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss = loss + sum(p.square().sum() for p in model.parameters())
    model.backward(loss)
    return loss


def penalty(rank, folder):
    _, model, _, kwargs = start()
    with_penalty(model, feed(batches(kwargs)[0]))


@pytest.mark.long
def test_a_weight_penalty_in_a_step_function_ends_the_job(tmp_path):
    """It had the last stage's parameters alone, in the loss and in the gradients."""
    with pytest.raises(
        AssertionError, match=r"square: parameter '\S+' is on pipeline rank 0, and pipeline rank 1 has no values"
    ):
        run_workers(penalty, 2, tmp_path)
