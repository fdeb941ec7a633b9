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

    def load_part(self):
        self.model.load_state_dict(self.saved[0])

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
        self.part = copy.deepcopy(self.model.local_state_dict())
        smp.save_checkpoint(str(folder), "t", model=self.model, optimizer=self.optimizer)

    def resume(self, folder):
        smp.resume_from_checkpoint(str(folder))

    def load_part(self):
        self.model.load_state_dict(self.part)

    def begin_anew(self):
        part = self.part
        smp.shutdown()
        super().begin_anew()
        self.part = part


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


def write(module):
    """As scripts do: a new head, a row of zeros, a part that builds on what was loaded."""
    nn.init.constant_(module.second.weight, 0.25)
    module.second.bias.data.copy_(torch.ones(1))
    with torch.no_grad():
        module.first.weight[2].zero_()
        module.first.bias.mul_(0.5)


def values_after_resuming(run, folder):
    run.resume(folder)
    write(run.module)


def values_after_a_part(run, folder):
    run.load_part()
    write(run.module)


def state_after_resuming(run, folder):
    run.resume(folder)
    run.model.load_state_dict({key: torch.full_like(value, 0.5) for key, value in run.saved[0].items()})


def part_after_resuming_and_a_copy(run, folder):
    """The copy that the script makes has what was resumed."""
    run.resume(folder)
    average = copy.deepcopy(run.module.state_dict())
    run.load_part()
    for key, value in run.module.state_dict().items():
        value.add_(average[key], alpha=0.25)


def _other_momentum(run):
    given = copy.deepcopy(run.saved[1])
    for items in given["state"].values():
        items["momentum_buffer"].fill_(3.0)
    return given


def optimizer_before_resuming(run, folder):
    run.optimizer.load_state_dict(_other_momentum(run))
    run.resume(folder)


def optimizer_after_resuming(run, folder):
    run.resume(folder)
    run.optimizer.load_state_dict(_other_momentum(run))


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


ORDER = [
    values_after_resuming,
    values_after_a_part,
    state_after_resuming,
    part_after_resuming_and_a_copy,
    optimizer_before_resuming,
    optimizer_after_resuming,
]


def check_cases(tmp_path, cases):
    for results in run_workers(run_cases, 2, tmp_path, cases):
        for name, ((state, options), (expected, expected_options)) in results.items():
            assert options == expected_options, name
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, msg=lambda text, at=(name, key): f"{at}: {text}")


@pytest.mark.long
def test_options_that_a_script_sets_after_loading_stay(tmp_path):
    check_cases(tmp_path, OPTIONS)


@pytest.mark.long
def test_of_what_is_loaded_and_written_the_last_counts(tmp_path):
    """The first step put what had been resumed over what the script had written since, and an optimizer's state over a later one."""
    check_cases(tmp_path, ORDER)


def masters_after_resuming(rank, folder, path):
    def begin():
        smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "bf16": True})
        torch.manual_seed(0)
        model = smp.DistributedModel(Net())
        return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    model, optimizer = begin()
    train_step(model, batch(0).bfloat16())
    optimizer.step()
    smp.save_checkpoint(path, "t", model=model, optimizer=optimizer)
    smp.shutdown()
    model, optimizer = begin()
    smp.resume_from_checkpoint(path)
    resumed = {key: value.clone() for key, value in model.state_dict().items()}
    write(model.get_module())
    expected = {key: value.clone() for key, value in model.get_module().state_dict().items()}
    optimizer.param_groups[0]["lr"] = 0.0
    train_step(model, batch(1).bfloat16())
    optimizer.step()
    found = model.state_dict()
    smp.shutdown()
    return resumed, expected, found


def test_masters_that_were_loaded_take_what_the_script_has_written_since(tmp_path):
    """They were rounded into the parameters in the first step."""
    for resumed, expected, found in run_workers(masters_after_resuming, 2, tmp_path, tmp_path / "run"):
        for key, value in expected.items():
            assert not torch.equal(resumed[key], value), key
            assert torch.equal(found[key], value), key


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
