"""The kernels of the optimizers against torch's foreach functions and the written rules: in the interpreter, and on a GPU."""

import math

import optimizer_rules as rules
import torch

from smpc.kernels.launch.backend import Backend, backend
from smpc.optimizers import FusedAdamW, FusedLamb, FusedNovoGrad, clip_grad_norm_, global_norm

# Chunks are 16384 elements, blocks 2048: ends before, on and after both; many small ones, empty ones, scalars.
SHAPES = ((1,), (), (0, 5), (17,), (2048,), (2049,), (33, 7), (16385,), *((3,),) * 6)
OPTIONS = (
    (FusedAdamW, {"weight_decay": 0.1}),
    (FusedAdamW, {"weight_decay": 0.0, "amsgrad": True}),
    (FusedLamb, {}),
    (FusedLamb, {"adam_w_mode": False, "max_grad_norm": None, "bias_correction": False}),
    (FusedLamb, {"weight_decay": 0.0, "grad_averaging": False}),
    (FusedLamb, {"weight_decay": 0.0, "use_nvlamb": True, "eps": 0.0}),
    (FusedNovoGrad, {"weight_decay": 0.1}),
    (FusedNovoGrad, {"weight_decay": 0.1, "reg_inside_moment": True, "norm_type": 0, "init_zero": True}),
)


def label(case):
    kind, options = case
    return "-".join((kind.__name__, *(f"{name}={value}" for name, value in options.items())))


def check_update(case, dtype, masters=False, device="cpu", steps=3):
    """Kernels and foreach agree in parameters and states."""
    kind, options = case
    assert backend(torch.device(device)) is not Backend.TORCH
    if options.get("eps") == 0.0:
        steps = 1  # then moments of zero gradients would be 0 / 0 in both
    results = []
    for kernel in (True, False):
        params, optimizer = rules.trained(
            kind,
            torch.float32,
            {"lr": 1e-2, "master_weights": masters, "kernel": kernel, **options},
            steps=steps,
            device=device,
            shapes=SHAPES,
            low=dtype,
        )
        states = [value for p in params for name, value in optimizer.state[p].items() if name != "step"]
        results.append((params, states))
    (found, found_states), (expected, expected_states) = results
    for a, b in zip(found_states, expected_states, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)
    # A result just between two numbers may be rounded to either: once from a master, else in each step, from the last one's result,
    # and a place off at the value that a parameter had stays when it comes closer to zero.
    spacing = 1.01 * torch.finfo(dtype).eps
    for a, b, start in zip(found, expected, rules.made(shapes=SHAPES), strict=True):
        a, b, start = (values.detach().double().cpu() for values in (a, b, start))
        bound = spacing * (b.abs() if masters else steps * torch.maximum(b.abs(), start.abs()))
        assert ((a - b).abs() <= bound + 1e-6).all()


def check_rules(device="cpu"):
    """50 steps by kernel follow the written rules, in fp32."""
    novograd = [(FusedNovoGrad, rules.WrittenNovoGrad, options) for options in ({}, *rules.LONG_NOVOGRAD_STEPS)]
    for kind, rule, options in ((FusedLamb, rules.WrittenLamb, {}), *novograd):
        found, _ = rules.trained(kind, torch.float32, {"kernel": True, **options}, device=device)
        assert rules.worst(found, rules.written(rule, torch.float32, options).p) < 1e-6


def leaves(shapes, dtype, device, offset=0):
    """Parameters with gradients that begin `offset` elements after an aligned address."""
    found = []
    for index, values in enumerate(rules.made(shapes=shapes, dtype=torch.float32)):
        room, other = (torch.zeros(values.numel() + offset, dtype=dtype, device=device) for _ in range(2))
        p = torch.nn.Parameter(room[offset:].view(values.shape).copy_(values))
        p.grad = other[offset:].view(values.shape).copy_(values * (index + 1))
        found.append(p)
    return found


def check_unaligned(device="cpu"):
    """Addresses that are no multiple of 16 bytes."""
    for kind in (FusedAdamW, FusedLamb, FusedNovoGrad):
        shifted, even = (leaves(((5,), (2049,)), torch.float16, device, offset) for offset in (1, 0))
        assert shifted[0].data_ptr() % 16 == 2
        for params in (shifted, even):
            kind(params, lr=0.1, kernel=True).step()
        for p, q in zip(shifted, even, strict=True):
            assert torch.equal(p, q)


def check_layouts(device="cpu"):
    """A transposed parameter, with its gradient laid out alike or not, and one with gaps, which torch updates."""
    for kind in (FusedAdamW, FusedLamb, FusedNovoGrad):
        results = []
        for form in ("plain", "transposed", "gaps", "mixed"):
            values, gradient = (x.float().to(device) for x in rules.made(shapes=((6, 8), (6, 8))))
            p = torch.nn.Parameter(arranged(values, form).detach())
            p.grad = arranged(gradient, "plain" if form == "mixed" else form)
            optimizer = kind([p], lr=0.1, kernel=True)
            for _ in range(2):
                optimizer.step()
            results.append(p.detach())
        for found in results[1:]:
            torch.testing.assert_close(found, results[0])


def arranged(values, form):
    if form == "plain":
        return values
    if form == "gaps":
        return values.repeat_interleave(2, 1)[:, ::2]
    return values.t().contiguous().t()


def check_norms(dtype, device="cpu"):
    """Norms and clipping by kernel equal torch's."""
    for order in (2.0, math.inf):
        ours, theirs = (leaves(SHAPES, dtype, device) for _ in range(2))
        exact = torch.linalg.vector_norm(torch.cat([p.grad.double().flatten() for p in ours]), order)
        torch.testing.assert_close(
            global_norm([p.grad for p in ours], order, kernel=True).double(), exact, rtol=1e-6, atol=0
        )
        for limit in (1.0, 1e9):
            found = clip_grad_norm_(ours, limit, order, kernel=True)
            expected = clip_grad_norm_(theirs, limit, order, kernel=False)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
            for p, q in zip(ours, theirs, strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=max(1.01 * torch.finfo(dtype).eps, 1e-6), atol=1e-7)
    tensors = [torch.ones(5000, dtype=dtype, device=device), torch.ones(3, dtype=dtype, device=device)]
    tensors[0][4999] = math.nan
    for order in (2.0, math.inf):
        assert global_norm(tensors, order, kernel=True).isnan()
    tensors[0][4999] = -math.inf
    for order in (2.0, math.inf):
        assert float(global_norm(tensors, order, kernel=True)) == math.inf
    assert float(global_norm([torch.ones(0, 2, dtype=dtype, device=device)], kernel=True)) == 0.0


def check_rate(device="cpu"):
    """A rate on the device is read there, and a changed one is used."""
    for kind in (FusedAdamW, FusedLamb, FusedNovoGrad):
        first, second = (leaves(((7,), (9,)), torch.float32, device) for _ in range(2))
        rate = torch.tensor(0.1, device=device)
        ours, other = kind(first, lr=rate, kernel=True), kind(second, lr=0.1, kernel=True)
        for factor in (1.0, 0.5):
            rate.fill_(0.1 * factor)
            other.param_groups[0]["lr"] = 0.1 * factor
            ours.step()
            other.step()
        for p, q in zip(first, second, strict=True):
            torch.testing.assert_close(p, q)
