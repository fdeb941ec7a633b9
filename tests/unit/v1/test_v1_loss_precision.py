"""`Precision`: what an optimizer or a GradScaler, made after the model, says of its losses."""

from types import SimpleNamespace

import pytest
import torch

from smpc.v1.session.precision import Precision, loads_as
from smpc.v1.session.process_state import Script


@pytest.fixture
def script():
    return Script()


def test_the_scale_is_that_of_the_optimizer_once_there_is_one(script):
    precision = Precision(torch.float16, script)
    assert precision.loss_scale == 1.0
    script.optimizer = SimpleNamespace(loss_scale=8, scale_can_shrink=False)
    assert precision.loss_scale == 8.0


@pytest.mark.parametrize(
    ("optimizer", "scaled", "scale", "expected"),
    [
        (None, None, 1.0, False),
        (True, None, 1.0, True),
        (False, None, 1.0, False),
        (None, 3, 2.0, True),
        (None, 3, 1.0, False),  # it cannot shrink the loss any more
        (None, 2, 2.0, False),  # it has scaled nothing in this step
        (False, 3, 2.0, True),
    ],
)
def test_a_loss_is_excused_only_by_a_scale_that_can_shrink(script, optimizer, scaled, scale, expected):
    precision = Precision(None, script)
    if optimizer is not None:
        script.optimizer = SimpleNamespace(loss_scale=1.0, scale_can_shrink=optimizer)
    if scaled is not None:
        script.scaler = SimpleNamespace(num_scaled=scaled, get_scale=lambda: scale)
    assert precision.num_scaled == (scaled or 0)
    assert precision.overflow_is_curable(2 if scaled else 0) is expected


@pytest.mark.parametrize(("half", "expected"), [(None, False), (torch.float16, True)])
def test_states_of_other_floating_dtypes_load_in_half_precision(half, expected):
    assert loads_as(torch.float32, torch.float16, half) is expected
    assert not loads_as(torch.int64, torch.float16, half)
