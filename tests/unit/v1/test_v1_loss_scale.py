"""The loss scale: torch.amp.GradScaler's rule, the options beyond it, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smpc.errors import CheckpointError, ConfigError
from smpc.v1.optimization.loss_scale import DynamicOptions, make_scaler


@given(
    overflows=st.lists(st.booleans(), max_size=60),
    factor=st.sampled_from([1.5, 2.0, 3.0, 4.0, 1e3]),
    window=st.integers(1, 5),
    start=st.sampled_from([1.0, 3.7, 2.0**16, 2.0**120, 2.0**-120]),
)
def test_the_rule_is_that_of_grad_scaler(overflows, factor, window, start):
    ours = make_scaler(
        None, True, {"init_scale": start, "scale_factor": factor, "scale_window": window, "min_scale": 1e-300}
    )
    theirs = torch.amp.GradScaler("cpu", start, factor, 1.0 / factor, window)
    theirs.scale(torch.ones(()))
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflow in overflows:
        parameter.grad = torch.tensor([torch.inf if overflow else 0.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow=overflow)
        if theirs.get_scale() == 0.0:
            break  # torch goes to zero, we stop at min_scale
        assert ours.scale == theirs.get_scale()
        assert ours.good_steps == theirs._get_growth_tracker()


def run(overflows, **options):
    scaler = make_scaler(None, True, {"dynamic_loss_args": {"init_scale": 8.0, "scale_window": 3, **options}})
    scales = []
    for letter in overflows:
        scales.append(scaler.scale)
        scaler.update(overflow=letter == "x")
    return [*scales, scaler.scale]


def test_hysteresis_and_the_minimum():
    assert run("..xx", delayed_shift=2) == [8, 8, 8, 8, 4]
    assert run("...x.x...", delayed_shift=2) == [8, 8, 8, 16, 16, 16, 8, 8, 8, 16]
    assert run("x.x.x.", delayed_shift=2) == [8, 8, 8, 4, 4, 2, 2]
    assert run("x.x.x.", delayed_shift=2, consecutive_hysteresis=True) == [8] * 7
    assert run("xxxxx", min_scale=3) == [8, 4, 3, 3, 3, 3]


def test_defaults_and_forms():
    assert DynamicOptions() == DynamicOptions(2.0**32, 2.0, 1000, 1.0, 1, False)
    assert make_scaler(1.0, True, {}).scale == 2.0**32
    assert make_scaler(None, True, {"init_scale": 4.0}) == make_scaler(
        None, True, {"dynamic_loss_args": {"init_scale": 4.0}}
    )
    fixed = make_scaler(128.0, False, {})
    fixed.update(overflow=True)
    assert (fixed.scale, fixed.can_shrink) == (128.0, False)


def test_state_goes_on_under_other_options():
    scaler = make_scaler(None, True, {"init_scale": 64.0, "scale_window": 5, "delayed_shift": 3})
    for overflow in (True, False, False, False, False):
        scaler.update(overflow=overflow)
    other = make_scaler(None, True, {"scale_window": 2, "delayed_shift": 1})
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == {"scale": 64.0, "good_steps": 1, "hysteresis": 1}
    fixed = make_scaler(8.0, False, {})
    fixed.load_state_dict(scaler.state_dict())
    assert fixed.scale == 8.0
    with pytest.raises(CheckpointError, match="expected numbers called scale, good_steps, hysteresis"):
        other.load_state_dict({"scale": 3.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((128.0, True, {}), "static_loss_scale: 128.0 and dynamic_loss_scale=True exclude each other"),
        ((None, False, {}), "None needs dynamic_loss_scale=True"),
        ((-1.0, False, {}), "static_loss_scale: expected a finite number above 0, or None, found -1.0"),
        ((float("inf"), False, {}), "static_loss_scale: expected a finite number"),
        (("2", False, {}), "found '2'"),
        ((1.0, 1, {}), "dynamic_loss_scale: expected a bool, found 1"),
        ((None, True, {"scale_windo": 2}), "unknown argument 'scale_windo'; did you mean 'scale_window'?"),
        ((None, True, {"dynamic_loss_args": {"mystery": 2}}), "unknown argument 'mystery'; known are init_scale, "),
        ((None, True, {"dynamic_loss_arg": {}}), "did you mean 'dynamic_loss_args'"),
        ((None, True, {"dynamic_loss_args": [1]}), r"dynamic_loss_args: expected a dict, found \[1\]"),
        ((None, True, {"init_scale": 2.0, "dynamic_loss_args": {"init_scale": 4.0}}), "init_scale: given twice"),
        ((1.0, False, {"init_scale": 2.0}), "init_scale: for a dynamic loss scale; pass dynamic_loss_scale=True"),
        ((None, True, {"init_scale": -2.0}), "init_scale: expected a finite number above 0, found -2.0"),
        ((None, True, {"scale_factor": 1.0}), "scale_factor: expected a finite number above 1, found 1.0"),
        ((None, True, {"scale_window": 0}), "scale_window: expected an int of at least 1, found 0"),
        ((None, True, {"delayed_shift": 1.5}), "delayed_shift: expected an int of at least 1, found 1.5"),
        ((None, True, {"consecutive_hysteresis": 1}), "consecutive_hysteresis: expected a bool, found 1"),
        ((None, True, {"init_scale": 1.0, "min_scale": 2.0}), "init_scale: expected at least min_scale = 2, found 1"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_scaler(*arguments)


def test_all_mistakes_are_listed_together():
    with pytest.raises(ConfigError) as caught:
        make_scaler(-1.0, "yes", {"scale_windo": 1, "delayed_shift": 0})
    assert len(str(caught.value).splitlines()) == 4
