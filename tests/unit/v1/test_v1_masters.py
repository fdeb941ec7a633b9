"""Half precision in one process: what is cast, masters in the place of parameters, and the optimizer's other methods."""

import copy

import pytest
import torch
from torch import nn

import smpc.v1 as smp
from smpc.errors import CheckpointError, ConfigError, UsageError


@pytest.fixture(params=["fp16", "bf16"])
def half(request):
    smp.init({"pipeline_parallel_degree": 1, request.param: True})
    torch.manual_seed(0)
    yield {"fp16": torch.float16, "bf16": torch.bfloat16}[request.param]
    smp.shutdown()


@pytest.fixture
def bf16():
    smp.init({"pipeline_parallel_degree": 1, "bf16": True})
    torch.manual_seed(0)
    yield
    smp.shutdown()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.1))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("phase", torch.tensor(1j, dtype=torch.complex64))
        self.seen = []

    def forward(self, x, more=None):
        self.seen.append((x.dtype, more["wide"].dtype, more["ids"].dtype, more["name"]))
        return {"out": self.frozen(self.inner(x)) * self.scale, "ids": more["ids"]}


@smp.step
def train_step(model, x, ids, factor=1.0):
    found = model(x, more={"wide": x.double(), "ids": ids, "name": "a"})
    loss = (found["out"] ** 2).mean() * factor
    model.backward(loss)
    return found["out"], found["ids"], loss


def step(model, factor=1.0):
    return train_step(model, torch.ones(2, 4), torch.arange(2), factor)


def test_what_is_cast(half):
    net = Net()
    weight, value = net.inner.weight, net.inner.weight.detach().clone()
    model = smp.DistributedModel(net)
    assert net.inner.weight is weight
    assert torch.equal(weight, value.to(half))
    assert [net.scale.dtype, net.count.dtype, net.phase.dtype] == [half, torch.int64, torch.complex64]
    out, ids, loss = step(model)
    assert net.seen == [(half, torch.float64, torch.int64, "a")]
    assert [each.outputs[0].dtype for each in (out, ids, loss)] == [torch.float32, torch.int64, torch.float32]
    assert weight.grad.dtype is half


def test_masters_take_the_places_of_parameters(half):
    model = smp.DistributedModel(Net())
    net = model.module
    inner = torch.optim.SGD(
        [{"params": [net.inner.weight, net.frozen.weight]}, {"params": [net.inner.bias], "lr": 0.2}],
        lr=0.1,
        momentum=0.5,
    )
    net.inner.bias.grad = torch.ones_like(net.inner.bias)
    inner.step()  # before it is wrapped: its state moves
    optimizer = smp.DistributedOptimizer(inner)
    weight, frozen = optimizer.param_groups[0]["params"]
    (bias,) = inner.param_groups[1]["params"]
    assert weight.dtype is bias.dtype is torch.float32
    assert frozen is net.frozen.weight
    assert "momentum_buffer" in optimizer.state[bias]
    reference = [nn.Parameter(each.detach().clone()) for each in (weight, bias)]
    plain = torch.optim.SGD([{"params": reference[:1]}, {"params": reference[1:], "lr": 0.2}], lr=0.1, momentum=0.5)
    plain.state[reference[1]]["momentum_buffer"] = optimizer.state[bias]["momentum_buffer"].clone()
    for _ in range(3):
        optimizer.zero_grad()
        step(model)
        for master, parameter in zip(reference, (net.inner.weight, net.inner.bias), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        plain.step()
    for master, own, parameter in zip(reference, (weight, bias), (net.inner.weight, net.inner.bias), strict=True):
        assert torch.equal(own, master)
        assert torch.equal(parameter, master.to(half))
        assert own.grad is None
    assert not torch.equal(weight, net.inner.weight.float())
    optimizer.zero_grad(set_to_none=False)
    assert not net.inner.weight.grad.any()
    optimizer.zero_grad()
    assert net.inner.weight.grad is None


def test_accumulated_gradients_and_clipping_in_between(bf16):
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.module.inner.parameters(), lr=1.0))
    step(model)
    once = float(optimizer.clip_master_grads(1e9))
    step(model)
    assert float(optimizer.clip_master_grads(1e-3)) == pytest.approx(2 * once, rel=0.02)  # of both, not of the first
    assert float(optimizer.clip_master_grads(1e9)) == pytest.approx(1e-3, rel=1e-3)
    before = [master.detach().clone() for master in optimizer.param_groups[0]["params"]]
    optimizer.step()
    moved = [now - old for now, old in zip(optimizer.param_groups[0]["params"], before, strict=True)]
    assert float(torch.cat([each.detach().flatten() for each in moved]).norm()) == pytest.approx(1e-3, rel=1e-2)
    with pytest.raises(UsageError, match="expected max_norm >= 0, found -1"):
        optimizer.clip_master_grads(-1)
    step(model)
    with pytest.raises(UsageError, match="norm_type to be a positive number"):
        optimizer.clip_master_grads(1.0, norm_type=0)


def test_groups_and_parameters_that_come_later(bf16):
    model = smp.DistributedModel(Net())
    net = model.module
    optimizer = smp.DistributedOptimizer(torch.optim.SGD([net.inner.weight, net.frozen.weight], lr=0.1))
    optimizer.add_param_group({"params": [net.inner.bias]})
    assert optimizer.param_groups[1]["params"][0].dtype is torch.float32
    with pytest.raises(ConfigError, match="1 of the parameters are in another group already"):
        optimizer.add_param_group({"params": [net.inner.weight]})
    net.frozen.weight.requires_grad_(True)
    before = net.frozen.weight.detach().clone()
    step(model)
    optimizer.step()
    assert optimizer.param_groups[0]["params"][1].dtype is torch.float32
    assert not torch.equal(net.frozen.weight, before)


def test_sparse_gradients_and_closures_are_refused_and_bf16_has_no_loss_scale(bf16):
    model = smp.DistributedModel(nn.Embedding(4, 2, sparse=True))
    with pytest.warns(UserWarning, match="loss scaling has no effect: .* this model trains in bfloat16"):
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)
    assert optimizer.loss_scale == 1.0
    with pytest.raises(UsageError, match="closures are for fp32 training"):
        optimizer.step(lambda: 7)
    parameter = next(model.parameters())
    parameter.grad = torch.ones(4, 2, dtype=torch.bfloat16).to_sparse()
    with pytest.raises(UsageError, match="expected dense gradients under fp16 and bf16"):
        optimizer.step()


@pytest.mark.parametrize("kind", [smp.optimizers.FusedAdamW, smp.optimizers.FusedLamb])
@pytest.mark.parametrize("form", ["state_dict", "local_state_dict"])
def test_state_with_masters(bf16, kind, form):
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(kind(model.module.inner.parameters(), lr=0.1))
    step(model)
    optimizer.step()
    saved = copy.deepcopy(getattr(optimizer, form)())
    assert list(saved["state"]) == ["inner.weight", "inner.bias"]
    assert set(saved["state"]["inner.bias"]) == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert saved["state"]["inner.bias"]["master"].dtype is torch.float32
    assert "loss_scaler" not in saved
    optimizer.zero_grad()
    step(model)
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert torch.equal(model.module.inner.bias, saved["state"]["inner.bias"]["master"].bfloat16())
    again = getattr(optimizer, form)()
    for name, items in saved["state"].items():
        assert all(torch.equal(again["state"][name][key], value) for key, value in items.items())
    without = copy.deepcopy(saved)  # of a job in fp32: masters stay the parameters'
    for items in without["state"].values():
        del items["master"]
    optimizer.load_state_dict(without)
    assert torch.equal(optimizer.state_dict()["state"]["inner.bias"]["master"], saved["state"]["inner.bias"]["master"])


def test_a_complex_parameter_and_overflows_that_no_scale_cures():
    smp.init({"pipeline_parallel_degree": 1, "fp16": True})
    torch.manual_seed(0)
    net = Net()
    net.phase = None
    net.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD([net.turn, net.inner.weight], lr=0.5), static_loss_scale=8.0)
    for value in (8.0, torch.inf):
        net.turn.grad = torch.full((2,), complex(value, 16.0))
        net.inner.weight.grad = torch.zeros_like(net.inner.weight)
        optimizer.gradients_changed()
        if value == torch.inf:
            with pytest.warns(UserWarning, match="not finite at the loss scale 8, which is not lowered further"):
                optimizer.step()
        else:
            optimizer.step()
        assert optimizer.overflow == (value == torch.inf)
        assert torch.equal(net.turn.detach(), torch.full((2,), complex(0.5, -1.0)))
    smp.shutdown()


def test_fp16_params_and_a_state_of_the_scale():
    smp.init({"pipeline_parallel_degree": 1, "fp16": True, "fp16_params": True})
    assert smp.nn.DistributedLinear(4, 4).weight.dtype is torch.float16
    model = smp.DistributedModel(Net())
    inner = torch.optim.SGD(model.module.inner.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(inner, static_loss_scale=None, dynamic_loss_scale=True, init_scale=64.0)
    step(model, factor=1e6)
    optimizer.step()
    assert (optimizer.overflow, optimizer.loss_scale) == (True, 32.0)
    assert float(optimizer.clip_master_grads(1.0)) == -1.0
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["loss_scaler"] == {"scale": 32.0, "good_steps": 0, "hysteresis": 1}
    with pytest.raises(ConfigError, match="wraps it already"):
        smp.DistributedOptimizer(inner)
    inner = torch.optim.SGD(model.module.inner.parameters(), lr=0.1)
    fresh = smp.DistributedOptimizer(inner, static_loss_scale=None, dynamic_loss_scale=True)
    fresh.load_state_dict(saved)
    assert fresh.loss_scale == 32.0
    with pytest.raises(CheckpointError, match="loss scale: expected numbers"):
        fresh.load_state_dict({**saved, "loss_scaler": {}})
    with pytest.raises(ConfigError, match="exclude each other"):
        smp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=4.0, dynamic_loss_scale=True
        )
    smp.shutdown()


def train_and_save(config, path, tag, steps):
    """Train a net from its start or the checkpoint before; save it; parameters and masters by name."""
    smp.init({"pipeline_parallel_degree": 1, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.module.inner.parameters(), lr=0.1))
    if tag != "1":
        smp.resume_from_checkpoint(path, strict="bf16" in config)
    begun = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(steps):
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    smp.save_checkpoint(path, tag, model=model, optimizer=optimizer)
    state = optimizer.state_dict()["state"]
    found = {
        name: items.get("master", model.get_parameter("module." + name)).detach().clone()
        for name, items in state.items()
    }
    assert all(set(items) - {"master"} == {"step", "exp_avg", "exp_avg_sq"} for items in state.values())
    smp.shutdown()
    return begun, found


def test_a_job_goes_on_in_another_precision(tmp_path):
    path = str(tmp_path / "run")
    _, masters = train_and_save({"bf16": True}, path, "1", 2)
    begun, weights = train_and_save({}, path, "2", 1)
    for name, master in masters.items():
        assert torch.equal(begun[name], master)  # all bits of it
        assert not torch.equal(master, master.bfloat16().float())
    begun, _ = train_and_save({"bf16": True}, path, "3", 0)
    for name, weight in weights.items():
        assert torch.equal(begun[name], weight.bfloat16())
