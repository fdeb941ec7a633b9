"""What random graphs of `sharding_cases` also have: operations without a rule, writes in place through views, values that are looked at
without gradients, a backward that is not linear.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.1, 0.1)


def _clipped(draw):
    return lambda x: _Clip.apply(x), [draw.any(1)]


def _written(draw):
    x = draw.any(1)

    def write(a, b):
        a = a * 1.0
        seen = a[..., :1]
        a[..., 0] = b.sum() * 0.1
        return a * seen, seen.clone()

    return write, [x, draw.any(1)]


def _accumulated(draw):
    x = draw.any(2)
    last = draw.of(x)[-1]

    def accumulate(a, b):
        out = torch.zeros(a.shape, dtype=a.dtype)
        flat = out.view(-1, last)
        flat.add_(b)
        out.mul_(a)
        return out

    return accumulate, [x, draw.tensor(last)]


def _watched(draw):
    def watch(a):
        with torch.no_grad():
            scale = torch.fft.fft(a.flatten()).real.abs().mean() + 1.0
            half = a * 0.5
        return a / scale + half

    return watch, [draw.any(1)]


def _unknown(draw):
    def mix(a):
        return torch.fft.fft(a.flatten()).real.view(a.shape) / math.sqrt(a.numel())

    return mix, [draw.any(1)]


def _sorted(draw):
    def order(a):
        values, places = a.sort(-1)
        return values * places.double().add(1.0).reciprocal()

    return order, [draw.any(1)]


def _attended(draw):
    """Attention of torch.nn, which is opened before it is shared."""
    length, samples, width = draw.size(), draw.pick((1, 2, 4)), draw.pick((4, 8))
    heads, wanted, more = draw.pick((1, 2, 4)), draw.rng.random() < 0.5, draw.rng.random() < 0.3

    def attend(x, weight, bias, out, seen, hidden):
        inputs = (x, x, x) if draw_self else (x, seen, seen)
        mask = hidden.detach() < -1.0
        found, weights = F.multi_head_attention_forward(
            *inputs,
            width,
            heads,
            weight,
            bias,
            None,
            None,
            more,
            0.0,
            out,
            None,
            key_padding_mask=mask,
            need_weights=wanted,
        )
        return (found, weights) if wanted else (found,)

    draw_self = draw.rng.random() < 0.5
    keys = length if draw_self else draw.size()
    shapes = ((length, samples, width), (3 * width, width), (3 * width,), (width, width), (keys, samples, width))
    return attend, [*(draw.tensor(*shape) for shape in shapes), draw.tensor(samples, keys)]


OTHERS = (_attended, _clipped, _written, _accumulated, _watched, _unknown, _sorted)
