"""The calls of norms, activations, rotary embedding and losses that every way of computing them is tested with.

Each `check_*` compares values and gradients with the formula in fp64, written here from its definition and differentiated by autograd.
Formula (tests/unit), interpreter (tests/kernels) and GPU (tests/gpu) run the same checks.
"""

import math

import torch

from smpc.kernels.activations import bias_gelu, swiglu
from smpc.kernels.bias_dropout_add import bias_dropout_add, philox, scale, threshold
from smpc.kernels.cross_entropy import cross_entropy
from smpc.kernels.layer_norm import add_layer_norm, layer_norm
from smpc.kernels.linear_cross_entropy import linear_cross_entropy
from smpc.kernels.rms_norm import add_rms_norm, rms_norm
from smpc.kernels.rotary import rotary

# Absolute and relative; a few roundings of the type, whose sums are fp32.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}

SHAPES = ((1, 1), (17, 17), (3, 127), (2, 1000), (0, 17), (2, 3, 17), (4,))
LONG_SHAPES = ((127, 1), (1000, 1), (127, 17), (17, 1000), (1000, 127))
LAYOUTS = ("contiguous", "row slices", "every other column", "transposed", "expanded")


def made(shape, dtype, device="cpu", layout="contiguous", scale=1.0):
    """Random values of `shape`, times `scale`, that are in memory as `layout` says."""

    def numbers(*sizes):
        return (torch.randn(sizes, device=device) * scale).to(dtype)

    if layout == "row slices":
        return numbers(*shape[:-1], shape[-1] + 3)[..., 1:-2]
    if layout == "every other column":
        return numbers(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "transposed":
        return numbers(*reversed(shape)).permute(*reversed(range(len(shape))))
    if layout == "expanded":
        return numbers(*(1 for _ in shape[:-1]), shape[-1]).expand(shape)
    return numbers(*shape)


def leaf(tensor):
    """The same tensor in the same layout, as a leaf that wants a gradient."""
    return tensor.detach().requires_grad_()


def wide(tensors):
    return [None if tensor is None else tensor.detach().double().clone().requires_grad_() for tensor in tensors]


def compare(function, expected, tensors, dtype, grads=None, factor=1.0):
    """Values and gradients of `function(*tensors)` against `expected`'s in fp64; returns the outputs."""
    exact = wide(tensors)
    outputs, exacts = function(*tensors), expected(*exact)
    outputs, exacts = [(o,) if isinstance(o, torch.Tensor) else tuple(o) for o in (outputs, exacts)]
    grads = grads or [torch.randn_like(output) for output in outputs]
    inputs = [tensor for tensor in tensors if tensor is not None]
    found = torch.autograd.grad(outputs, inputs, grads)
    wanted = torch.autograd.grad(
        exacts, [tensor for tensor in exact if tensor is not None], [grad.double() for grad in grads]
    )
    tolerance = factor * TOLERANCE[dtype]
    for actual, reference in zip((*outputs, *found), (*exacts, *wanted), strict=True):
        torch.testing.assert_close(actual.double(), reference.detach(), rtol=tolerance, atol=tolerance)
    for tensor, gradient in zip(inputs, found, strict=True):
        assert gradient.dtype == tensor.dtype
        assert gradient.shape == tensor.shape
    return outputs


def exact_layer_norm(x, weight, bias, eps):
    centered = x - x.mean(-1, keepdim=True)
    out = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    return out if weight is None else out * weight if bias is None else out * weight + bias


def exact_rms_norm(x, weight, eps, offset):
    out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return out if weight is None else out * (weight + offset)


def check_norms(shape, dtype, device="cpu", layout="contiguous", memory_efficient=False):
    """LayerNorm and RMSNorm with and without weights, alone and of a sum."""
    columns = shape[-1]
    x = leaf(made(shape, dtype, device, layout))
    residual = leaf(made(shape, dtype, device))
    # Away from zero: computing h from y divides by the weight.
    weight = leaf((torch.rand(columns, device=device) + 0.5).to(dtype))
    bias = leaf(made((columns,), dtype, device))
    factor = 8.0 if memory_efficient else 2.0  # y, rounded, in place of x
    eps = 1e-3 if columns == 1 else 1e-5
    efficient = {"memory_efficient": memory_efficient}
    for affine in ((weight, bias), (weight, None), (None, None)):
        (out,) = compare(
            lambda x, w, b: layer_norm(x, (columns,), w, b, eps, **efficient),
            lambda x, w, b: exact_layer_norm(x, w, b, eps),
            (x, *affine),
            dtype,
            factor=factor,
        )
        assert out.dtype == dtype
    for scaled, offset in ((weight, 0.0), (weight, 1.0), (None, 0.0)):
        compare(
            lambda x, w, offset=offset: rms_norm(x, (columns,), w, eps, offset=offset, **efficient),
            lambda x, w, offset=offset: exact_rms_norm(x, w, eps, offset),
            (x, scaled),
            dtype,
            factor=factor,
        )
    if memory_efficient:
        return

    # The sum is rounded to its dtype before it is normalized.
    def rounded(x, r):
        return x + r + ((x + r).to(dtype).double() - (x + r)).detach()

    compare(
        lambda x, r, w, b: add_layer_norm(x, r, w, b, eps),
        lambda x, r, w, b: (exact_layer_norm(rounded(x, r), w, b, eps), rounded(x, r)),
        (x, residual, weight, bias),
        dtype,
        factor=factor,
    )
    compare(
        lambda x, r, w: add_rms_norm(x, r, w, eps, offset=1.0),
        lambda x, r, w: (exact_rms_norm(rounded(x, r), w, eps, 1.0), rounded(x, r)),
        (x, residual, weight),
        dtype,
        factor=factor,
    )


def check_activations(shape, dtype, device="cpu", layout="contiguous"):
    """bias-GELU in both forms, with and without bias, and SwiGLU."""
    x, up = leaf(made(shape, dtype, device, layout) * 2), leaf(made(shape, dtype, device, layout))
    bias = leaf(made(shape[-1:], dtype, device))
    inner = math.sqrt(2 / math.pi)
    for given in (bias, None):
        compare(
            bias_gelu,
            lambda x, b: (u := x if b is None else x + b) * 0.5 * (1 + torch.erf(u / math.sqrt(2))),
            (x, given),
            dtype,
            factor=2.0,
        )
        compare(
            lambda x, b: bias_gelu(x, b, approximate="tanh"),
            lambda x, b: (u := x if b is None else x + b) * 0.5 * (1 + torch.tanh(inner * (u + 0.044715 * u**3))),
            (x, given),
            dtype,
            factor=2.0,
        )
    compare(swiglu, lambda g, u: g / (1 + torch.exp(-g)) * u, (x, up), dtype)
    packed = leaf(made((*shape[:-1], 2 * shape[-1]), dtype, device))
    compare(
        lambda p: swiglu(*p.chunk(2, -1)),
        lambda p: torch.nn.functional.silu(p.chunk(2, -1)[0]) * p.chunk(2, -1)[1],
        (packed,),
        dtype,
    )


def exact_mask(shape, p, seed):
    """Which places are kept, place by place from the definition in the docstring of the op."""
    features = shape[-1]
    place = torch.arange(math.prod(shape))
    row, column = place // max(1, features), place % max(1, features)
    words = torch.stack(philox((row // 4 * features + column) % 2**32, seed.cpu()), 0)
    return (words.gather(0, (row % 4).unsqueeze(0))[0] >> 8 >= threshold(p)).view(shape)


def check_bias_dropout_add(shape, dtype, device="cpu", layout="contiguous"):
    x, residual = leaf(made(shape, dtype, device, layout)), leaf(made(shape, dtype, device, layout))
    bias = leaf(made(shape[-1:], dtype, device))
    seed = torch.tensor(0x1234567890ABCDEF, device=device)
    for p in (0.0, 0.3, 1.0):
        mask = exact_mask(shape, p, seed).to(device).double() * scale(p)
        for given in (bias, None):
            compare(
                lambda x, r, b, p=p: bias_dropout_add(x, b, r, p, seed=seed),
                lambda x, r, b, mask=mask: r + mask * (x if b is None else x + b),
                (x, residual, given),
                dtype,
            )
    compare(
        lambda x, r, b: bias_dropout_add(x, b, r, 0.3, training=False),
        lambda x, r, b: r + x + b,
        (x, residual, bias),
        dtype,
    )


ROTARY_SHAPES = ((1, 1, 1, 2, 2), (2, 3, 17, 16, 8), (2, 1, 127, 10, 6), (0, 2, 3, 4, 4), (1, 2, 5, 128, 128))


def check_rotary(shape, dtype, interleaved, device="cpu"):
    """Rotation of complex numbers, for every layout of x and of the tables."""
    batch, heads, positions, features, rotated = shape
    half = rotated // 2

    def exact(x, cos, sin):
        turned = x[..., :rotated]
        parts = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
        z = torch.complex(*parts) * torch.complex(cos, sin).unsqueeze(-3)
        pairs = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
        return torch.cat((pairs, x[..., rotated:]), -1)

    for leading in ((), (batch,)):
        angle = torch.randn(*leading, positions, half, device=device, dtype=torch.float64)
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        cos, sin = angle.cos().to(table_dtype), angle.sin().to(table_dtype)
        for seq_dim, sizes in ((-2, (batch, heads, positions)), (1, (batch, positions, heads))):
            for layout in ("contiguous", "every other column"):
                x = leaf(made((*sizes, features), dtype, device, layout))
                compare(
                    lambda x, cos=cos, sin=sin, seq_dim=seq_dim: rotary(
                        x, cos, sin, interleaved=interleaved, seq_dim=seq_dim
                    ),
                    lambda x, cos=cos, sin=sin, seq_dim=seq_dim: exact(
                        x.movedim(seq_dim, -2), cos.double(), sin.double()
                    ).movedim(-2, seq_dim),
                    (x,),
                    dtype,
                )
    sequence_first = leaf(made((positions, max(batch, 1), heads, features), dtype, device))
    if positions and leading == (batch,):
        cos, sin = (torch.randn(positions, half, device=device) for _ in "cs")
        compare(
            lambda x: rotary(x, cos, sin, interleaved=interleaved, seq_dim=0),
            lambda x: exact(x.movedim(0, -2), cos.double(), sin.double()).movedim(-2, 0),
            (sequence_first,),
            dtype,
        )


LOSS_SHAPES = ((1, 1), (17, 127), (3, 1000), (0, 17), (2, 5, 17), (7,))
RULES = (
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"label_smoothing": 0.2, "z_loss": 0.1, "ignore_index": 0},
)


def labels_for(shape, classes, ignore_index, device="cpu"):
    """Labels of every kind: each third is ignored."""
    target = torch.randint(classes, shape, device=device)
    ignored = (torch.arange(target.numel(), device=device) % 3 == 1).view(shape)
    return torch.where(ignored, ignore_index, target)


def exact_cross_entropy(logits, target, reduction, ignore_index=-100, label_smoothing=0.0, z_loss=0.0):
    """From the definition: a target distribution, its cross-entropy, and the weight of the log of the partition function."""
    classes = logits.shape[-1]
    counts = target != ignore_index
    wanted = torch.nn.functional.one_hot(torch.where(counts, target, 0), classes).double()
    wanted = (1 - label_smoothing) * wanted + label_smoothing / classes
    lse = torch.log(torch.exp(logits).sum(-1))
    loss = (wanted * (lse.unsqueeze(-1) - logits)).sum(-1) + z_loss * lse.square()
    loss = torch.where(counts, loss, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / (max(1, int(counts.sum())) if reduction == "mean" else 1)


def check_cross_entropy(shape, dtype, rule, device="cpu", layout="contiguous", inplace=False):
    for reduction in ("mean",) if rule else ("mean", "sum", "none"):
        logits = leaf(made(shape, dtype, device, layout) * 3)
        target = labels_for(shape[:-1], shape[-1], rule.get("ignore_index", -100), device)
        (loss,) = compare(
            lambda x, target=target, reduction=reduction: cross_entropy(
                x.clone(memory_format=torch.preserve_format),
                target,
                reduction=reduction,
                inplace_backward=inplace,
                **rule,
            ),
            lambda x, target=target, reduction=reduction: exact_cross_entropy(x, target, reduction, **rule),
            (logits,),
            dtype,
        )
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


LINEAR_SHAPES = ((1, 1, 1), (17, 16, 127), (5, 31, 1000), (0, 4, 17))


def check_linear_cross_entropy(shape, dtype, rule, device="cpu", with_bias=True, layout="contiguous", **options):
    rows, features, classes = shape
    for reduction in ("mean",) if rule else ("mean", "sum"):
        hidden = leaf(made((rows, features), dtype, device, layout))
        weight = leaf(made((classes, features), dtype, device, layout, scale=1 / math.sqrt(features)))
        bias = leaf(made((classes,), dtype, device)) if with_bias else None
        target = labels_for((rows,), classes, rule.get("ignore_index", -100), device)
        compare(
            lambda h, w, b, target=target, reduction=reduction: linear_cross_entropy(
                h, w, target, b, reduction=reduction, chunk_rows=6, **rule, **options
            ),
            lambda h, w, b, target=target, reduction=reduction: exact_cross_entropy(
                torch.nn.functional.linear(h, w, b), target, reduction, **rule
            ),
            (hidden, weight, bias),
            dtype,
            factor=2.0,
        )


def check_hidden_rows(device="cpu"):
    """Logits of -inf: an impossible label costs inf, an ignored one nothing, and no gradient is NaN."""
    inf = math.inf
    rows = [[-inf] * 4, [-inf, 1.0, 2.0, 3.0], [-inf, 1.0, 2.0, 3.0], [-inf] * 4]
    logits = torch.tensor(rows, device=device, requires_grad=True)
    target = torch.tensor([1, 1, 0, -100], device=device)
    smoothed = cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(smoothed.detach().cpu(), torch.tensor([inf, inf, inf, 0.0]))
    assert torch.autograd.grad(smoothed.sum(), logits)[0].isfinite().all()
    loss = cross_entropy(logits, target, reduction="none")
    expected = math.log(sum(math.exp(x) for x in (1, 2, 3))) - 1
    torch.testing.assert_close(loss.detach().cpu(), torch.tensor([inf, expected, inf, 0.0]))
    loss.sum().backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[3].any()
    p = torch.softmax(torch.tensor([1.0, 2.0, 3.0]), 0)
    torch.testing.assert_close(logits.grad[1].cpu(), torch.tensor([0.0, p[0] - 1, p[1], p[2]]))
    ignored = cross_entropy(logits, torch.full((4,), -100, device=device))
    assert ignored.item() == 0.0
    assert not torch.autograd.grad(ignored, logits)[0].any()
