"""What a script loads and sets before the first step of a pipeline counts in the order of its lines, as in plain PyTorch."""

import copy

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import CheckpointError, StepError

STEPS, MICROBATCHES = 3, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return (self.second(self.first(x).tanh()) - 1).pow(2).mean()


@smp.step
def train_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


def batch(number):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


class Plain:
    """The script in one process."""

    def __init__(self):
        torch.manual_seed(0)
        self.module = self.model = Net()
        self.optimizer = self.make_optimizer()

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, number):
        self.optimizer.zero_grad()
        losses = [self.module(part) / MICROBATCHES for part in batch(number).chunk(MICROBATCHES)]
        for loss in losses:
            loss.backward()
        self.optimizer.step()

    def save(self, folder):
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def resume(self, folder):
        model, optimizer = copy.deepcopy(self.saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def begin_anew(self):
        saved = self.saved
        self.__init__()
        self.saved = saved


class Spread(Plain):
    """The same on a pipeline."""

    def __init__(self):
        smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "ddp": True})
        super().__init__()
        self.model = smp.DistributedModel(self.module)
        self.optimizer = smp.DistributedOptimizer(self.make_optimizer())

    def step(self, number):
        self.optimizer.zero_grad()
        train_step(self.model, batch(number))
        self.optimizer.step()

    def save(self, folder):
        super().save(folder)
        smp.save_checkpoint(str(folder), "t", model=self.model, optimizer=self.optimizer)

    def resume(self, folder):
        smp.resume_from_checkpoint(str(folder))

    def begin_anew(self):
        smp.shutdown()
        super().begin_anew()


def rate_after_resuming(run, folder):
    run.resume(folder)
    run.optimizer.param_groups[0]["lr"] = 0.003


def rate_after_loading(run, folder):
    run.optimizer.load_state_dict(run.saved[1])
    run.optimizer.param_groups[0].update(lr=0.003, momentum=0.5)


def scheduler_after_loading(run, folder):
    group = run.optimizer.param_groups[0]
    run.optimizer.load_state_dict(run.saved[1])
    assert run.optimizer.param_groups[0]["initial_lr"] == 0.02
    group = run.optimizer.param_groups[0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda epoch: 1 / (1 + epoch), last_epoch=1)
    yield
    scheduler.step()
    assert run.optimizer.param_groups[0] is group


def group_added_after_loading(run, folder):
    run.optimizer.load_state_dict(run.saved[1])
    run.optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)], "lr": 0.5})


def both(case, folder):
    """The parameters that the script ends with, and those of plain PyTorch."""
    found = []
    for kind in (Spread, Plain):
        run = kind()
        run.optimizer.param_groups[0]["initial_lr"] = 0.02
        run.step(0)
        run.save(folder / case.__name__)
        run.begin_anew()
        later = case(run, folder / case.__name__)
        if later is not None:
            next(later)
        for number in range(1, STEPS):
            run.step(number)
            if later is not None and number == 1:
                assert next(later, None) is None
        options = [
            {key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups
        ]
        found.append((run.model.state_dict(), options))
        if kind is Spread:
            smp.shutdown()
    return found


def run_cases(rank, folder, cases):
    return {case.__name__: both(case, folder) for case in cases}


OPTIONS = [rate_after_resuming, rate_after_loading, scheduler_after_loading, group_added_after_loading]


def check_cases(tmp_path, cases):
    for results in run_workers(run_cases, 2, tmp_path, cases):
        for name, ((state, options), (expected, expected_options)) in results.items():
            assert options == expected_options, name
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, msg=lambda text, at=(name, key): f"{at}: {text}")


def test_options_that_a_script_sets_after_loading_stay(tmp_path):
    check_cases(tmp_path, OPTIONS)


def wrong_groups(rank, folder):
    run = Spread()
    with pytest.raises(CheckpointError, match=r"expected groups of \[4\] parameters, found groups of \[\]"):
        run.optimizer.load_state_dict({"state": {}, "param_groups": []})
    run.step(0)


def test_a_state_of_another_optimizer_is_refused_where_it_is_loaded(tmp_path):
    run_workers(wrong_groups, 2, tmp_path)


@smp.step
def with_temperature(model, x, options):
    loss = model(x) / options["temperature"]
    model.backward(loss)
    return loss


def learned_argument(rank, folder):
    run = Spread()
    temperature = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(StepError, match=r"argument options\['temperature'\] requires grad"):
        with_temperature(run.model, batch(0), {"temperature": temperature})
    loss = with_temperature(run.model, batch(0), {"temperature": temperature.detach()}).reduce_mean()
    with torch.no_grad():
        expected = sum(Plain().module(part) / 2 for part in batch(0).chunk(MICROBATCHES)) / MICROBATCHES
    torch.testing.assert_close(loss, expected)


def test_an_argument_whose_gradient_would_be_lost_is_refused(tmp_path):
    run_workers(learned_argument, 2, tmp_path)


@smp.step
def with_criterion(model, x, criterion):
    loss = criterion(model(x).reshape(1, 1)).square().sum()
    model.backward(loss)
    return loss


def own_criterion(rank, folder):
    run = Spread()
    torch.manual_seed(5)
    criterion = nn.Linear(1, 1)
    with pytest.raises(
        StepError,
        match=r"expected a loss whose parameters belong to the model, found others, of shape \(1, 1\), \(1,\)",
    ):
        with_criterion(run.model, batch(0), criterion)
    frozen = copy.deepcopy(criterion).requires_grad_(False)
    loss = with_criterion(run.model, batch(0), frozen).reduce_mean()
    with torch.no_grad():
        plain = [frozen(Plain().module(part).reshape(1, 1)).square().sum() for part in batch(0).chunk(MICROBATCHES)]
    torch.testing.assert_close(loss, sum(plain) / MICROBATCHES)


def test_a_criterion_that_one_rank_alone_would_train_is_refused(tmp_path):
    run_workers(own_criterion, 2, tmp_path)
