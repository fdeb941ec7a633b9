"""Usual lines of training scripts between the steps: two ranks give one process's bits, or an error.

Every script below runs twice over the same lines, by `Eager` in plain PyTorch and by `Spread` on two pipeline ranks.
"""

import copy
import random
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from executor_harness import run_workers
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import SGD, AdamW, lr_scheduler

import smpc.v1 as smp
from smpc.errors import ConfigError, UsageError

MB, VOCABULARY, WIDTH = 2, 16, 8


class Net(nn.Module):
    def __init__(self, norm=lambda layer: layer):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    norm(nn.Linear(WIDTH, 2 * WIDTH)),
                    nn.Tanh(),
                    norm(nn.Linear(2 * WIDTH, WIDTH)),
                    nn.BatchNorm1d(WIDTH),
                )
                for _ in range(4)
            )
        )

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


def loss_of(model, ids, dtype):
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        return F.cross_entropy(model(ids).float(), ids.roll(1))


@smp.step
def train_step(model, ids, dtype):
    loss = loss_of(model, ids, dtype)
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, ids):
    return loss_of(model, ids, None)


@smp.step
def evaluate_without_grad(model, ids):
    with torch.no_grad():
        return loss_of(model, ids, None)


class Eager:
    """A script in one process."""

    def __init__(self, norm):
        self.module = self.model = Net(norm)

    def optimizer(self, optimizer):
        return optimizer

    def train(self, number, dtype=None):
        losses = []
        for ids in data(number).chunk(MB):
            loss = loss_of(self.model, ids, dtype)
            (loss / MB).backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    @torch.no_grad()
    def evaluate(self, number, inside=False):
        return torch.stack([loss_of(self.model, ids, None) for ids in data(number).chunk(MB)])


class Spread:
    """The same script on two ranks."""

    def __init__(self, norm):
        smp.init({"pipeline_parallel_degree": 2, "microbatches": MB})
        self.module = Net(norm)
        self.model = smp.DistributedModel(self.module)

    def optimizer(self, optimizer):
        return smp.DistributedOptimizer(optimizer)

    def train(self, number, dtype=None):
        return train_step(self.model, data(number), dtype).stack()

    def evaluate(self, number, inside=False):
        return (evaluate_without_grad if inside else evaluate)(self.model, data(number)).stack()


def data(number):
    return torch.randint(0, VOCABULARY, (4 * MB,), generator=torch.Generator().manual_seed(number))


def adam(job):
    return job.optimizer(AdamW(job.model.parameters(), lr=1e-2))


# -- scripts: what they return is compared, and the state dict afterwards ------------------------------------------------


def accumulates(job):
    optimizer, found = adam(job), []
    for number in range(4):
        found.append(job.train(number))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 1)
    job.model.zero_grad()
    return found


def schedules(job):
    inner = AdamW(job.model.parameters(), lr=1e-2)
    optimizer = job.optimizer(inner)
    schedulers = [
        lr_scheduler.CosineAnnealingLR(inner, 5),
        lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lr_scheduler.ReduceLROnPlateau(inner, patience=0),
    ]
    found = []
    for number in range(3):
        optimizer.zero_grad()
        found.append(job.train(number))
        optimizer.step()
        for scheduler in schedulers[:2]:
            scheduler.step()
        schedulers[2].step(found[-1].mean())
        found.append(torch.tensor(optimizer.param_groups[0]["lr"]))
    return found


def groups(job):
    named = list(job.model.named_parameters())
    job.module.head.requires_grad_(False)
    parts = [
        [p for name, p in named if name[:4] != "head" and (p.ndim > 1) == is_matrix] for is_matrix in (True, False)
    ]
    optimizer = job.optimizer(AdamW([{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1], "lr": 1e-3}]))
    found = []
    for number in range(4):
        optimizer.zero_grad()
        found.append(job.train(number))
        optimizer.step()
        if number == 1:
            job.module.head.requires_grad_(True)
            optimizer.add_param_group({"params": list(job.module.head.parameters()), "lr": 0.1})
    return found


def freezes(job):
    optimizer, found = adam(job), []
    for number in range(6):
        for name, parameter in job.model.named_parameters():
            parameter.requires_grad_(number not in (2, 3) or not name.startswith(("embed", "blocks.2")))
        optimizer.zero_grad(set_to_none=False)
        found.append(job.train(number))
        optimizer.step()
    return found


def writes(job):
    optimizer, found = adam(job), []
    for number in range(3):
        optimizer.zero_grad()
        found.append(job.train(number))
        for parameter in job.model.parameters():
            parameter.data.mul_(0.9)
            parameter.data = parameter.data.clamp(-0.5, 0.5) if parameter.numel() else parameter.data
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            for parameter in job.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            nn.init.ones_(job.module.embed.weight)
            job.module.head.weight[0] = 0.5
        optimizer.step()
    return found


def averages(job):
    optimizer, found = adam(job), []
    for number in range(3):
        optimizer.zero_grad()
        found.append(job.train(number))
        optimizer.step()
        if not number:
            average = [parameter.detach().clone() for parameter in job.model.parameters()]
        torch._foreach_lerp_(average, [parameter.detach() for parameter in job.model.parameters()], 0.5)
    for parameter, mean in zip(job.model.parameters(), average, strict=True):
        parameter.data.copy_(mean)
    return [*found, job.evaluate(9)]


def evaluates(job):
    optimizer, found = adam(job), []
    for number in range(3):
        optimizer.zero_grad()
        found.append(job.train(number, torch.bfloat16 if number == 1 else None))
        job.model.eval()
        with torch.no_grad():
            found.append(job.evaluate(7))
        found += [job.evaluate(8), job.evaluate(8, inside=True)]
        job.model.train()
        optimizer.step()
    return found


def goes_back(job):
    optimizer, found = adam(job), []
    for number in range(4):
        optimizer.zero_grad()
        found.append(job.train(number))
        optimizer.step()
        if number == 1:
            states = copy.deepcopy(dict(job.model.state_dict())), copy.deepcopy(optimizer.state_dict())
    job.model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    optimizer.zero_grad()
    found.append(job.train(5))
    optimizer.step()
    return found


def has_two_optimizers_and_hooks(job):
    first = [p for name, p in job.model.named_parameters() if name.startswith(("embed", "blocks.3"))]
    others = [p for p in job.model.parameters() if all(p is not q for q in first)]
    optimizers = [job.optimizer(AdamW(first, lr=1e-2)), job.optimizer(SGD(others, lr=0.1, momentum=0.9, nesterov=True))]
    found = []
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.append(job.train(number))
        for optimizer in optimizers:
            optimizer.step()
        if not number:
            for parameter in job.model.parameters():
                parameter.register_hook(lambda grad: grad * 0.5)
    return found


def has_a_closure(job):
    optimizer, found = job.optimizer(SGD(job.model.parameters(), lr=0.1)), []
    for number in range(2):

        def closure(number=number):
            optimizer.zero_grad()
            return job.train(number).mean()

        found.append(optimizer.step(closure))
    return found


def trains(job):
    optimizer, found = adam(job), []
    for number in range(3):
        optimizer.zero_grad()
        found.append(job.train(number))
        optimizer.step()
        job.model.eval()
        found.append(job.evaluate(9))
        job.model.train()
    return found


SCRIPTS = {
    script.__name__: (script, lambda layer: layer)
    for script in (
        accumulates,
        schedules,
        groups,
        freezes,
        writes,
        averages,
        evaluates,
        goes_back,
        has_two_optimizers_and_hooks,
        has_a_closure,
    )
} | {
    "weight norm": (trains, weight_norm),
    "spectral norm": (trains, spectral_norm),
    "old weight norm": (trains, torch.nn.utils.weight_norm),
    "old spectral norm": (trains, torch.nn.utils.spectral_norm),
}


OTHERS = ("schedules", "averages", "old weight norm", "old spectral norm")
FIRST = tuple(name for name in SCRIPTS if name not in OTHERS)


def run(kind, names):
    found = {}
    for name in names:
        script, norm = SCRIPTS[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            job = kind(norm)
            results = script(job)
        found[name] = results, dict(job.model.state_dict())
        if kind is Spread:
            smp.shutdown()
    return found


def on_two_ranks(rank, folder, names):
    return run(Spread, names)


@pytest.mark.long
@pytest.mark.parametrize("names", [FIRST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["first", "others"])
def test_scripts_give_one_processs_bits(tmp_path, names):
    expected = run(Eager, names)
    for rank, results in enumerate(run_workers(on_two_ranks, 2, tmp_path, names)):
        for name, (found, state) in results.items():
            values, module = expected[name]
            assert len(found) == len(values)
            assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True)), f"{name}, rank {rank}"
            assert all(torch.equal(state[key], value) for key, value in module.items()), f"{name}, rank {rank}"


def refused(rank, folder):
    job = Spread(lambda layer: layer)
    average = [
        parameter.detach().clone() for parameter in job.model.parameters()
    ]  # before the first step: of all ranks
    job.train(0)
    pairs = [(m, p) for m, p in zip(average, job.model.parameters(), strict=True) if not p.nbytes]
    assert pairs
    for mean, parameter in pairs:
        with torch.no_grad(), pytest.raises(UsageError, match=r"^lerp_: parameter .* is on pipeline rank"):
            mean.lerp_(parameter, 0.5)
    optimizer = job.optimizer(torch.optim.LBFGS(job.model.parameters(), max_iter=1))
    with pytest.raises(
        ConfigError, match="LBFGS, in which the gradient of one parameter changes the update of another"
    ):
        optimizer.step(lambda: job.train(1).mean())


def test_lines_that_need_all_parameters_are_refused(tmp_path):
    """L-BFGS searched along a direction of its own on every rank; an average that was begun early stood still for other stages."""
    assert run_workers(refused, 2, tmp_path) == [None] * 2


ORDERS = []


@smp.step
def mixes(model, x, y):
    order, weight = torch.randperm(len(x)), random.random() + numpy.random.rand() + random.gauss(0, 1)
    ORDERS.append((order.tolist(), weight))
    loss = (model(x + weight * x[order]) - y[order]).square().mean()
    model.backward(loss)
    return {"loss": loss, "order": order, "weight": torch.tensor([weight], dtype=torch.float64)}


def mixed_on_ranks(rank, folder, schedule):
    """Dropout on both stages, and seeds by rank, as scripts have them."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MB, "schedule": schedule})
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(7 + rank)
    model = smp.DistributedModel(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(4))))
    found = []
    for _ in range(3):
        result = mixes(model, torch.ones(8, 4), torch.ones(8, 4))
        found += zip(result["order"].concat().view(MB, -1).tolist(), result["weight"].concat().tolist(), strict=True)
    return ORDERS[: len(found)] if schedule == "1f1b" else ORDERS, found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_what_a_step_function_draws_is_the_same_before_the_model_and_after(tmp_path, schedule):
    """With zb-v the first rank has the last stage, and runs the function twice."""
    (first, found), (last, _) = run_workers(mixed_on_ranks, 2, tmp_path, schedule)
    if schedule == "zb-v":
        first = [order for at in range(0, len(first), 2 * MB) for order in first[at : at + MB]]
    else:
        assert last == found
    assert first == found
    assert len({weight for _, weight in found}) == len(found)
