"""Modules that read something besides their inputs, and what a script may do to it between two steps.

`READS` has them by name. `change(rng)` changes what a module reads: to another value, back to one of before, or to something that makes no
difference. The same rng makes the same change. `setup` sets state of the process (globals, classes, functions), too: a new model begins
anew.

    values      of attributes: numbers, flags, names, tensors, modes, modules       here
    holders     objects, containers, functions, classes and modules of Python       `effect_holders`
    python      imports, metaclasses, special methods, tensors under two names, locks, weak references      `effect_python`

To extend: write a Reader with `setup`, `act` and `change`, and `@reads` above it.
"""

import enum
import operator
import types

import numpy
import torch
import torch.nn.functional as F
from effect_base import WIDTH, AtModel, Layer, linear, reads
from torch import nn

NUMBERS = (0.5, 0.75, -1.25, 2.0, 2)


class Reader(Layer):
    """Base: a layer whose `act` reads what `change` changes."""

    def change(self, rng):
        raise NotImplementedError


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


# -- plain values ------------------------------------------------------------------------------------------------------


@reads
class Number(Reader):
    def setup(self):
        self.beta, self.unread = 0.5, 0

    def act(self, h):
        return h * self.beta

    def change(self, rng):
        setattr(self, rng.choice(("beta", "beta", "unread")), rng.choice(NUMBERS))


@reads
class Flag(Reader):
    def setup(self):
        self.flag = True

    def act(self, h):
        return h.relu() if self.flag else h * 2

    def change(self, rng):
        self.flag = rng.choice((True, False, 1, None))


@reads
class Text(Reader):
    def setup(self):
        self.activation = "tanh"

    def act(self, h):
        return getattr(torch, self.activation)(h)

    def change(self, rng):
        self.activation = rng.choice(("tanh", "sigmoid", "relu"))


@reads
class Optional(Reader):
    def setup(self):
        self.scale = None

    def act(self, h):
        return h if self.scale is None else h * self.scale

    def change(self, rng):
        self.scale = rng.choice((None, 0.5, 3.0))


@reads
class Tuple(Reader):
    def setup(self):
        self.pair = (0.5, (1, "add"))

    def act(self, h):
        scale, (shift, how) = self.pair
        return getattr(h * scale, how)(shift)

    def change(self, rng):
        self.pair = (rng.choice(NUMBERS), (rng.choice((1, 1.0, 2)), rng.choice(("add", "sub"))))


@reads
class NotThere(Reader):
    """An attribute that comes and goes."""

    def act(self, h):
        h = h + getattr(self, "shift", 0.0)
        return h * self.scale if hasattr(self, "scale") else h

    def change(self, rng):
        name = rng.choice(("shift", "scale"))
        if name in vars(self):
            delattr(self, name)
        else:
            setattr(self, name, rng.choice(NUMBERS))


@reads
class ComputedName(Reader):
    def setup(self):
        self.which, self.scale_a, self.scale_b = "a", 0.5, 1.5

    def act(self, h):
        return h * getattr(self, "scale_" + self.which)

    def change(self, rng):
        if rng.random() < 0.5:
            self.which = rng.choice("ab")
        else:
            setattr(self, rng.choice(("scale_a", "scale_b")), rng.choice(NUMBERS))


@reads
class AllOfItself(Reader):
    """Reads `vars(self)`."""

    def setup(self):
        self.scale_a, self.scale_b = 0.5, 1.5

    def act(self, h):
        for name, value in vars(self).items():
            h = h * value if name.startswith("scale_") else h
        return h

    def change(self, rng):
        vars(self)[f"scale_{rng.choice('abc')}"] = rng.choice(NUMBERS)


@reads
class ThroughAttrgetter(Reader):
    def setup(self):
        self.config = types.SimpleNamespace(scale=0.5)

    def act(self, h):
        return h * operator.attrgetter("config.scale")(self)

    def change(self, rng):
        self.config.scale = rng.choice(NUMBERS)


@reads
class Window(Reader):
    """Slices, dtypes, sizes."""

    def setup(self):
        self.window, self.dtype, self.dim = slice(0, 2), torch.float32, 0

    def act(self, h):
        part = h[:, self.window].to(self.dtype).mean(self.dim, keepdim=True)
        return h + part.sum().to(h.dtype)

    def change(self, rng):
        name = rng.choice(("window", "dtype", "dim"))
        values = {"window": (slice(0, 2), slice(1, 4)), "dtype": (torch.float32, torch.float64), "dim": (0, 1, (0, 1))}
        setattr(self, name, rng.choice(values[name]))


class Mode(enum.Enum):
    """How `Member` activates."""

    TANH = "tanh"
    RELU = "relu"


@reads
class Member(Reader):
    def setup(self):
        self.mode = Mode.TANH

    def act(self, h):
        return h.relu() if self.mode is Mode.RELU else getattr(h, self.mode.value)() * 2

    def change(self, rng):
        self.mode = rng.choice(tuple(Mode))


@reads
class Numpys(Reader):
    def setup(self):
        self.scale, self.table = numpy.float64(0.5), numpy.array([1.0, 2.0])

    def act(self, h):
        return h * float(self.scale) + float(self.table[1])

    def change(self, rng):
        if rng.random() < 0.5:
            self.scale = numpy.float64(rng.choice(NUMBERS))
        else:
            self.table[rng.choice((0, 1))] = rng.choice(NUMBERS)


# -- tensors -----------------------------------------------------------------------------------------------------------


@reads
class PlainTensor(Reader):
    def setup(self):
        self.mask = row(1, 2, 3, 4)

    def act(self, h):
        return h * self.mask

    def change(self, rng):
        how = rng.choice(("in place", "another", "shape", "data"))
        if how == "in place":
            self.mask.mul_(0.5)
        elif how == "data":
            self.mask.data = self.mask * 2
        else:
            self.mask = row(*(rng.choice(NUMBERS) for _ in range(WIDTH if how == "another" else 1)))


@reads
class TensorsInContainers(Reader):
    def setup(self):
        self.tables = {"a": row(1), "b": [row(1, 2, 3, 4), row(2)]}

    def act(self, h):
        return h * self.tables["a"] + self.tables["b"][0]

    def change(self, rng):
        how = rng.randrange(4)
        if how == 0:
            self.tables["a"] = row(rng.choice(NUMBERS))
        elif how == 1:
            self.tables["b"][0].add_(1)
        elif how == 2:
            self.tables["b"].reverse()
        else:
            self.tables = {"a": row(*range(WIDTH)), "b": [row(0)]}


@reads
class BufferOfScript(Reader):
    def setup(self):
        self.register_buffer("scale", row(1, 2, 3, 4), persistent=False)

    def act(self, h):
        return h * self.scale

    def change(self, rng):
        how = rng.randrange(4)
        if how == 0:
            self.scale.mul_(0.5)
        elif how == 1:
            self.scale = row(*(rng.choice(NUMBERS) for _ in range(WIDTH)))
        elif how == 2:
            self.scale = row(rng.choice(NUMBERS))
        else:
            self.scale.data = self.scale * 2


@reads
class OptionalBuffer(Reader):
    def setup(self):
        self.register_buffer("shift", None)

    def act(self, h):
        return h if self.shift is None else h + self.shift

    def change(self, rng):
        self.shift = None if self.shift is not None and rng.random() < 0.5 else row(rng.choice(NUMBERS))


@reads
class AskedBuffer(Reader):
    """Python goes by a buffer's value."""

    def setup(self):
        self.register_buffer("limit", row(1))

    def act(self, h):
        return h * 2 if self.limit.item() > 0 else h.relu()

    def change(self, rng):
        self.limit.fill_(rng.choice((-1, 1, 2)))


@reads
class WrittenParameter(Reader):
    def setup(self):
        self.scale = nn.Parameter(row(1, 2, 3, 4))

    def act(self, h):
        return h * self.scale

    def change(self, rng):
        with torch.no_grad():
            self.scale.copy_(row(*(rng.choice(NUMBERS) for _ in range(WIDTH))))


# -- modes, modules ----------------------------------------------------------------------------------------------------


@reads
class DropoutsP(Reader):
    """With 0 and 1 no random numbers."""

    def setup(self):
        self.dropout = nn.Dropout(0.0)

    def act(self, h):
        return h + self.dropout(h)

    def change(self, rng):
        if rng.random() < 0.5:
            self.dropout.p = rng.choice((0.0, 1.0))
        else:
            self.dropout.train(rng.random() < 0.5)


@reads
class ModeOfOne(Reader):
    def setup(self):
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def act(self, h):
        h = self.norm(h)
        return h * 2 if self.training else h

    def change(self, rng):
        rng.choice((self, self.norm)).train(rng.random() < 0.5)


@reads
class OptionsOfANorm(Reader):
    def setup(self):
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def act(self, h):
        return self.norm(h)

    def change(self, rng):
        name = rng.choice(("momentum", "eps", "track_running_stats"))
        values = {"momentum": (0.1, 0.5, None), "eps": (1e-5, 0.1), "track_running_stats": (True, False)}
        setattr(self.norm, name, rng.choice(values[name]))


@reads
class Frozen(Reader):
    def setup(self):
        self.other = nn.Sequential(linear(), nn.Tanh(), linear())

    def act(self, h):
        return self.other(h)

    def change(self, rng):
        rng.choice((self.other, self.other[2], self.other[0].weight)).requires_grad_(rng.random() < 0.5)


@reads
class AsksWhetherFrozen(Reader):
    def act(self, h):
        return h * 2 if self.linear.weight.requires_grad else h

    def change(self, rng):
        self.linear.weight.requires_grad_(rng.random() < 0.5)


def _activation(rng):
    return rng.choice((nn.Tanh, nn.ReLU, nn.Sigmoid, lambda: nn.LeakyReLU(0.3), nn.Identity))()


@reads
class Activation(Reader):
    def setup(self):
        self.activation, self.rest = nn.Tanh(), nn.Sequential(nn.Sigmoid(), nn.LeakyReLU(0.1))

    def act(self, h):
        h = self.rest(self.activation(h))
        return h + 1 if isinstance(self.activation, nn.ReLU) else h

    def change(self, rng):
        how = rng.randrange(4)
        if how == 0:
            self.activation = _activation(rng)
        elif how == 1:
            self.rest[0] = _activation(rng)
        elif how == 2:
            self.rest.append(_activation(rng))
        else:
            self.rest[1] = nn.LeakyReLU(rng.choice((0.1, 0.2)))


@reads
class OrderOfModules(Reader):
    def setup(self):
        self.some = nn.ModuleList((nn.Tanh(), nn.Softplus(), nn.SiLU()))
        self.named = nn.ModuleDict({"a": nn.Sigmoid(), "b": nn.LeakyReLU(0.2)})

    def act(self, h):
        for module in (*self.some, *self.named.values()):
            h = module(h)
        return h

    def change(self, rng):
        if rng.random() < 0.5:
            self.some[0], self.some[2] = self.some[2], self.some[0]
        else:
            self.named["a"] = self.named.pop("a")


@reads
class OrderByNumbers(Reader):
    def setup(self):
        self.some, self.order = nn.ModuleList(linear() for _ in range(3)), [0, 1, 2]

    def act(self, h):
        for number in self.order:
            h = self.some[number](h).tanh()
        return h

    def change(self, rng):
        rng.shuffle(self.order)


@reads
class OwnForward(Reader):
    """A `forward` that belongs to one instance."""

    def setup(self):
        self.inner = linear()

    def act(self, h):
        return self.inner(h)

    def change(self, rng):
        how = rng.randrange(4)
        if how == 0:
            self.inner.forward = lambda h: h * 2
        elif how == 1:
            self.inner.forward = types.MethodType(_doubled, self.inner)
        elif how == 2:
            self.act = types.MethodType(_halved, self)
        else:
            vars(self.inner).pop("forward", None)
            vars(self).pop("act", None)


def _doubled(module, h):
    return F.linear(h, module.weight) * 2


def _halved(module, h):
    return module.inner(h) * 0.5


@reads
class ClassOfAModule(Reader):
    def setup(self):
        self.inner = linear()

    def act(self, h):
        return self.inner(h)

    def change(self, rng):
        self.inner.__class__ = rng.choice((nn.Linear, TwiceLinear))


class TwiceLinear(nn.Linear):
    """What a linear map may become."""

    def forward(self, h):
        return super().forward(h) * 2


@reads
class ReadsHead(AtModel):
    """Another module's attribute."""

    def at_model(self, model):
        self.borrowed = [model.head]
        model.head.scale = 0.5

    def act(self, h):
        return h * self.borrowed[0].scale

    def change(self, rng):
        self.borrowed[0].scale = rng.choice(NUMBERS)
