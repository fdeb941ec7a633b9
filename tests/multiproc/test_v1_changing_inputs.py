"""Other lengths and batch sizes from step to step, several step functions, and fewer programs than signatures; bitwise."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from v1_harness import MB, feed, make_model, start

import smpc.v1 as smp
from smpc.errors import StepError


@smp.step
def by_sum(model, ids):
    loss = model(input_ids=ids, labels=ids).logits.square().sum()
    model.backward(loss)
    return loss


@smp.step
def by_loss(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, ids):
    return model(input_ids=ids, labels=ids).loss


# (step function, batch size, length); three programs at most, so most steps compile again what was there before
STEPS = [
    ("by_loss", 8, 12), ("evaluate", 8, 9), ("by_sum", 8, 9), ("by_loss", 4, 12), ("evaluate", 8, 12), ("by_loss", 8, 7),
    ("by_loss", 8, 9), ("evaluate", 8, 9),
]  # fmt: skip


def batch(index):
    _, size, length = STEPS[index]
    return torch.randint(3, 60, (size, length), generator=torch.Generator().manual_seed(index))


def train(rank, folder):
    _, model, optimizer, _ = start(config={"program_cache_size": 3})
    losses, addresses = [], None
    for index, (name, *_) in enumerate(STEPS):
        losses.append(globals()[name](model, feed(batch(index))).outputs)
        if name != "evaluate":
            optimizer.step()
            optimizer.zero_grad()
        found = [parameter.data_ptr() for parameter in model.local_parameters()]
        assert found == (addresses or found)  # parameters stay where they are
        addresses = found
        assert len(model._pipeline.programs.entries) <= 3
    with pytest.raises(StepError, match=r"cannot split its batch(.|\n)*7"):
        by_loss(model, torch.zeros(7, 12, dtype=torch.int64) if rank == 0 else torch.empty(0))
    last = by_loss(model, feed(batch(0)[:4]))  # smaller than the others, but it divides
    assert len(last.outputs) == MB
    return losses


@pytest.mark.long
def test_every_step_is_that_of_one_process(tmp_path):
    results = run_workers(train, 2, tmp_path)
    model, _, _ = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index, (name, *_) in enumerate(STEPS):
        expected = []
        for part in batch(index).chunk(MB):
            output = model(input_ids=part, labels=part)
            expected.append(output.logits.square().sum() if name == "by_sum" else output.loss)
            if name != "evaluate":
                (expected[-1] / MB).backward()
        if name != "evaluate":
            optimizer.step()
            optimizer.zero_grad()
        for result in results:
            assert all(torch.equal(a, b) for a, b in zip(result[index], expected, strict=True)), (index, name)


class Sometimes(nn.Module):
    """With a layer that the first step does not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.more = nn.Linear(6, 6)

    def forward(self, x, more):
        return self.layers(self.more(x) if more else x)


@smp.step(non_split_inputs=["more"])
def step_with(model, x, more):
    loss = model(x, more).square().mean()
    model.backward(loss)
    return loss


def uses_more_later(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    model = smp.DistributedModel(Sometimes())
    for more in (False, True):
        step_with(model, torch.full((4, 6), 1.0 + smp.rdp_rank()), more)
    return {name: parameter.grad for name, parameter in model.local_named_parameters()}


def test_replicas_average_what_the_first_step_did_not_use(tmp_path):
    results = run_workers(uses_more_later, 4, tmp_path)
    gradients = []
    for replica in range(2):
        model = Sometimes()
        for more in (False, True):
            for part in torch.full((4, 6), 1.0 + replica).chunk(2):
                (model(part, more).square().mean() / 2).backward()
        gradients.append({name: parameter.grad / 2 for name, parameter in model.named_parameters()})
    found = {**results[0], **results[1]}
    assert set(found) == set(gradients[0])
    for rank, result in enumerate(results):
        for name, gradient in result.items():
            torch.testing.assert_close(gradient, gradients[0][name] + gradients[1][name], msg=f"{name} on {rank}")


@smp.step
def step_by_square(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))


def skips_uneven(rank, folder, config, uneven):
    smp.init({"microbatches": 2, "ddp": True, **config})
    model = smp.DistributedModel(two_layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(4):
        optimizer.zero_grad()
        x = torch.full((4 - (number == uneven), 6), 1.0 + number + smp.data_rank())
        try:
            step_by_square(model, x)
        except StepError:
            assert number == uneven
            continue
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("config", "ranks", "uneven"),
    [
        ({}, 2, 1),
        ({"pipeline_parallel_degree": 2}, 4, 1),
        pytest.param({"pipeline_parallel_degree": 2}, 4, 0, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_degree": 2, "fully_shard": True}, 4, 0, marks=pytest.mark.slow),
        pytest.param({"context_parallel_degree": 2}, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_a_script_may_skip_a_batch_that_does_not_divide(tmp_path, config, ranks, uneven):
    """The error told the other replicas that this one had failed, so the next step of each was a PeerError."""
    plain = two_layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in (each for each in range(4) if each != uneven):
        optimizer.zero_grad()
        x = torch.cat([torch.full((4, 6), 1.0 + number + rank) for rank in range(2)])
        plain(x).square().mean().backward()
        optimizer.step()
    for found in run_workers(skips_uneven, ranks, tmp_path, config, uneven):
        for key, expected in plain.state_dict().items():
            torch.testing.assert_close(found[key], expected)


class Batch:
    """Splits itself."""

    def __init__(self, x):
        self.x = x

    def smp_slice(self, num_mb, mb, axis):
        return Batch(self.x.chunk(num_mb, axis)[mb])


@smp.step
def step_by_batch(model, batch):
    loss = (model(batch.x) - batch.x.sum(1, keepdim=True)).square().mean()
    model.backward(loss)


def trained_on_batches(rank, folder):
    smp.init({"microbatches": 2, "pipeline_parallel_degree": 2})
    model = smp.DistributedModel(two_layers())
    x = feed_of(0)
    for own in (Batch(x), Batch(2 * x)):
        step_by_batch(model, own if rank == 0 else Batch(torch.empty(0)))
    gradients = {name: p.grad for name, p in model.local_named_parameters()}
    smp.shutdown()
    return gradients


def feed_of(seed):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def test_the_last_rank_uses_rank_0s_objects_that_split_themselves(tmp_path):
    """It computed the loss with its own."""
    plain = two_layers()
    for x in (feed_of(0), 2 * feed_of(0)):
        (plain(x) - x.sum(1, keepdim=True)).square().mean().backward()
    for found in run_workers(trained_on_batches, 2, tmp_path):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
