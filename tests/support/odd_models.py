"""Models that strain the recorder and the code generator; `CASES` has a factory and a batch for each."""

import collections
import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

L = nn.Linear
Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    more: dict


class ReturnsDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = L(4, 4), L(4, 4)

    def forward(self, x):
        return Result(self.left(x), {"pair": Pair(self.right(x), 3), "list": [None, (x,)]})


class NestedOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = ReturnsDataclass(), L(4, 4)

    def forward(self, x):
        found = self.inner(x)
        h = self.out(found.value) + found.more["pair"].first
        return {"h": h, "deep": Result(h * 2, {"x": found.more["list"][1][0] + 1})}


class TakesNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = L(4, 4)

    def forward(self, x, *, pair, options=None, **rest):
        a, (b, c) = pair
        return self.linear(x) + a * b + c + (options["k"] if options else 0) + rest.get("in", 0)


class KeywordArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = TakesNested(), TakesNested(), L(4, 4)

    def forward(self, x):
        h = self.a(x, pair=(x, (x, 2)), options={"k": x})
        return self.out(self.b(h, pair=(h, (x, 3)), **{"in": x}))


class WritesArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = L(4, 4)

    def forward(self, x):
        x.mul_(2)
        return self.linear(x)


class UsesWritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.out = L(4, 4), WritesArgument(), WritesArgument(), L(4, 4)

    def forward(self, x):
        h = self.first(x) + 1
        return self.out(self.b(self.a(h) + 1)) + h


class ReturnsAnything(nn.Module):
    """The same tensor twice, an input, a parameter, constants, None."""

    def __init__(self):
        super().__init__()
        self.a, self.b = L(4, 4), L(4, 4)

    def forward(self, x):
        h = self.b(self.a(x))
        return h, h, x, self.a.weight, {"again": h, "text": "t", "none": None, "number": 2.5}


class OddNames(nn.Module):
    """Names that collide with what generated code uses, keywords, and keys that are no identifiers."""

    def __init__(self):
        super().__init__()
        self.device, self.torch, self.F, self.function, self.importlib = (L(4, 4) for _ in range(5))
        self.add_module("lambda", L(4, 4))
        self.scales = nn.ParameterList([torch.randn(4) for _ in range(2)])
        self.shifts = nn.ParameterDict({"a-b": torch.randn(4), "in": torch.randn(4)})
        self.heads = nn.ModuleDict({"x-y": Halves(), "class": Halves(), "0": Halves()})
        self.x_output = Halves()

    def forward(self, print, len):
        x = self.device(print)
        x = self.torch(x) * self.scales[0] + self.shifts["a-b"]
        x = self.F(x * len) * self.scales[1] - self.shifts["in"]
        x = getattr(self, "lambda")(self.importlib(self.function(x)))
        for head in (*self.heads.values(), self.x_output):
            left, right = head(x)
            x = x + torch.cat([right, left], dim=1)
        return x


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = L(4, 4)

    def forward(self, x):
        return self.linear(x).chunk(2, dim=1)


class Frozen(nn.Module):
    """Frozen parameters at the start, in the middle, and one that is tied."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([L(4, 4) for _ in range(5)])
        for index in (0, 1, 3):
            self.layers[index].requires_grad_(False)
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.out = L(4, 4), nn.BatchNorm1d(4), L(4, 4)
        self.alias = self.a

    def forward(self, x):
        return self.out(self.norm(self.alias(self.norm(self.a(x)))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.qkv, self.out = L(8, 24), L(8, 3)

    def forward(self, x):
        h, weights = self.a(x, x, x)
        g, _ = self.b(h, x, h, need_weights=False)
        q, k, v = self.qkv(g).chunk(3, dim=-1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), weights


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 5, 2, batch_first=True, bidirectional=True)
        self.middle, self.cell, self.rnn = L(10, 3), nn.LSTMCell(3, 3), nn.RNN(3, 3, batch_first=True)

    def forward(self, x):
        h, last = self.gru(x)
        h = self.middle(h)
        state = (h[:, 0], h[:, 1])
        for step in range(h.shape[1]):
            state = self.cell(h[:, step], state)
        # The slice makes the gradient of `h` contiguous. Else it would have the layout that the RNN's own transposition leaves,
        # which does not cross between stages, and in which the bias of `middle` sums in another order.
        return self.rnn(h[:, 1:])[0], state, last


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.a, self.b, self.out = L(4, 4), nn.Sequential(L(4, 4), nn.Tanh()), L(4, 4), L(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        h = checkpoint.checkpoint(self.a, self.first(x), use_reentrant=self.use_reentrant)
        return self.out(checkpoint.checkpoint(lambda y: self.b(y).relu() + y, h, use_reentrant=self.use_reentrant))


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = L(4, 4), L(4, 4), L(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(self.a(x))
            with torch.autocast("cpu", enabled=False):
                h = h.float() * 2
            with torch.no_grad():
                still = self.b(h)
                with torch.enable_grad():
                    moving = self.out(h)
        return self.out(h.float()) + still.float() + moving.float()


class Products(nn.Module):
    """Einsum, complex numbers, a buffer outside the state dict, a tensor attribute."""

    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 2, 2)), nn.Parameter(torch.randn(2, 2, 4))
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.extra = {"k": torch.randn(4)}

    def forward(self, x):
        h = torch.einsum("bi,ihd->bhd", x, self.w)
        z = torch.view_as_complex(h) * torch.polar(torch.ones(2), torch.arange(2.0))
        h = torch.einsum("bhd,hdi->bi", torch.view_as_real(z).unsqueeze(1).expand(-1, 2, -1, -1)[:, 0], self.v)
        return h * self.table + self.extra["k"] + torch.einsum("bi,bi->b", h, h)[:, None]


class Integers(nn.Module):
    """Whole numbers and masks that depend on inputs and on parameters; a result with field names."""

    def __init__(self):
        super().__init__()
        self.e, self.f, self.out = nn.Embedding(7, 4), nn.Embedding(7, 4), L(4, 4)

    def forward(self, ids, x):
        mask = ids > 2
        h = self.e(ids) * mask[..., None]
        key = h.sum((1, 2)).abs().long() % 7
        g = self.f(key)
        chosen = g.argmax(-1)
        scores = self.out(h.sum(1) + g) + x
        return scores.gather(1, chosen[:, None]), chosen, mask, scores.topk(2)


class Writes(nn.Module):
    """Assignments to items, also of values that require grad into values that do not; views, `out=`."""

    def __init__(self):
        super().__init__()
        self.a, self.out = L(4, 4), L(4, 4)

    def forward(self, batch):
        h = self.a(batch["x"][0])
        y = torch.empty_like(h)
        y[...] = h
        y[:, 1:3] += 1.0
        y[y > 0.5] = 0.25
        z = torch.zeros(h.shape[0], 4)
        z[:, 0].copy_(h[:, 1])
        kept = torch.empty_like(h)
        with torch.no_grad():
            torch.mul(h.detach(), 2.0, out=kept)
        return self.out(y) + z + kept.clamp_(max=0.5), y.T


class GrowingList(nn.Module):
    """Modules that append to a list they are given."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = L(4, 4)

        def forward(self, x, found):
            found.append(self.linear(x))
            return found[-1] + x

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = self.Inner(), self.Inner(), L(4, 4)

    def forward(self, x):
        found = []
        return self.out(self.b(self.a(x, found), found) + sum(found))


class Remembers(nn.Module):
    """State between modules and calls: tables made at first use, attributes read elsewhere, a late buffer."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.table = L(4, 4), None

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(4.0).cos()
            if "late" not in self._buffers:
                self.register_buffer("late", torch.arange(4.0).sin())
            self.loss = self.linear(x).square().mean()
            return self.linear(x) * self.table + self.late

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = self.Inner(), self.Inner(), L(4, 4)

    def forward(self, x):
        return self.out(self.b(self.a(x))) + 0.1 * (self.a.loss + self.b.loss)


class MovingAverage(nn.Module):
    """Rebound buffers, read before and after by the module and by its parent."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = L(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            h = self.linear(x)
            before = self.mean
            self.mean = 0.5 * self.mean + h.detach().mean(0)
            self.count += 1
            return h - before + self.mean, self.count

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = self.Inner(), self.Inner(), L(4, 4)

    def forward(self, x):
        before = self.a.mean
        h, n = self.a(x)
        h, m = self.b(h * before + h)
        return self.out(h) + self.a.mean, n * m


class Borrowed(nn.Module):
    """A module that uses another's parameters without owning them."""

    class Inner(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.other, self.out = [other], L(4, 4)

        def forward(self, x):
            return F.linear(self.out(x), self.other[0].weight) + self.other[0](x)

    def __init__(self):
        super().__init__()
        self.a = L(4, 4)
        self.b = self.Inner(self.a)

    def forward(self, x):
        return self.b(self.a(x))


class Operators(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = L(4, 4), L(4, 4)

    def forward(self, x):
        h = self.a(x)
        y = torch.where(h > float("-inf"), h, torch.full_like(h, float("nan"))).masked_fill(h < -1e30, float("inf"))
        y = 2 ** y.clamp(-1, 1) + (-1.5 - y) + -1 / (y.abs() + 1) + y**-2 - (-y) @ self.b.weight.mT
        y = y.to(dtype=torch.float64, device=x.device).float() + torch.full_like(h, -3)
        return self.b(y)[..., 1:-1], (~(y > 0)) & (y != 1) | (y > 1), torch.arange(4, device=x.device)[None, ::2]


def _hooked():
    model = nn.Sequential(L(4, 4), L(4, 4), L(4, 4))
    model[1].register_forward_hook(lambda module, args, output: output * 2 + module.bias)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


def _rows():
    return (torch.randn(8, 4),), {}


def _sequences(width):
    return lambda: ((torch.randn(8, 5, width),), {})


# name -> (model factory, batch factory)
CASES = {
    "nested outputs": (NestedOutputs, _rows),
    "keyword arguments": (KeywordArguments, _rows),
    "writes its argument": (UsesWritten, _rows),
    "writes the model's input": (lambda: nn.Sequential(WritesArgument(), L(4, 4), L(4, 4)), _rows),
    "returns anything": (ReturnsAnything, _rows),
    "stages without parameters": (lambda: nn.Sequential(nn.ReLU(), nn.Tanh(), L(4, 4), nn.GELU()), _rows),
    "odd names": (OddNames, lambda: ((torch.randn(8, 4), torch.randn(8, 4)), {})),
    "frozen": (Frozen, _rows),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(L(4, 4)), parametrizations.spectral_norm(L(4, 4)), L(4, 4)),
        _rows,
    ),
    "called twice": (CalledTwice, _rows),
    "attention": (Attention, _sequences(8)),
    "transformer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 3, enable_nested_tensor=False
        ),
        _sequences(8),
    ),
    "recurrent": (Recurrent, _sequences(4)),
    "checkpoint": (lambda: Checkpointed(False), _rows),
    "reentrant checkpoint": (lambda: Checkpointed(True), _rows),
    "autocast": (Autocast, _rows),
    "products": (Products, _rows),
    "integers": (Integers, lambda: ((torch.randint(0, 7, (8, 3)), torch.randn(8, 4)), {})),
    "writes": (Writes, lambda: ((), {"batch": {"x": [torch.randn(8, 4)]}})),
    "growing list": (GrowingList, _rows),
    "remembers": (Remembers, _rows),
    "moving average": (MovingAverage, _rows),
    "borrowed": (Borrowed, _rows),
    "operators": (Operators, _rows),
    "hooks": (_hooked, _rows),
}


def build(name):
    """A model and its batch; the same bits every time."""
    torch.manual_seed(0)
    make, batch = CASES[name]
    return make(), batch()
