"""`model.join()` where ranks divide experts: replicas with different numbers of batches, against one process."""

import re

import pytest
import torch
from executor_harness import run_workers
from mixtures import MB, batch_of, made

import smpc.v1 as smp
from smpc.errors import NonFiniteLossError, SmpcError, StepError

BY_THE_REST = {"divide_by_initial_world_size": False}
SHARDED = {"fully_shard": True}
FOUND = {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True}
CASES = {
    # ranks, pipeline degree, expert degree, batches of each replica, configuration, arguments of join
    "two ranks": (2, 1, 2, (2, 4), {}, {}),
    "no data on the first replica": (2, 1, 2, (0, 3), {}, BY_THE_REST),
    "parts": (2, 1, 2, (3, 1), SHARDED, {}),
    "two groups of experts": (4, 1, 2, (1, 3, 2, 0), {}, BY_THE_REST),
    "parts of two groups": (4, 1, 2, (1, 3, 2, 0), SHARDED, BY_THE_REST),
    "a pipeline": (4, 2, 2, (3, 1), {}, BY_THE_REST),
    "a pipeline, no data on the first replica": (4, 2, 2, (0, 2), SHARDED, {}),
    "tensor parallelism": (4, 1, 2, (1, 3), FOUND, {}),
    "context parallelism": (4, 1, 2, (3, 1), {"context_parallel_degree": 2}, BY_THE_REST),
}


@smp.step
def train(model, batch, scale=1.0):
    loss = model(**batch).loss * scale
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, batch):
    return model(**batch).loss


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def update(step, parameters, optimizer):
    torch.nn.utils.clip_grad_norm_(parameters, 0.2)
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
    optimizer.step()
    optimizer.zero_grad()


def init(pp, ep, config):
    degrees = {"pipeline_parallel_degree": pp, "expert_parallel_degree": ep, "microbatches": MB, "ddp": True}
    smp.init(degrees | config)


def uneven(rank, folder, name, case):
    _, pp, ep, counts, config, arguments = CASES[case]
    init(pp, ep, config)
    model = smp.DistributedModel(made(name).double())
    optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
    for epoch in range(2):
        with model.join(**arguments):
            for step in range(counts[smp.data_rank()]):
                model.eval()
                with torch.no_grad():
                    evaluate(model, batch_of(step, smp.data_rank()))
                model.train()
                train(model, batch_of(step, smp.data_rank()), scale=1.0 + epoch)
                update(step, model.parameters(), optimizer)
    states = {name: items["exp_avg"] for name, items in optimizer.state_dict()["state"].items()}
    found = model.state_dict(), states
    smp.shutdown()
    return found


def in_one_process(name, counts, divides_by_all):
    model = made(name).double()
    optimizer = optimizer_of(model.parameters())
    for epoch in range(2):
        for step in range(max(counts)):
            parts = [part for part, count in enumerate(counts) if step < count]
            for part in parts:
                for index in range(MB):
                    batch = {key: value.chunk(MB)[index] for key, value in batch_of(step, part).items()}
                    loss = model(**batch).loss * (1.0 + epoch)
                    (loss / MB / (len(counts) if divides_by_all else len(parts))).backward()
            update(step, model.parameters(), optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    return model, {names[id(p)]: items["exp_avg"] for p, items in optimizer.state.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", ["by hand", "listed"])
@pytest.mark.parametrize("case", CASES)
def test_as_in_one_process(tmp_path, case, name):
    world, *_, counts, _, arguments = CASES[case]
    model, states = in_one_process(name, counts, not arguments)
    for parameters, found in run_workers(uneven, world, tmp_path, name, case):
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[key], parameter.detach(), rtol=1e-7, atol=1e-9, msg=key)
        torch.testing.assert_close(found, states, rtol=1e-6, atol=1e-9)


@smp.step
def told(model, batch, how):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


@torch.no_grad()
def halved(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def refused(model):
    with pytest.raises(StepError, match="cannot split its batch"):
        told(model, {key: value[:3] for key, value in batch_of(0, 1).items()}, None)


ENDS = {
    # what the script does before an update, what it gives its step function, and how that ends
    "other gradients": (
        halved,
        None,
        "StepError: join: with expert_parallel_degree above 1, .* the script has changed",
    ),
    "what cannot be copied": (None, lambda: None, "StepError: .*can be copied to their ranks.*in a call of .*told"),
    "what is copied": (None, {"any": [1, {"value"}]}, "$"),
    "a step that fails": (refused, None, "$"),
}


def train_in_join(model, count, optimizer=None, scales=(1.0, 1.0, 1.0), **arguments):
    with model.join(**arguments):
        for step, scale in enumerate(scales[:count]):
            train(model, batch_of(step, smp.data_rank()), scale=scale)
            if optimizer is not None:
                optimizer.step()
                model.zero_grad()


def ends(rank, folder, case):
    """How it ends when rank 0 is over."""
    act, how, _ = ENDS[case]
    init(1, 2, {})
    model = smp.DistributedModel(made("by hand"))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        with model.join():
            for step in range(1 + 2 * rank):
                told(model, batch_of(step, rank), how if step else None)
                if step and act is not None:
                    act(model)
                optimizer.step()
                model.zero_grad()
    except StepError as error:
        return f"{type(error).__name__}: {error}"
    with pytest.raises(StepError, match="ran out of data"):
        train_in_join(model, 1 + 2 * rank, throw_on_early_termination=True)
    return ""


@pytest.mark.parametrize("case", ENDS)
def test_what_ranks_without_data_cannot_run(tmp_path, case):
    for found in run_workers(ends, 2, tmp_path, case):
        assert re.match(ENDS[case][2], found, re.DOTALL), found


def spoilt_losses(rank, folder):
    init(1, 2, {})
    model = smp.DistributedModel(made("by hand"))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NonFiniteLossError, match="of replica 0") as caught:
        train_in_join(model, 3 - 2 * rank, optimizer, (1.0, float("nan"), 1.0))
    smp.shutdown()
    return str(caught.value)


def test_losses_that_are_not_finite(tmp_path):
    first, second = run_workers(spoilt_losses, 2, tmp_path)
    assert first == second


class Scaled(torch.autograd.Function):
    """Megatron's way of a loss beside the loss: its gradient is a constant, whatever comes back."""

    @staticmethod
    def forward(context, hidden, beside):
        return hidden.clone()

    @staticmethod
    def backward(context, grad):
        return grad, torch.full((), 0.01, dtype=grad.dtype)


class WithOwnGradients(torch.nn.Module):
    """A loss of the router's numbers, or of a parameter, without the loss."""

    def __init__(self, inner, of_router):
        super().__init__()
        self.inner, self.of_router = inner, of_router
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, **batch):
        found = self.inner(**batch)
        beside = self.inner.blocks[0].router.weight.square().sum() if self.of_router else self.scale.square().sum()
        return type(found)(loss=Scaled.apply(found.loss, beside))


def own_gradients(rank, folder, name, pp, config, of_router):
    init(pp, 2, config)
    model = smp.DistributedModel(WithOwnGradients(made(name), of_router))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        train_in_join(model, 1 + smp.data_rank(), optimizer)
    except SmpcError as error:
        return f"{type(error).__name__}: {error}"
    return "as ever"


@pytest.mark.parametrize(
    ("pp", "config", "of_router"),
    [
        (1, {}, True),
        (1, SHARDED, False),
        *(
            pytest.param(pp, config, True, marks=pytest.mark.long)
            for pp, config in [(1, SHARDED), (2, {}), (2, SHARDED)]
        ),
    ],
)
def test_gradients_that_do_not_come_from_the_loss_are_an_error(tmp_path, pp, config, of_router):
    """A replica that is over counted them once more, without a word."""
    what = "blocks.0.router.weight" if of_router else "scale"
    found = sorted(run_workers(own_gradients, 2 * pp, tmp_path, "by hand", pp, config, of_router))
    assert all(re.match("PeerError: .*expected zeros for", each, re.DOTALL) for each in found[:-1])
    assert re.match(f"UsageError: join: .*expected zeros for (inner\\.)?{what}, found others", found[-1])
