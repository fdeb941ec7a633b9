"""Random models: a list of steps, each of which makes a value from earlier ones.

With `exact` models all numbers are small integers in double precision: sums do not depend on their order, so every plan must give
the bits that the model gives.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn

WIDTH = 4


@dataclass
class Parts:
    """What a module with several outputs returns."""

    low: torch.Tensor
    rest: dict


class Halves(nn.Module):
    """Several outputs, nested; one depends on the input alone."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, *, scale=1):
        low, high = self.project(x).chunk(2, dim=1)
        return Parts(low * scale, {"high": (high, x > 0)})


class Block(nn.Module):
    """Nested modules, an in-place activation, a skip connection."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.inner(x)


class Statistics(nn.Module):
    """Buffers: one written in place, one rebound, one read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("shift", torch.arange(float(WIDTH)), persistent=False)

    def forward(self, x):
        before = self.seen
        self.calls += 1
        self.seen = self.seen + x.detach().sum(dim=0)
        return x + self.shift - before.sign()


class Affine(nn.Module):
    """Parameters of its own, one of them shared with every other Affine."""

    def __init__(self, shared):
        super().__init__()
        self.scale, self.shared = nn.Parameter(torch.ones(WIDTH)), shared

    def forward(self, x):
        return x * self.scale + self.shared


class InPlace(nn.Module):
    """Writes into its argument."""

    def forward(self, x):
        return x.add_(1).clamp_(-8, 8)


def _write(a, b):
    """In place into a copy and through a view of it."""
    y = torch.empty_like(a)
    y[...] = a
    y[:, 0] = b[:, 1]
    y[:, 2:].neg_()
    return y


def _masked(a, b, tokens):
    mask = torch.arange(WIDTH, device=a.device) <= tokens % WIDTH
    return torch.where(mask, a, b)


def _frozen(a):
    with torch.no_grad():
        return a * 2 - 1


def _parts(halves, x, scale):
    parts = halves(x, scale=scale)
    high, positive = parts.rest["high"]
    return parts.low + high * positive


# name -> function of (model, own module, value, another value, tokens)
STEPS = {
    "linear": lambda model, own, a, b, t: own(a),
    "shared": lambda model, own, a, b, t: model.shared(a),
    "affine": lambda model, own, a, b, t: own(a),
    "block": lambda model, own, a, b, t: own(a),
    "parts": lambda model, own, a, b, t: _parts(own, a, 2),
    "statistics": lambda model, own, a, b, t: own(a),
    "shared statistics": lambda model, own, a, b, t: model.statistics(a),
    "in place": lambda model, own, a, b, t: own(a.clone()),
    "write": lambda model, own, a, b, t: _write(a, b),
    "add": lambda model, own, a, b, t: a + b,
    "subtract": lambda model, own, a, b, t: 3 - a.abs() - b,
    "multiply": lambda model, own, a, b, t: a.clamp(-8, 8) * b.clamp(-8, 8),
    "concatenate": lambda model, own, a, b, t: torch.cat([a, b], dim=1)[:, 1::2],
    "masked": lambda model, own, a, b, t: _masked(a, b, t),
    "embed": lambda model, own, a, b, t: own((t + a[:, :1].long()) % 5)[:, 0] + b,
    "tokens": lambda model, own, a, b, t: a * (t % 3).to(a.dtype),
    "constant": lambda model, own, a, b, t: torch.zeros_like(a).fill_(-2.0) + torch.arange(WIDTH).to(a.dtype),
    "detach": lambda model, own, a, b, t: a.detach() + b,
    "frozen": lambda model, own, a, b, t: _frozen(a),
    "turned": lambda model, own, a, b, t: a.flip(1).T.contiguous().T,
    "unused": lambda model, own, a, b, t: (own(a), b)[1],
}
_MAKERS = {
    "linear": lambda shared: nn.Linear(WIDTH, WIDTH),
    "affine": Affine,
    "block": lambda shared: Block(),
    "parts": lambda shared: Halves(),
    "statistics": lambda shared: Statistics(),
    "in place": lambda shared: InPlace(),
    "embed": lambda shared: nn.Embedding(5, WIDTH),
    "unused": lambda shared: nn.Linear(WIDTH, WIDTH),
}

# (step, which value, which other value); values count from the last one backwards
Step = tuple[str, int, int]


class RandomModel(nn.Module):
    """Runs the steps; returns the values at `outputs`, the last one and the tokens."""

    def __init__(self, steps: tuple[Step, ...], outputs: tuple[int, ...], *, exact: bool, seed: int, frozen: int = 0):
        super().__init__()
        self.steps, self.outputs = steps, outputs
        generator = torch.Generator().manual_seed(seed)
        bias = nn.Parameter(torch.ones(WIDTH))
        self.first, self.shared, self.statistics = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Statistics()
        self.layers = nn.ModuleList([_MAKERS.get(name, lambda shared: nn.Identity())(bias) for name, _, _ in steps])
        for parameter in self.parameters():
            with torch.no_grad():
                if exact:
                    parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        for parameter in list(self.parameters())[:frozen]:
            parameter.requires_grad_(False)
        if exact:
            self.double()

    def forward(self, x, tokens):
        values = [x, self.first(x)]
        for (name, left, right), layer in zip(self.steps, self.layers, strict=True):
            a, b = values[-1 - left % len(values)], values[-1 - right % len(values)]
            values.append(STEPS[name](self, layer, a, b, tokens))
        return {"last": values[-1], "others": [values[i % len(values)] for i in self.outputs], "tokens": tokens}


def inputs(batch: int, *, exact: bool, seed: int):
    """A batch for a random model."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (batch, 1), generator=generator)
    if exact:
        return (torch.randint(-3, 4, (batch, WIDTH), generator=generator).double(), tokens), {}
    return (torch.randn(batch, WIDTH, generator=generator), tokens), {}


def models(*, exact: bool):
    """Strategy for random models."""
    frequent = ["shared", "affine", "block", "add"]
    step = st.tuples(st.sampled_from([*STEPS, *frequent, *frequent]), st.integers(0, 2), st.integers(0, 5))
    return st.builds(
        RandomModel,
        st.lists(step, min_size=4, max_size=12).map(tuple),
        st.lists(st.integers(0, 10), max_size=2).map(tuple),
        exact=st.just(exact),
        seed=st.integers(0, 99),
        frozen=st.sampled_from([0, 0, 0, 1, 2, 4, 99]),
    )
