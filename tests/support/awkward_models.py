"""Models that are hard to record: data from outside, TorchScript, hooks, packed sequences, overrides; `CASES` has a factory and a batch
for each. All names lead to what they name, as in a user's module."""

import warnings

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn
from torch.overrides import resolve_name

WIDTH = 4
TABLE = torch.arange(float(WIDTH))


def _layers(count):
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])


class ForeignData(nn.Module):
    """Arrays, a global tensor, numbers made by numpy."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = _layers(4), numpy.linspace(0.5, 1, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * torch.from_numpy(numpy.cos(self.scale)).to(x) + TABLE
        return x * torch.as_tensor(self.scale, dtype=x.dtype) + torch.tensor(numpy.eye(WIDTH)[0]).float()


def compiled(code):
    """TorchScript, which torch has deprecated and people still have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(code)


def _traced(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, torch.randn(2, WIDTH))


@compiled
def scripted(x: torch.Tensor, scale: float):
    if x.dim() > 1:
        x = x * scale
    return torch.relu(x) + 1


class ScriptFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = _layers(4)

    def forward(self, x):
        for layer in self.layers:
            x = scripted(layer(x), 1.5)
        return x


class ScriptModules(nn.Module):
    """Modules that TorchScript has compiled and traced; not among the cases, as copies of them have no gradients."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    def __init__(self):
        super().__init__()
        self.first, self.compiled, self.traced = nn.Linear(WIDTH, WIDTH), compiled(self.Part()), _traced(self.Part())

    def forward(self, x):
        return self.traced(self.compiled(self.first(x)))


class Halves(torch.autograd.Function):
    """Two results, of which a loss may use one: the other input then has no gradient."""

    @staticmethod
    def forward(x, y):
        return x * 2, y * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, of_x, of_y):
        return None if of_x is None else of_x * 2, None if of_y is None else of_y * 3


class NoGradient(nn.Module):
    """A custom function gives None for one of its inputs, which other modules have computed."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        hidden = self.first(x)
        one, other = Halves.apply(hidden, self.second(hidden.detach()))
        return self.last(self.third(one)) + other.detach()


def halved(gradient):
    return gradient / 2


class TensorHooks(nn.Module):
    """Hooks on activations, which change gradients."""

    def __init__(self):
        super().__init__()
        self.layers = _layers(5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(halved)
        return x


class OwnParameters(nn.Module):
    """No modules, only parameters."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 2 for _ in range(5)])

    def forward(self, x):
        for weight in self.weights:
            x = F.gelu(F.linear(x, weight))
        return x


class PackedSequences(nn.Module):
    """Lengths among the inputs decide what recurrent layers walk over."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(2 * WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(self.inner(x), lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.lstm(packed)
        packed, last = self.gru(packed)
        x, _ = rnn.pad_packed_sequence(packed, batch_first=True)
        return self.out(x) + last.mean()


class SizesAsTensors(nn.Module):
    """A parameter resized to what an input says: tensors are where numbers are expected."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Parameter(torch.randn(1, 1, 3)), _layers(4)

    def forward(self, x, lengths):
        for layer in self.layers:
            x = layer(x)
        return x * F.interpolate(self.table, size=(lengths.max(),), mode="linear").sum()


class Boxed:
    """A value with torch functions of its own, which is no tensor."""

    def __init__(self, value):
        self.value = value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        values = [arg.value if isinstance(arg, Boxed) else arg for arg in args]
        assert resolve_name(func)
        return Boxed(func(*values, **(kwargs or {})))


class Boxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = _layers(4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.add(F.linear(Boxed(x), layer.weight, layer.bias), 1).value
        return x


class SparseProducts(nn.Module):
    """Sparse matrices made of a parameter, which do not travel between stages."""

    def __init__(self):
        super().__init__()
        self.layers, self.weight = _layers(4), nn.Parameter(torch.randn(3))
        self.register_buffer("edges", torch.tensor([[0, 1, 2], [1, 2, 0]]))

    def forward(self, x):
        for layer in self.layers:
            links = torch.sparse_coo_tensor(self.edges, self.weight, (3, 3))
            rows = layer(x).transpose(0, 1).reshape(3, -1)
            x = torch.sparse.mm(links, rows).view(3, -1, WIDTH).transpose(0, 1) + x
        return x


class Gradients(nn.Module):
    """Transforms inside of modules."""

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.energy = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x):
            h = self.linear(x)
            slope = torch.func.grad(lambda value: self.energy(value.tanh()).sum())(h)
            return h - slope + torch.vmap(torch.dot)(h, x)[:, None]

    def __init__(self):
        super().__init__()
        self.steps, self.out = nn.ModuleList([self.Step() for _ in range(3)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.out(x)


class ResetState(nn.Module):
    """A module that keeps a state, and another one that resets it before each call."""

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.state = nn.Linear(WIDTH, WIDTH), None

        def forward(self, x):
            h = self.linear(x)
            self.state = h if self.state is None else h + self.state
            return self.state * 2

    def __init__(self):
        super().__init__()
        self.first, self.unit, self.last = nn.Linear(WIDTH, WIDTH), self.Unit(), _layers(2)

    def forward(self, x):
        self.unit.state = None
        x = self.unit(self.first(x))
        for layer in self.last:
            x = layer(x)
        return x


def _rows():
    return (torch.randn(8, WIDTH),), {}


def _sequences():
    return (torch.randn(8, 6, WIDTH), torch.tensor([6, 3] * 4)), {}


CASES = {
    "no gradient": (NoGradient, _rows),
    "foreign data": (ForeignData, _rows),
    "script function": (ScriptFunction, _rows),
    "tensor hooks": (TensorHooks, _rows),
    "own parameters": (OwnParameters, _rows),
    "packed sequences": (PackedSequences, _sequences),
    "sizes as tensors": (SizesAsTensors, _sequences),
    "boxes": (Boxes, _rows),
    "sparse products": (SparseProducts, lambda: ((torch.randn(8, 3, WIDTH),), {})),
    "gradients": (Gradients, _rows),
    "reset state": (ResetState, _rows),
}


def build(name):
    """A model and its batch; the same bits every time."""
    torch.manual_seed(0)
    make, batch = CASES[name]
    return make(), batch()
