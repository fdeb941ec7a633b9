"""DistributedOptimizer in one process: a transparent wrapper whose state is known by the names of parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import smpc.v1 as smp
from smpc.absent import absent_tensors as absent
from smpc.errors import CheckpointError, ConfigError, ConfigTypeError, UsageError
from smpc.optimizers.elementwise import couples_parameters
from smpc.optimizers.torch_patches import check_optimizers
from smpc.v1.optimization.update_targets import is_elementwise_in_trial


@pytest.fixture(autouse=True)
def _no_optimizer_is_left():
    """Without `smp.init` there is no `smp.shutdown` that forgets it: the next test's session found it."""
    yield
    smp.state.optimizer = None


@pytest.fixture
def model():
    smp.init({"pipeline_parallel_degree": 1})
    torch.manual_seed(0)
    yield smp.DistributedModel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    smp.shutdown()


def groups(module):
    return [
        {"params": [module[1].weight, module[0].weight], "weight_decay": 0.1},
        {"params": [module[0].bias, module[1].bias], "weight_decay": 0.0},
    ]


def spread_gradients(module):
    torch.manual_seed(5)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_it_is_the_wrapped_optimizer(model):
    inner = torch.optim.AdamW(groups(model.module), lr=0.1)
    optimizer = smp.DistributedOptimizer(inner)
    plain = copy.deepcopy(model.module)
    reference = torch.optim.AdamW(groups(plain), lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert optimizer.optimizer is inner
    seen = []
    optimizer.register_step_post_hook(lambda *args: seen.append(args))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, step_size=1, gamma=0.5) for each in (optimizer, reference)]
    for _ in range(3):
        for module in (model.module, plain):
            spread_gradients(module)
        for each in (optimizer, reference, *schedulers):
            each.step()
    assert len(seen) == 3
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, expected)
    assert inner.param_groups[0]["lr"] == 0.1 / 8
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.step(lambda: 7) == 7
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 3


def test_state_by_name(model):
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups(model.module), lr=0.1))
    spread_gradients(model.module)
    optimizer.step()
    state = optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [["1.weight", "0.weight"], ["0.bias", "1.bias"]]
    assert list(state["state"]) == ["1.weight", "0.weight", "0.bias", "1.bias"]
    assert torch.equal(state["state"]["0.bias"]["exp_avg"], optimizer.state[model.module[0].bias]["exp_avg"])
    local = optimizer.local_state_dict(gather_if_shard=False)
    assert local.pop("_smp_is_partial") is True
    assert local.keys() == state.keys()
    assert optimizer.state_dict(gather_to_rank0=True).keys() == state.keys()


@pytest.mark.parametrize("form", ["full", "partial", "torch"])
def test_loading(model, form):
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups(model.module), lr=0.1))
    spread_gradients(model.module)
    optimizer.step()
    saved = {
        "full": optimizer.state_dict,
        "partial": optimizer.local_state_dict,
        "torch": optimizer.optimizer.state_dict,
    }[form]()
    expected = {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
    }
    saved = copy.deepcopy(saved)
    fresh = smp.DistributedOptimizer(torch.optim.AdamW(groups(model.module), lr=0.7))
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["lr"] == 0.1
    for name, parameter in model.named_parameters():
        for key, value in expected[name].items():
            assert torch.equal(fresh.state[parameter][key], value)


def test_a_state_of_other_parameters(model):
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups(model.module), lr=0.1))
    state = optimizer.state_dict()
    with pytest.raises(CheckpointError, match=r"expected groups of \[2, 2\] parameters, found groups of \[4\]"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    state["param_groups"][0]["params"] = ["1.weight", "9.weight"]
    with pytest.raises(CheckpointError, match=r"'9.weight' among them"):
        optimizer.load_state_dict(state)
    with pytest.raises(CheckpointError, match="expected the keys state and param_groups"):
        optimizer.load_state_dict({})


def test_arguments(model):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="loss scaling has no effect"):
        smp.DistributedOptimizer(inner, static_loss_scale=None, dynamic_loss_scale=True, scale_window=10)
    with pytest.warns(UserWarning, match="loss scaling has no effect"):
        smp.DistributedOptimizer(inner, static_loss_scale=128.0)
    with pytest.raises(ConfigError, match="'scale_windo'; did you mean 'scale_window'"):
        smp.DistributedOptimizer(inner, scale_windo=10)
    with pytest.raises(ConfigTypeError, match=r"expected a torch.optim.Optimizer, found Linear"):
        smp.DistributedOptimizer(nn.Linear(1, 1))
    with pytest.raises(ConfigTypeError, match="found DistributedOptimizer"):
        smp.DistributedOptimizer(smp.DistributedOptimizer(inner))


def with_absent(*, scheduled=False):
    """A parameter that is here, one that is not, their optimizer, and how often Python is asked of the latter's gradient."""
    here, away = nn.Parameter(torch.ones(2)), nn.Parameter(torch.empty(0))
    texts = absent.AbsentTexts("no values of it", "look elsewhere", "ask others")
    absent.mark(away, absent.AbsentPlace("away", torch.Size([2]), (1,), 0, nn.Parameter, texts))
    inner = torch.optim.SGD([here, away], lr=0.5)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(inner, 1)
    return here, away, smp.DistributedOptimizer(inner)


class Subclass(torch.optim.SGD):
    """Does what its base does."""


class Signs(torch.optim.Optimizer):
    """Steps by the sign of a moving average."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 0.1)
                parameter.sub_(self.change(parameter, average) * group["lr"])

    def change(self, parameter, average):
        return average.sign()


class Ratios(Signs):
    """Steps of a length that each whole parameter decides, as LARS."""

    def change(self, parameter, average):
        return average * (parameter.norm() / average.norm())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Subclass, True), (Signs, True), (Ratios, False), (torch.optim.Adafactor, False), (torch.optim.LBFGS, False)],
)
def test_which_optimizers_can_do_with_slices_is_tried(kind, expected):
    parameter = nn.Parameter(torch.randn(4, 4))
    optimizer = kind([parameter])
    before, hooks = parameter.detach().clone(), []
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    assert is_elementwise_in_trial(optimizer) is expected
    assert torch.equal(parameter, before)
    assert not optimizer.state
    assert not hooks


class Lookahead(torch.optim.Optimizer):
    """Another optimizer's steps, and every second one halfway back; it shares that optimizer's groups."""

    def __init__(self, parameters):
        self.fast = torch.optim.RAdam(parameters, lr=0.1)
        self.fast.register_step_post_hook(lambda *_: self.hooked.append(1))
        super().__init__([{"params": group["params"]} for group in self.fast.param_groups], {})
        self.param_groups, self.count, self.hooked = self.fast.param_groups, 0, []

    @torch.no_grad()
    def step(self):
        self.fast.step()
        self.count += 1
        for parameter in (each for group in self.param_groups for each in group["params"]):
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            if self.count % 2 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))


class Beside(Signs):
    """Has an optimizer of other parameters, and a list of its own."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.others = [nn.Parameter(torch.ones(4))]
        self.others[0].grad = torch.ones(4)
        self.inner, self.own = torch.optim.SGD(self.others, lr=1.0), list(parameters)

    def step(self):
        super().step()
        self.inner.step()
        with torch.no_grad():
            for parameter in self.own:
                parameter.mul_(0.9)


@pytest.mark.parametrize("kind", [Lookahead, Beside])
def test_a_trial_reaches_nothing_of_an_optimizer_that_has_others(kind):
    """The optimizer inside took steps on the model's own parameters, with their gradients, in each trial."""
    parameter = nn.Parameter(torch.randn(4, 4))
    parameter.grad = torch.randn(4, 4)
    optimizer = kind([parameter])
    before = parameter.detach().clone()
    assert is_elementwise_in_trial(optimizer)
    assert torch.equal(parameter, before)
    assert not optimizer.state
    inner = optimizer.fast if kind is Lookahead else optimizer.inner
    assert not inner.state
    if kind is Beside:
        assert torch.equal(optimizer.others[0], torch.ones(4))
    else:
        assert (optimizer.count, optimizer.hooked) == (0, [])


@pytest.mark.parametrize("lr", [0.0, 1e-9, torch.tensor(0.0)])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [(torch.optim.Adafactor, False), (torch.optim.Muon, False), (torch.optim.AdamW, True), (torch.optim.SGD, True)],
)
def test_the_trial_moves_parameters_whatever_the_lr_is_now(kind, expected, lr):
    """A warmup starts at 0, where no step of any optimizer did anything to a whole or to halves."""
    optimizer = kind([nn.Parameter(torch.randn(4, 4))], lr=0.1)
    optimizer.param_groups[0]["lr"] = lr
    assert is_elementwise_in_trial(optimizer) is expected
    assert optimizer.param_groups[0]["lr"] is lr


class Together(torch.optim.SGD):
    """All gradients are divided by one number, as by a norm over all of them."""

    def divisor(self, grads):
        return torch.stack([grad.norm() for grad in grads]).norm()

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        divisor = self.divisor([p.grad for p in held])
        for parameter in held:
            parameter.grad = parameter.grad / divisor
        super().step()


class Threshold(Together):
    def divisor(self, grads):
        return super().divisor(grads).clamp(min=100.0)


class OneStepSize(Together):
    """As D-adaptation: one step size for all, which grows from next to nothing while gradients go on in one direction."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.defaults["size"] = 1e-6
        self.size, self.along, self.length, self.begun = 1e-6, 0.0, 0.0, {}

    def divisor(self, grads):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, grad in zip(held, grads, strict=True):
            start = self.begun.setdefault(parameter, parameter.clone())
            self.along += float(((start - parameter) * grad).sum())
            self.length += float(grad.abs().sum())
        self.size = max(self.size, self.along / self.length)
        return 1 / self.size


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.add_(torch.randn_like(parameter))


class InSinglePrecision(torch.optim.AdamW):
    def step(self, closure=None):
        assert all(p.dtype is torch.float32 for group in self.param_groups for p in group["params"])
        return super().step(closure)


class Inner(torch.optim.Optimizer):
    """Steps another optimizer, whose groups are its own."""

    def __init__(self, parameters, lr):
        self.inner = Together(parameters, lr)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.parametrize("lr", [0.0, 1e-3, torch.tensor(0.0)])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Together, True), (Threshold, True), (OneStepSize, True), (Inner, True), (torch.optim.LBFGS, True), (Subclass, False),
        (Ratios, False), (InSinglePrecision, False), (torch.optim.Muon, False), (Noisy, None),
    ],
)  # fmt: skip
def test_which_optimizers_look_at_other_parameters_is_tried(kind, expected, lr):
    parameters = [nn.Parameter(torch.randn(4, 4) + i) for i in range(3)]
    optimizer = kind(parameters, lr=0.1)
    optimizer.param_groups[0]["lr"] = lr
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)  # which exchanges `step`
    before, random, hooks = [p.detach().clone() for p in parameters], torch.get_rng_state(), []
    optimizer.register_step_pre_hook(lambda *_: hooks.append(1))
    assert couples_parameters(optimizer) is expected
    assert all(map(torch.equal, parameters, before))
    assert not any(p.grad is not None for p in parameters)
    assert not optimizer.state
    assert not hooks
    assert torch.equal(torch.get_rng_state(), random)
    one = kind([parameters[0]], lr=0.1)  # a rank may have made it of its only parameter
    assert couples_parameters(one) is expected


@pytest.mark.parametrize("scheduled", [False, True])
def test_torchs_optimizers_read_absent_gradients_without_python(monkeypatch, scheduled):
    here, _, optimizer = with_absent(scheduled=scheduled)
    here.grad = torch.ones(2)

    def refuse(*arguments):
        raise AssertionError("asked in Python")

    monkeypatch.setitem(absent._RULES, torch.Tensor.grad.__get__, refuse)
    undo = check_optimizers(lambda held: "", "another model has been split")
    optimizer.step()
    undo()
    assert torch.equal(here, torch.full((2,), 0.5))
    optimizer.zero_grad()
    assert here.grad is None
    here.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(here.grad, torch.zeros(2))


def test_what_a_script_does_in_an_update_finds_absent_parameters_as_ever():
    here, away, optimizer = with_absent()

    def weight_penalty(*_):
        return here.norm() + away.norm()

    with pytest.raises(UsageError, match="parameter 'away' is on pipeline rank 1"):
        optimizer.step(weight_penalty)
    hook = optimizer.register_step_pre_hook(weight_penalty)
    with pytest.raises(UsageError, match="parameter 'away' is on pipeline rank 1"):
        optimizer.step()
    hook.remove()
    hook = register_optimizer_step_post_hook(weight_penalty)
    try:
        with pytest.raises(UsageError, match="parameter 'away' is on pipeline rank 1"):
            optimizer.step()
    finally:
        hook.remove()
    optimizer.optimizer.step = weight_penalty
    with pytest.raises(UsageError, match="parameter 'away' is on pipeline rank 1"):
        optimizer.step()
