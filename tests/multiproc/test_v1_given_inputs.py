"""Step functions that give the model other inputs in their second run (`v1/steps/given_inputs.py`): refused, or one process's numbers."""

import pytest
import torch
import torch.nn.functional as F
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import StepError

MICROBATCHES, STEPS = 2, 2
PIPELINE = {"pipeline_parallel_degree": 2}
TENSOR = {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True, "ddp": True}


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


class Counted:
    """Of a rank, the calls so far: each rank of a pipeline runs the function once, and so has one process's."""

    def __init__(self, rank):
        self.calls = 0

    def __call__(self, x, output):
        if output is None:
            self.calls += 1
        return x + 0.1 * self.calls


class Following:
    """What the microbatch before has left."""

    def __init__(self, rank):
        self.mean = torch.zeros(())

    def __call__(self, x, output):
        if output is not None:
            self.mean = output.detach().mean()
        return x + self.mean


class OfRank:
    """What each rank has for itself."""

    def __init__(self, rank):
        self.own = torch.arange(6) + rank

    def __call__(self, x, output):
        return x * self.own


class Shuffled:
    """The same elements in another order on each rank."""

    def __init__(self, rank):
        self.order = torch.arange(6).roll(rank)

    def __call__(self, x, output):
        return x[:, self.order]


class Prepared:
    """Its argument alone, in values that are not equal to themselves and at random."""

    def __init__(self, rank):
        pass

    def __call__(self, x, output):
        x = F.dropout(x.masked_fill(x > 1e9, float("-inf")), 0.5)
        return torch.where(x.isinf(), torch.zeros_like(x), x)


def feed(step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def train(rank, folder, config, kind):
    """The model's gradients, or the error."""
    smp.init({"microbatches": MICROBATCHES, **config})
    model, given = smp.DistributedModel(two_layers()), kind(rank)

    @smp.step
    def step(model, x):
        output = model(given(x, None))
        given(x, output)
        loss = output.square().mean()
        model.backward(loss)

    try:
        for number in range(STEPS):
            torch.manual_seed(number)
            step(model, feed(number))
    except StepError as error:
        return str(error)
    gradients = {name: p.grad for name, p in model.local_named_parameters()}
    smp.shutdown()
    return gradients


@pytest.mark.parametrize(
    ("config", "kind", "is_refused"),
    [
        (PIPELINE, Counted, False),
        (TENSOR, Counted, True),
        (PIPELINE, Following, True),
        (TENSOR, Following, True),
        (PIPELINE, OfRank, True),
        (PIPELINE, Shuffled, True),
        (PIPELINE, Prepared, False),
    ],
)
def test_the_same_is_given_in_both_runs_or_it_is_an_error(tmp_path, config, kind, is_refused):
    found = run_workers(train, 2, tmp_path, config, kind)
    if is_refused:
        assert all("expected it to give the model the same in both of its runs" in error for error in found)
        return
    plain, given = two_layers(), kind(0)
    for number in range(STEPS):
        torch.manual_seed(number)
        for x in feed(number).chunk(MICROBATCHES):
            (plain(given(x, None)).square().mean() / MICROBATCHES).backward()
    for gradients in found:
        for name, gradient in gradients.items():
            assert torch.equal(gradient, plain.get_parameter(name).grad)
