"""FusedLamb, FusedNovoGrad and FusedAdamW follow their written rules, for every option, in fp64 and fp32."""

import optimizer_rules as rules
import pytest
import torch

from smpc.optimizers import FusedAdamW, FusedLAMB, FusedLamb, FusedNovoGrad


def label(options):
    return "-".join(f"{name}={value}" for name, value in options.items())


def distance(kind, rule, dtype, options):
    found, _ = rules.trained(kind, dtype, options)
    return rules.worst(found, rules.written(rule, dtype, options).p)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("options", rules.LAMB_OPTIONS, ids=label)
def test_lamb(options):
    assert distance(FusedLamb, rules.WrittenLamb, torch.float64, options) < 1e-12


@pytest.mark.matrix(12)
@pytest.mark.parametrize("options", rules.NOVOGRAD_OPTIONS, ids=label)
def test_novograd(options):
    assert distance(FusedNovoGrad, rules.WrittenNovoGrad, torch.float64, options) < 1e-12


def test_the_rules_in_fp32():
    assert distance(FusedLamb, rules.WrittenLamb, torch.float32, {}) < 1e-6
    assert distance(FusedNovoGrad, rules.WrittenNovoGrad, torch.float32, {}) < 1e-6
    for options in rules.LONG_NOVOGRAD_STEPS:
        assert distance(FusedNovoGrad, rules.WrittenNovoGrad, torch.float32, options) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("options", [*rules.LAMB_OPTIONS, *rules.NOVOGRAD_OPTIONS], ids=label)
def test_the_rules_in_fp32_for_every_option(options):
    pair = (FusedLamb, rules.WrittenLamb) if "use_nvlamb" in options else (FusedNovoGrad, rules.WrittenNovoGrad)
    assert distance(*pair, torch.float32, options) < 1e-6  # rounding nothing but p and m to fp32 costs 8.5e-7


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_adamw_is_torchs_fused_one(dtype, weight_decay, amsgrad):
    options = {"lr": 1e-2, "weight_decay": weight_decay, "amsgrad": amsgrad}
    expected, _ = rules.trained(lambda p, **given: torch.optim.AdamW(p, fused=True, **given), dtype, options)
    found, _ = rules.trained(FusedAdamW, dtype, options)
    unit = torch.finfo(dtype).eps
    for a, b in zip(found, expected, strict=True):  # an ulp for each few steps
        torch.testing.assert_close(a, b, rtol=16 * unit, atol=16 * unit)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["lamb", "novograd", "adamw"])
def test_masters_follow_the_rule_and_parameters_are_rounded_masters(kind, low):
    options = {"weight_decay": 0.01}
    if kind == "adamw":
        start = rules.made(dtype=torch.float32)
        reference = [torch.nn.Parameter(p.to(low).double()) for p in start]
        optimizer = torch.optim.AdamW(reference, **options)
        for step in range(rules.STEPS):
            for p, g in zip(reference, rules.gradients(step, dtype=torch.float32), strict=True):
                p.grad = g.to(low).double()
            optimizer.step()
        exact = reference
    else:
        rule = rules.WrittenLamb if kind == "lamb" else rules.WrittenNovoGrad
        exact = rules.written(rule, torch.float32, options, low=low).p
    fused = {"lamb": FusedLamb, "novograd": FusedNovoGrad, "adamw": FusedAdamW}[kind]
    found, optimizer = rules.trained(fused, torch.float32, {**options, "master_weights": True}, low=low)
    masters = [optimizer.state[p]["master"] for p in found]
    assert all(master.dtype == torch.float32 for master in masters)
    assert rules.worst(masters, [p.detach() for p in exact]) < 5e-6  # parameters round at 5e-4
    assert all(torch.equal(p, master.to(low)) for p, master in zip(found, masters, strict=True))


def test_low_precision_without_masters_rounds_each_step():
    start = torch.full((64,), 1.0, dtype=torch.bfloat16)
    plain, kept = (torch.nn.Parameter(start.clone()) for _ in range(2))
    for p, masters in ((plain, False), (kept, True)):
        optimizer = FusedAdamW([p], lr=1e-4, weight_decay=0.0, master_weights=masters)
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert torch.equal(plain, start)  # 1e-4 is below half of bf16's spacing under 1
    assert torch.allclose(kept.float(), torch.tensor(1.0 - 50e-4), atol=4e-3)
    assert not torch.equal(kept, start)


def test_the_norm_spans_groups_and_each_has_its_limit():
    a, b = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = FusedLAMB(
        [{"params": [a]}, {"params": [b], "max_grad_norm": None}], weight_decay=0.0, bias_correction=False, lr=1.0
    )
    a.grad, b.grad = torch.full_like(a, 3.0), torch.full_like(b, 4.0)
    norm = (3 * 9 + 3 * 16) ** 0.5
    optimizer.step()
    assert FusedLAMB is FusedLamb
    torch.testing.assert_close(optimizer.state[a]["exp_avg"], torch.full_like(a, 0.1 * 3.0 / norm).detach())
    torch.testing.assert_close(optimizer.state[b]["exp_avg"], torch.full_like(b, 0.1 * 4.0).detach())


def test_a_trust_ratio_of_zero_norms_is_one():
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = FusedLamb([p], lr=0.1, max_grad_norm=None)
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, -0.1).detach(), rtol=1e-5, atol=0.0)
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = FusedLamb([p], lr=0.1, weight_decay=0.0, use_nvlamb=True)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, torch.ones_like(p))
