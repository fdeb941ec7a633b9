"""The kernels of the optimizers and of gradient norms, compiled and run on the GPU, against foreach and the written rules."""

import optimizer_cases as cases
import optimizer_rules as rules
import pytest
import torch

from smpc.kernels.launch.backend import Backend, backend
from smpc.optimizers import FusedAdamW

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert backend(torch.device(DEVICE)) is Backend.TRITON


@pytest.mark.parametrize("case", cases.OPTIONS, ids=cases.label)
@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_update(case, dtype, masters):
    cases.check_update(case, dtype, masters, DEVICE)


def test_rules():
    cases.check_rules(DEVICE)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_adamw_is_torchs_fused_one(kernel, amsgrad):
    options = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": amsgrad}
    expected, _ = rules.trained(
        lambda p, **given: torch.optim.AdamW(p, fused=True, **given), torch.float32, options, device=DEVICE
    )
    found, _ = rules.trained(FusedAdamW, torch.float32, {**options, "kernel": kernel}, device=DEVICE)
    unit = torch.finfo(torch.float32).eps
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=16 * unit, atol=16 * unit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(dtype):
    cases.check_norms(dtype, DEVICE)


def test_the_rest():
    cases.check_unaligned(DEVICE)
    cases.check_layouts(DEVICE)
    cases.check_rate(DEVICE)


def test_large_tensors_repeat_bit_by_bit():
    results = []
    for _ in range(2):
        params = cases.leaves(((5_000_003,), (1024, 1024)), torch.bfloat16, DEVICE)
        cases.FusedLamb(params, kernel=True).step()
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
