"""Buffers, memory that is shared, weights of others, hooks of modules, and results that nobody uses: see `effect_models`."""

import warnings

import torch
import torch.nn.functional as F
from effect_base import EQUAL, REFUSED, WIDTH, AtModel, Layer, effect, linear
from torch import nn
from torch.nn.utils import parametrize

# -- writes into buffers -----------------------------------------------------------------------------------------------


@effect(EQUAL)
class Counts(Layer):
    def setup(self):
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def act(self, h):
        self.calls += 1
        return h + self.calls


@effect(EQUAL)
class Rebinds(Layer):
    def setup(self):
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def act(self, h):
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(dim=0)
        return h * self.mean


@effect(EQUAL)
class Normalises(Layer):
    def setup(self):
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def act(self, h):
        return self.norm(h)


@effect(REFUSED)
class OverwritesFactor(Layer):
    """The backward of one microbatch would need what the next one has overwritten."""

    def setup(self):
        self.register_buffer("mean", torch.ones(WIDTH, dtype=torch.float64))

    def act(self, h):
        self.mean.data.mul_(0.5).add_(h.detach().mean(dim=0))
        return h * self.mean


@effect(EQUAL)
class OverwritesFactorCopied(Layer):
    def setup(self):
        self.register_buffer("mean", torch.ones(WIDTH, dtype=torch.float64))

    def act(self, h):
        self.mean.data.mul_(0.5).add_(h.detach().mean(dim=0))
        return h * self.mean.clone()


@effect(REFUSED)
class OverwritesFactorOfView(OverwritesFactor):
    """What needs it comes in by a view, and by a write into what required no grad."""

    def act(self, h):
        self.mean.data.mul_(0.5).add_(h.detach().mean(dim=0))
        table = torch.zeros(2, *h.shape, dtype=h.dtype)
        lower = table[1:]
        table[1] = h * self.mean
        return h + lower[0]


@effect(REFUSED)
class LeavesGraph(Layer):
    """The next call would differentiate through this one, but for a line that a recording cannot see: it does nothing then."""

    def setup(self):
        self.register_buffer("mean", torch.ones(WIDTH, dtype=torch.float64))

    def act(self, h):
        self.mean.detach_().fill_(1.0)
        self.mean.mul_(1 + h.mean(dim=0))
        return h * self.mean.clone()


@effect(EQUAL)
class LeavesGraphBehind(Layer):
    """The next call lets go of the graph that this one leaves."""

    def setup(self):
        self.register_buffer("mean", torch.ones(WIDTH, dtype=torch.float64))

    def act(self, h):
        self.mean = 0.5 * self.mean.detach() + 0.5 * h.mean(dim=0)
        return h * self.mean


@effect(EQUAL)
class LeavesGraphUnread(Layer):
    """What is written into the buffer is kept for others to look at."""

    def setup(self):
        self.register_buffer("mean", torch.ones(WIDTH, dtype=torch.float64))

    def act(self, h):
        out = h * self.mean.detach().clone()
        self.mean.copy_(h.mean(dim=0))
        return out


@effect(EQUAL)
class OverwritesCodebook(Layer):
    """The nearest of some vectors that follow what comes: their distances are differentiable, and nobody differentiates them."""

    def setup(self):
        self.register_buffer("codes", torch.rand(3, WIDTH, dtype=torch.float64))

    def act(self, h):
        nearest = torch.cdist(h, self.codes).argmin(dim=1)
        chosen = self.codes[nearest].clone()
        self.codes.data.mul_(0.9).add_(0.1 * h.detach().mean(dim=0))
        return h + (chosen - h).detach() * 0.5


# -- memory that is shared ---------------------------------------------------------------------------------------------


@effect(EQUAL)
class ViewsOfABuffer(Layer):
    def setup(self):
        self.register_buffer("table", torch.ones(WIDTH + 1, dtype=torch.float64))
        self.register_buffer("window", self.table[1:])

    def act(self, h):
        h = h + self.window
        with torch.no_grad():
            self.table.add_(1)
        return h + self.window.mean()


@effect(EQUAL)
class AttributeOfABuffer(Layer):
    def setup(self):
        self.register_buffer("table", torch.ones(WIDTH + 1, dtype=torch.float64))
        self.window, self.windows = self.table[1:], [self.table[:-1]]

    def act(self, h):
        with torch.no_grad():
            self.table.add_(1)
        return h + self.window + self.windows[0]


@effect(EQUAL)
class BufferOfAnother(AtModel):
    """A module writes into memory that the head reads, which comes last."""

    def setup(self):
        self.register_buffer("table", torch.ones(WIDTH, dtype=torch.float64))

    def at_model(self, model):
        model.head = Shifted(model.head, self.table.view(WIDTH))

    def act(self, h):
        with torch.no_grad():
            self.table.add_(0.5)
        return h


class Shifted(nn.Module):
    def __init__(self, inner, shift):
        super().__init__()
        self.inner = inner
        self.register_buffer("shift", shift)

    @property
    def weight(self):
        return self.inner.weight

    def forward(self, x):
        return self.inner(x) + self.shift


@effect(REFUSED)
class BufferOfAParameter(Layer):
    def setup(self):
        self.register_buffer("shadow", self.linear.bias.data[1:])

    def act(self, h):
        return h + self.shadow.sum()


@effect(REFUSED)
class AttributeOfAParameter(Layer):
    def setup(self):
        self.shadow = self.linear.bias.detach()

    def act(self, h):
        return h + self.shadow


@effect(REFUSED)
class ParametersOfOneMemory(Layer):
    def setup(self):
        self.other = linear()
        self.other.weight.data = self.linear.weight.data

    def act(self, h):
        return self.other(h)


@effect(EQUAL)
class ParametersOfAFlatOne(Layer):
    """Side by side in one storage, they have nothing to do with each other."""

    def setup(self):
        flat = torch.rand(2 * WIDTH, dtype=torch.float64)
        self.scale, self.shift = nn.Parameter(flat[:WIDTH]), nn.Parameter(flat[WIDTH:])

    def act(self, h):
        return h * self.scale + self.shift


@effect(REFUSED)
class ComputedBuffer(Layer):
    """Gradients flow through it into a parameter."""

    def setup(self):
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("computed", self.scale[:])

    def act(self, h):
        return h * self.computed


@effect(REFUSED)
class TrainedAttribute(Layer):
    def setup(self):
        self.secret = [torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)]

    def act(self, h):
        return h * self.secret[0]


# -- other weights than the module's own -------------------------------------------------------------------------------


@effect(EQUAL)
class CallsWithOthers(Layer):
    """The same module with two sets of weights, neither of them computed."""

    def setup(self):
        self.inner, self.others = linear(), nn.ParameterList(p.detach().clone() for p in linear().parameters())

    def act(self, h):
        weights = dict(zip(("weight", "bias"), self.others, strict=True))
        return self.inner(h) + torch.func.functional_call(self.inner, weights, (h,))


@effect(EQUAL)
class CallsWithComputed(Layer):
    def setup(self):
        self.inner = linear()

    def act(self, h):
        weights = {name: parameter * 2 for name, parameter in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (h,)) + self.inner(h)


@effect(EQUAL)
class CallsWithOtherBuffers(Layer):
    def setup(self):
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.register_buffer("spare", torch.zeros(WIDTH, dtype=torch.float64))

    def act(self, h):
        return torch.func.functional_call(self.norm, {"running_mean": self.spare}, (h,)) + self.norm(h)


@effect(EQUAL)
class SwapsOwn(Layer):
    """Two weights of one module change places for a call."""

    def setup(self):
        self.inner = nn.Sequential(linear(), nn.Tanh(), linear())

    def act(self, h):
        weights = {"0.weight": self.inner[2].weight, "2.weight": self.inner[0].weight}
        return self.inner(h) * torch.func.functional_call(self.inner, weights, (h,))


@effect(EQUAL)
class AssignsForAWhile(Layer):
    def setup(self):
        self.inner, self.other = linear(), linear()

    def act(self, h):
        own = self.inner.weight
        self.inner.weight = self.other.weight
        h = self.inner(h)
        self.inner.weight = own
        return self.inner(h)


@effect(REFUSED)
class AssignsForGood(Layer):
    def setup(self):
        self.inner, self.other = linear(), linear()

    def act(self, h):
        self.inner.weight = self.other.weight
        return self.inner(h)


@effect(EQUAL)
class UsesChildsWeight(Layer):
    def setup(self):
        self.inner = linear()

    def act(self, h):
        return F.linear(self.inner(h), self.inner.weight)


@effect(EQUAL)
class UsesOthersWeight(AtModel):
    """A weight that the module has no name for."""

    def at_model(self, model):
        self.borrowed = [model.head]

    def act(self, h):
        return F.linear(h, self.borrowed[0].weight)


@effect(EQUAL)
class CallsOther(AtModel):
    def at_model(self, model):
        self.borrowed = [model.layers[0].linear]

    def act(self, h):
        return self.borrowed[0](h)


@effect(EQUAL)
class CallsForwardOfAClass(Layer):
    def setup(self):
        self.inner = linear()

    def act(self, h):
        return nn.Linear.forward(self.inner, h) + nn.Identity.__call__(nn.Identity(), h)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


@effect(EQUAL)
class Parametrized(Layer):
    def setup(self):
        self.inner = parametrize.register_parametrization(linear(), "weight", Doubled())

    def act(self, h):
        with parametrize.cached():
            return self.inner(self.inner(h))


@effect(EQUAL)
class WeightNorm(Layer):
    def setup(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.old = nn.utils.weight_norm(linear())
        self.new = nn.utils.parametrizations.weight_norm(linear())

    def act(self, h):
        return self.new(self.old(h))


@effect(EQUAL)
class SpectralNorm(Layer):
    def setup(self):
        self.old = nn.utils.spectral_norm(linear())

    def act(self, h):
        return self.old(h)


# -- hooks of modules and parameters -----------------------------------------------------------------------------------


@effect(EQUAL)
class FullBackwardHook(Layer):
    def setup(self):
        self.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(g if g is None else g * 2 for g in inputs)
        )


@effect(EQUAL)
class FullBackwardPreHook(Layer):
    def setup(self):
        self.register_full_backward_pre_hook(lambda module, outputs: tuple(g * 2 for g in outputs))


@effect(EQUAL)
class HookOfAnInner(Layer):
    def setup(self):
        self.linear.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(g if g is None else g * 2 for g in inputs)
        )


@effect(EQUAL)
class ForwardHooks(Layer):
    def setup(self):
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
        self.register_forward_hook(self._note, always_call=True)

    @staticmethod
    def _note(module, args, output):
        module.seen += output.detach().sum()
        return output + 1


@effect(EQUAL)
class HookKeepsCount(Layer):
    """In Python, where no trace sees it."""

    def setup(self):
        self.counter = {"calls": 0}
        self.register_forward_hook(self._count)

    @staticmethod
    def _count(module, args, output):
        module.counter["calls"] += 1
        return output


@effect(REFUSED)
class HookOnTheModel(AtModel):
    def at_model(self, model):
        model.register_full_backward_hook(lambda module, inputs, outputs: None)


@effect(EQUAL)
class HookOnParameter(Layer):
    def setup(self):
        self.linear.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def _clamp_gradient(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


@effect(EQUAL)
class HookAfterAccumulation(Layer):
    def setup(self):
        self.linear.weight.register_post_accumulate_grad_hook(_clamp_gradient)


# -- results that nobody uses ------------------------------------------------------------------------------------------


@effect(EQUAL)
class ComputesForNothing(Layer):
    def setup(self):
        self.unused = nn.Sequential(linear(), nn.Tanh(), linear())

    def act(self, h):
        self.unused(h)
        return h


@effect(EQUAL)
class ReturnsForNothing(nn.Module):
    """The result of a module inside is returned, and dropped by the one around."""

    def __init__(self):
        super().__init__()
        self.linear, self.inner = linear(), _Both()

    def forward(self, x):
        return self.inner(self.linear(x).tanh())[0]


class _Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = linear(), nn.Sequential(linear(), linear())

    def forward(self, h):
        return self.used(h), self.unused(h)


@effect(EQUAL)
class UsesOthersForNothing(AtModel):
    def at_model(self, model):
        self.borrowed = [model.head]

    def act(self, h):
        self.borrowed[0](h)
        return h


@effect(EQUAL)
class HookOfAnUnused(Layer):
    def setup(self):
        self.unused = linear()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.unused.register_forward_hook(self._note)

    def _note(self, module, args, output):
        self.seen += 1

    def act(self, h):
        self.unused(h)
        return h
