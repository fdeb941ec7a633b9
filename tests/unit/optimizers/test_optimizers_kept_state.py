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


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
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
    assert 4 * found.own * 64 * 48 == pytest.approx(kept, abs=600)  # counters of steps, and factors


def test_in_half_precision_it_is_kept_of_masters():
    found = planned(
        optim.SGD([torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))], 0.1, 0.9), "adamw-fp32-master"
    )
    assert (found.own, found.float32, found.master) == (0, 1, True)


def test_classes_of_others_are_not_run():
    """A step may do anything: count, print, send."""
    steps = []
    other = type("Other", (optim.SGD,), {"step": lambda self, closure=None: steps.append(self)})
    assert planned(other([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1), "adam").name == "adam"
    assert not steps


def test_what_keeps_larger_tensors_is_what_was_assumed():
    assert planned(optim.LBFGS([torch.nn.Parameter(torch.ones(4, 4))]), "adam").name == "adam"
