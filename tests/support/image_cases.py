"""Random calls of operations on images and signals: the cases of `smpc.codegen.rewrite.tensor_parallel.image_rules`."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _image(draw, spatial, size=4):
    return draw.tensor(draw.pick((4, 2)), draw.pick((4, 8)), *[size] * spatial)


def _convolution(function, spatial):
    def case(draw):
        groups = draw.pick((1, 1, 2, 4, 8))
        out, x = draw.pick((8, 16)), draw.tensor(draw.pick((4, 2)), 8, *[4] * spatial)
        weight = draw.tensor(out, 8 // groups, *[draw.pick((1, 3))] * spatial)
        bias = [draw.tensor(out)] if draw.rng.random() < 0.5 else []
        if draw.rng.random() < 0.5:
            return (lambda a, w, *b: function(a, w, *(b or (None,)), 1, 1, 1, groups)), [x, weight, *bias]
        return (lambda a, w, *b: function(a, w, *b, padding=1, groups=groups)), [x, weight, *bias]

    return case


def _transposed(function, spatial):
    def case(draw):
        groups = draw.pick((1, 1, 2, 4))
        out, x = draw.pick((8, 4)), draw.tensor(draw.pick((4, 2)), 8, *[3] * spatial)
        weight = draw.tensor(8, out // groups, *[2] * spatial)
        bias = [draw.tensor(out)] if draw.rng.random() < 0.5 else []
        return (lambda a, w, *b: function(a, w, *b, stride=2, groups=groups)), [x, weight, *bias]

    return case


def _batch_norm(draw):
    x = _image(draw, draw.pick((0, 1, 2)))
    channels = draw.of(x)[1]
    own = [draw.tensor(channels) for _ in range(draw.pick((0, 2)))]
    if draw.rng.random() < 0.6:
        return (lambda a, *w: F.batch_norm(a, None, None, *w, training=True)), [x, *own]
    mean, spread = draw.tensor(channels), draw.tensor(channels)

    def normalise(a, m, v, *w):
        return F.batch_norm(a, m.detach(), v.detach().abs() + 0.5, *w, training=False)

    return normalise, [x, mean, spread, *own]


def _group_norm(draw):
    x = _image(draw, 2)
    channels, groups = draw.of(x)[1], draw.pick((2, 4))
    own = [draw.tensor(channels) for _ in range(draw.pick((0, 2)))]
    by_name = draw.rng.random() < 0.5
    return (lambda a, *w: F.group_norm(a, num_groups=groups) if by_name and not w else F.group_norm(a, groups, *w)), [
        x,
        *own,
    ]


def _pooling(name, spatial):
    def case(draw):
        return (lambda a: getattr(F, name)(a, 2)), [_image(draw, spatial)]

    return case


def _interpolate(draw):
    mode = draw.pick(("nearest", "bilinear"))
    return lambda a: F.interpolate(a, scale_factor=2, mode=mode), [_image(draw, 2)]


def _pad(draw):
    options = draw.pick(({}, {"value": 0.5}, {"mode": "reflect"}, {"mode": "constant", "value": 0}))
    return lambda a: F.pad(a, (1, 2), **options), [_image(draw, 1)]


def _weight_norm(draw):
    dim, shape = draw.pick((0, 2, -1)), (draw.size(), 3, draw.size())
    norms = [size if place == dim else 1 for place, size in enumerate(shape)]
    return lambda v, g: torch._weight_norm(v, g, dim), [draw.tensor(*shape), draw.tensor(*norms)]


IMAGES = {
    **{f"conv{n}d": _convolution(getattr(F, f"conv{n}d"), n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _transposed(getattr(F, f"conv_transpose{n}d"), n) for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": _pooling(f"{kind}_pool{n}d", n) for kind in ("max", "avg", "adaptive_avg") for n in (1, 2, 3)},
    "batch_norm": _batch_norm, "group_norm": _group_norm, "interpolate": _interpolate, "pad": _pad,
    "_weight_norm": _weight_norm,
}  # fmt: skip
