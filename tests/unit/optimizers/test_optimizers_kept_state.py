"""What plans take an optimizer to keep, against what it keeps."""

import pytest
import torch
from torch import optim

from smpc.optimizers.kept_state import planned

CASES = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "weight decay": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": optim.Adam,
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "centered": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "radam": optim.RAdam,
    "adafactor": optim.Adafactor,
}


class OneByte(optim.Optimizer):
    """A script's own: a momentum in a byte for each element."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("momentum", torch.zeros_like(p, dtype=torch.int8)).add_(p.grad.sign().to(torch.int8))
                p.data.sub_(state["momentum"] * group["lr"])


@pytest.mark.parametrize("make", [*CASES.values(), OneByte], ids=[*CASES, "one byte"])
def test_what_is_kept_is_counted(make):
    """Plans of scripts took every optimizer for Adam."""
    parameters = [torch.nn.Parameter(torch.randn(64, 48)), torch.nn.Parameter(torch.randn(48))]
    optimizer = make(parameters)
    found = planned(optimizer, "adam")
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[parameters[0]].values() if isinstance(value, torch.Tensor))
    assert (4 * found.own + found.byte) * 64 * 48 == pytest.approx(kept, abs=600)  # counters of steps, and factors


def test_in_half_precision_it_is_kept_of_masters():
    found = planned(
        optim.SGD([torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))], 0.1, 0.9), "adamw-fp32-master"
    )
    assert (found.own, found.float32, found.master) == (0, 1, True)


def test_what_cannot_be_tried_is_what_was_assumed():
    def fail(self, closure=None):
        raise ValueError("not here")

    optimizer = type("Failing", (optim.SGD,), {"step": fail})([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1)
    assert planned(optimizer, "adam").name == "adam"
    assert planned(optim.LBFGS([torch.nn.Parameter(torch.ones(4, 4))]), "adam").name == "adam"
