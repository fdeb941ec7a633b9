"""The written rules of the fused optimizers, one tensor after another in fp64, and the tensors that tests update with them."""

import itertools
import math

import torch

SHAPES = ((1,), (17,), (3, 0), (9, 13), (), (1000,))
STEPS = 50


def made(seed=0, shapes=SHAPES, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype) for shape in shapes]


def gradients(step, shapes=SHAPES, dtype=torch.float64):
    """Another scale each step, so that clipping comes and goes."""
    return made(1000 + step, shapes, dtype, scale=10.0 ** ((step % 3) - 2))


def options_of(**choices):
    """Every combination."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


class WrittenLamb:
    """FusedLAMB, as the reference writes it."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
                 adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False):  # fmt: skip
        self.p = [p.double().clone() for p in params]
        self.m, self.v = ([torch.zeros_like(p) for p in self.p] for _ in range(2))
        self.t = 0
        self.lr, self.correct, self.betas, self.eps, self.wd = lr, bias_correction, betas, eps, weight_decay
        self.decoupled, self.averaging, self.limit, self.nv = adam_w_mode, grad_averaging, max_grad_norm, use_nvlamb

    def step(self, grads):
        self.t += 1
        b1, b2 = self.betas
        gn = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads))
        clip = gn / self.limit if self.limit and gn > self.limit else 1.0
        b3 = 1 - b1 if self.averaging else 1.0
        c1, c2 = (1 - b1**self.t, 1 - b2**self.t) if self.correct else (1.0, 1.0)
        for i, g in enumerate(grads):
            p, sg = self.p[i], g.double() / clip
            if not self.decoupled:
                sg = sg + self.wd * p
            self.m[i] = b1 * self.m[i] + b3 * sg
            self.v[i] = b2 * self.v[i] + (1 - b2) * sg**2
            u = (self.m[i] / c1) / ((self.v[i] / c2).sqrt() + self.eps)
            if self.decoupled:
                u = u + self.wd * p
            r = self.lr
            if self.nv or self.wd != 0:
                np, nu = float((p**2).sum().sqrt()), float((u**2).sum().sqrt())
                r = self.lr * np / nu if np and nu else self.lr
            self.p[i] = p - r * u


class WrittenNovoGrad:
    """FusedNovoGrad, as the reference writes it."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                 reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False):  # fmt: skip
        self.p = [p.double().clone() for p in params]
        self.m = [torch.zeros_like(p) for p in self.p]
        self.n = [0.0 if init_zero else None for _ in self.p]
        self.t = 0
        self.lr, self.correct, self.betas, self.eps, self.wd = lr, bias_correction, betas, eps, weight_decay
        self.inside, self.averaging, self.norm_type = reg_inside_moment, grad_averaging, norm_type

    def step(self, grads):
        self.t += 1
        b1, b2 = self.betas
        b3 = 1 - b1 if self.averaging else 1.0
        c1, c2 = (1 - b1**self.t, math.sqrt(1 - b2**self.t)) if self.correct else (1.0, 1.0)
        for i, g in enumerate(grads):
            p, g = self.p[i], g.double()
            if self.norm_type == 2:
                norm = math.sqrt(float((g**2).sum()))
                before = norm if self.n[i] is None else self.n[i]
                self.n[i] = math.sqrt(b2 * before**2 + (1 - b2) * norm**2)
            else:
                norm = float(g.abs().max()) if g.numel() else 0.0
                before = norm if self.n[i] is None else self.n[i]
                self.n[i] = b2 * before + (1 - b2) * norm
            denom = self.n[i] / c2 + self.eps
            if self.inside:
                self.m[i] = b1 * self.m[i] + b3 * (g / denom + self.wd * p)
                self.p[i] = p - self.lr * self.m[i] / c1
            else:
                self.m[i] = b1 * self.m[i] + b3 * g
                self.p[i] = p - self.lr * ((self.m[i] / c1) / denom + self.wd * p)


LAMB_OPTIONS = options_of(
    bias_correction=(True, False),
    adam_w_mode=(True, False),
    grad_averaging=(True, False),
    max_grad_norm=(1.0, None),
    use_nvlamb=(False, True),
    weight_decay=(0.01, 0.0),
)
NOVOGRAD_OPTIONS = options_of(
    bias_correction=(True, False),
    reg_inside_moment=(False, True),
    grad_averaging=(True, False),
    norm_type=(2, 0),
    init_zero=(False, True),
    weight_decay=(0.01, 0.0),
)

# Moments that are sums instead of averages, over norms that start at 0, make the longest steps: parameters reach 17.
LONG_NOVOGRAD_STEPS = [
    {
        "bias_correction": False,
        "grad_averaging": False,
        "norm_type": 0,
        "init_zero": True,
        "weight_decay": 0.01,
        **inside,
    }
    for inside in ({"reg_inside_moment": True}, {"reg_inside_moment": False})
]


def trained(kind, dtype, options, steps=STEPS, device="cpu", shapes=SHAPES, low=None):
    """Parameters after `steps` of an optimizer; gradients in `low`, if that is another dtype."""
    params = [torch.nn.Parameter(p.to(low or dtype).to(device)) for p in made(shapes=shapes, dtype=dtype)]
    optimizer = kind(params, **options)
    for step in range(steps):
        for p, g in zip(params, gradients(step, shapes, dtype), strict=True):
            p.grad = g.to(low or dtype).to(device)
        optimizer.step()
    return params, optimizer


def written(kind, dtype, options, steps=STEPS, shapes=SHAPES, low=None):
    """The same by the written rule, from the same rounded values."""
    rule = kind([p.to(low or dtype) for p in made(shapes=shapes, dtype=dtype)], **options)
    for step in range(steps):
        rule.step([g.to(low or dtype) for g in gradients(step, shapes, dtype)])
    return rule


def worst(found, expected):
    """The largest difference, absolute below 1 and relative above."""
    return max(
        float(((a.detach().double().cpu() - b.double().cpu()) / b.double().cpu().abs().clamp(min=1.0)).abs().max())
        for a, b in zip(found, expected, strict=True)
        if b.numel()
    )
