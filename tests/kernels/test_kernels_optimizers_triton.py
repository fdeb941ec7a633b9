"""The kernels of the optimizers and of gradient norms, in the interpreter, against foreach and the written rules."""

import optimizer_cases as cases
import pytest
import torch

DTYPES = (torch.float32, torch.float16)


ignore_both_sides = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy computes both sides of `where`


@ignore_both_sides
@pytest.mark.parametrize("case", [cases.OPTIONS[index] for index in (1, 2, 4, 5, 7)], ids=cases.label)
def test_update(case):
    cases.check_update(case, torch.float32, steps=2)


@pytest.mark.parametrize("case", [cases.OPTIONS[0], cases.OPTIONS[6]], ids=cases.label)
def test_update_with_masters(case):
    cases.check_update(case, torch.float16, masters=True, steps=2)


@pytest.mark.slow
@ignore_both_sides
@pytest.mark.parametrize(
    ("dtype", "masters"), [(torch.float32, False), (torch.float16, False), (torch.float16, True)], ids=str
)
@pytest.mark.parametrize("case", cases.OPTIONS, ids=cases.label)
def test_update_with_every_option(case, dtype, masters):
    cases.check_update(case, dtype, masters)


@pytest.mark.slow
def test_rules():
    cases.check_rules()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ignore_both_sides
def test_norms(dtype):
    cases.check_norms(dtype)


def test_unaligned_addresses():
    cases.check_unaligned()


def test_layouts():
    cases.check_layouts()


def test_rates():
    cases.check_rate()
