"""`shard_optimizer_state` with parameters cut over replicas: every optimizer that may, state from and to other jobs, odd parameters."""

import math

import pytest
import torch
from executor_harness import run_workers
from precision_jobs import Job, batch, differences, gain_at, optimizer_of, whole
from torch import nn

import smpc.v1 as smp
from smpc.v1.optimization.update_targets import ELEMENTWISE

OPTIONS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


class Lopsided(nn.Module):
    """Two layers are nearly all of it, and half of it ends in the first of them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        with smp.tensor_parallelism(smp.tp_size() > 1):
            self.up, self.down = nn.Linear(16, 150), nn.Linear(150, 16)

    def forward(self, x, gain):
        return self.down(torch.tanh(self.up(self.first(x)))) * gain


def make(kind=Lopsided):
    torch.manual_seed(3)
    return kind()


def ranges(job):
    return job.optimizer.local_state_dict(gather_if_shard=False)["_smp_ranges"]


def train(topology, config, optimizer=optimizer_of, steps=3):
    job = Job(topology, config, optimizer, module=make)
    for step in range(steps):
        job.step(step, max_norm=0.5)
    return job


def every_optimizer(rank, folder):
    """Sharded and not: what differs."""
    wrong = []
    for kind in ELEMENTWISE:

        def optimizer(parameters, kind=kind):
            return kind(parameters, lr=0.01, **OPTIONS.get(kind.__name__, {}))

        expected = whole(train((1, 1, 2), {}, optimizer))
        smp.shutdown()
        job = train((1, 1, 2), {"shard_optimizer_state": True}, optimizer)
        assert ranges(job)
        found = whole(job)
        smp.shutdown()
        wrong += [(kind.__name__, keys) for a, b in zip(found, expected, strict=True) if (keys := differences(a, b))]
    job = train((1, 1, 2), {"shard_optimizer_state": True}, lambda p: smp.optimizers.FusedLamb(p, lr=0.01), 1)
    assert not ranges(job)  # it takes norms of parameters
    smp.shutdown()
    return wrong


@pytest.mark.long
def test_every_elementwise_optimizer_computes_the_same_bits(tmp_path):
    assert run_workers(every_optimizer, 2, tmp_path) == [[], []]


def save(rank, folder, topology, config):
    job = train(topology, {**config, "shard_optimizer_state": True})
    assert any(smp.allgather(len(ranges(job)), smp.WORLD))
    torch.save(job.optimizer.local_state_dict(gather_if_shard=False), folder / f"part{rank}.pt")
    whole_states = job.model.state_dict(), job.optimizer.state_dict()
    if rank == 0:
        torch.save(whole_states, folder / "full.pt")
    smp.save_checkpoint(str(folder / "run"), "a", model=job.model, optimizer=job.optimizer)
    smp.shutdown()


def load(rank, folder, topology, config, source):
    """The state of four replicas in another job: whole, from a checkpoint, and from their parts if it shards as well."""
    wrong = []
    model, state = torch.load(source / "full.pt", weights_only=True)
    expected = {f"{n}::{k}": torch.as_tensor(v) for n, items in state["state"].items() for k, v in items.items()}
    for way in ("full", "checkpoint", "parts")[
        : 3 if math.prod(topology) == 4 and config["shard_optimizer_state"] else 2
    ]:
        job = Job(topology, config, module=make)
        job.step(5)  # what is loaded must replace something
        if way == "checkpoint":
            smp.resume_from_checkpoint(str(source / "run"), tag="a")
        else:
            job.model.load_state_dict(model)
            part = torch.load(source / f"part{rank}.pt", weights_only=True) if way == "parts" else state
            job.optimizer.load_state_dict(part)
        found = whole(job)
        wrong += [(way, key) for key in (*differences(found[0], model), *differences(found[1], expected))]
        smp.shutdown()
    return wrong


REPLICAS = ((1, 1, 4), [((1, 1, 1), False), ((1, 1, 2), True), ((2, 1, 2), True), ((1, 1, 4), False)])
SLICES = ((1, 2, 2), [((2, 1, 1), False), ((1, 2, 2), True)])


@pytest.mark.parametrize(
    ("origin", "targets", "config"),
    [
        pytest.param(*REPLICAS, {}, marks=pytest.mark.slow),
        pytest.param(*REPLICAS, {"bf16": True}, marks=pytest.mark.slow),
        pytest.param(*SLICES, {"bf16": True}, marks=pytest.mark.slow),
        pytest.param(*SLICES, {}, marks=pytest.mark.slow),
        ((1, 2, 2), [((1, 1, 2), True)], {}),
    ],
)
def test_state_in_parts_loads_into_other_jobs(tmp_path, origin, targets, config):
    run_workers(save, 4, tmp_path, origin, config)
    for number, (topology, shard) in enumerate(targets):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = {**config, "shard_optimizer_state": shard}
        count = math.prod(topology)
        assert run_workers(load, count, folder, topology, settings, tmp_path) == [[]] * count


class Odd(nn.Module):
    """A tied weight, a layer frozen later, one that is never used, one element, and memory in another order."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 144), nn.Linear(16, 144)
        self.outer.weight = self.inner.weight
        self.frozen, self.unused = nn.Linear(144, 16), nn.Linear(100, 17)
        self.turned = nn.Parameter(torch.randn(80, 16).t())
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x, gain):
        hidden = torch.relu(self.inner(x)) + self.outer(x)
        return (self.frozen(hidden) @ self.turned @ self.turned.t()) * (gain * self.gain)


@smp.step
def scaled_step(model, scaler, x, gain, targets):
    loss = nn.functional.cross_entropy(model(x, gain), targets)
    model.backward(scaler.scale(loss))
    return loss


def odd(rank, folder):
    """In the third step a layer is frozen; weights get other memory, and a scaler and a scheduler are used."""
    found = []
    for shard in (False, True):
        config = {"shard_optimizer_state": shard}
        job = Job((1, 1, 2), config, lambda p: torch.optim.Adagrad(p, lr=0.1), module=lambda: make(Odd))
        scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer.optimizer, 1, 0.5)
        scaler = smp.amp.GradScaler(init_scale=8.0)
        for step in range(6):
            job.optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step == 2:
                job.model.module.frozen.requires_grad_(False)
            if step == 3:
                for parameter in job.model.parameters():
                    parameter.data = parameter.data.clone()
            if step == 4:
                with torch.no_grad():
                    job.model.module.inner.weight.mul_(0.5)
            x, targets = batch(step, rank)
            scaled_step(job.model, scaler, x, gain_at(step), targets)
            scaler.unscale_(job.optimizer)
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
            scaler.step(job.optimizer)
            scaler.update()
            scheduler.step()
        assert not shard or any(smp.allgather(len(ranges(job)), smp.WORLD))
        found.append(whole(job))
        smp.shutdown()
    return [differences(a, b) for a, b in zip(*found, strict=True)]


def test_odd_parameters(tmp_path):
    assert run_workers(odd, 2, tmp_path) == [[[], []]] * 2
