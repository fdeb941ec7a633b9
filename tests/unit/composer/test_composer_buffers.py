"""`buffer_dtype`: what forward sees, what state dicts and checkpoints have, beside plain PyTorch with buffers that were cast by hand."""

import pytest
import torch
from support.trainer_cases import Classifier, everything, trainer
from torch import nn

BF16 = {"mixed_precision": {"buffer_dtype": "bf16"}}
VALUE = 1 / 3  # no bf16 number


class Scaled(nn.Module):
    """A factor that stays, and a mean that forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.full((8,), VALUE))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Linear(8, 8)
        self.seen = []

    def forward(self, x):
        self.seen.append(self.factor.dtype)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0).to(self.mean.dtype) * 0.1)
        return self.inner(self.norm(x)) * self.factor.float() + self.mean.float()


class Buffered(Classifier):
    def __init__(self):
        super().__init__()
        self.model.blocks.insert(0, Scaled())
        self.model.activation_checkpointing_fn = lambda module: isinstance(module, Scaled)
        self.alone = nn.Module()
        self.alone.register_buffer("shift", torch.full((8,), VALUE))

    def forward(self, batch):
        return self.model(batch[0] + self.alone.shift.float())


def _buffered():
    torch.manual_seed(0)
    return Buffered()


def _by_hand():
    model = _buffered()
    for module in (model.model.blocks[0], model.alone):
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.bfloat16() if buffer.is_floating_point() else buffer
    return model


def _scaled(model):
    return model.model.blocks[0]


def test_forward_has_them_cast_and_state_dicts_as_they_were():
    made, plain = trainer(4, model=_buffered(), fsdp_config=BF16), trainer(4, model=_by_hand())
    made.fit()
    plain.fit()
    assert torch.equal(everything(made), everything(plain))
    own, other = _scaled(made.state.model), _scaled(plain.state.model)
    assert set(own.seen) == {torch.bfloat16}
    assert own.count.dtype is torch.long
    assert own.norm.running_mean.dtype is torch.float32, "BatchNorm keeps its statistics"
    assert torch.equal(own.mean, other.mean)
    state = made.state.model.state_dict()
    assert torch.equal(state["model.blocks.0.factor"], torch.full((8,), VALUE)), "no bit is lost of what stays"
    assert torch.equal(state["alone.shift"], torch.full((8,), VALUE))
    assert torch.equal(state["model.blocks.0.mean"], other.mean.float())
    assert state["model.blocks.0.mean"].abs().sum() > 0


def test_recomputation_sees_the_same():
    options = {**BF16, "activation_checkpointing": True}
    made, plain = (trainer(4, model=_buffered(), fsdp_config=given) for given in (options, BF16))
    _scaled(made.state.model).mean.requires_grad_(False)
    made.fit("1ba")
    plain.fit("1ba")
    assert _scaled(made.state.model).seen == [torch.bfloat16] * 2, "forward, and once more in backward"
    assert made.state.loss == plain.state.loss


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_checkpoints(tmp_path, kind):
    options = {"fsdp_config": {**BF16, "state_dict_type": kind}}
    made = trainer(4, model=_buffered(), save_folder=str(tmp_path), save_interval="2ba", max_duration="2ba", **options)
    made.fit()
    other = _buffered()
    nn.init.ones_(_scaled(other).factor)
    again = trainer(4, model=other, load_path=str(tmp_path / "latest-rank0.pt"), **options)
    assert torch.equal(_scaled(other).factor, torch.full((8,), VALUE).bfloat16())
    assert torch.equal(other.state_dict()["model.blocks.0.factor"], torch.full((8,), VALUE))
    made.fit("2ba")
    again.fit()
    assert torch.equal(everything(again), everything(made))
    assert torch.equal(_scaled(other).mean, _scaled(made.state.model).mean)


def test_load_state_dict():
    made = trainer(4, model=_buffered(), fsdp_config=BF16)
    state = {name: value.clone() for name, value in made.state.model.state_dict().items()}
    state["model.blocks.0.factor"] = torch.full((8,), 1 / 7)
    made.state.model.load_state_dict(state)
    assert torch.equal(_scaled(made.state.model).factor, torch.full((8,), 1 / 7).bfloat16())
    assert torch.equal(made.state.model.state_dict()["model.blocks.0.factor"], torch.full((8,), 1 / 7))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, torch.bfloat16),
        ({"mixed_precision": "PURE"}, torch.bfloat16),
        ({"mixed_precision": "FULL"}, torch.float32),
        ({"mixed_precision": {"param_dtype": "bf16"}}, torch.float32),
    ],
)
def test_named_precisions(given, expected):
    model = _buffered()
    trainer(4, model=model, precision="amp_bf16", fsdp_config=given)
    assert _scaled(model).factor.dtype is expected


def test_units_of_another_precision_and_ignored_modules():
    model = _buffered()
    model.model.fsdp_wrap_fn = lambda module: {"mixed_precision": "FULL"} if isinstance(module, Scaled) else False
    trainer(4, model=model, precision="amp_bf16", fsdp_config={})
    assert _scaled(model).factor.dtype is torch.float32
    assert model.alone.shift.dtype is torch.bfloat16
    model = _buffered()
    trainer(4, model=model, precision="amp_bf16", fsdp_config={"ignored_modules": [_scaled(model)]})
    assert _scaled(model).factor.dtype is torch.float32
