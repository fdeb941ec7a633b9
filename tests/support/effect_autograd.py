"""Gradients, graphs, hooks on values and differentiation in forward: see `effect_models`."""

import torch
import torch.nn.functional as F
from effect_base import EQUAL, REFUSED, WIDTH, Layer, effect, linear
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

# -- requires_grad, gradients, data ------------------------------------------------------------------------------------


@effect(REFUSED)
class FreezesParameter(Layer):
    def act(self, h):
        self.linear.bias.requires_grad_(False)
        return h


@effect(REFUSED)
class FreezesByAttribute(Layer):
    def act(self, h):
        self.linear.bias.requires_grad = False
        return h


@effect(EQUAL)
class FreezesForAWhile(Layer):
    def setup(self):
        self.other = linear()

    def act(self, h):
        self.other.requires_grad_(False)
        h = self.other(h)
        self.other.requires_grad_(True)
        return h + self.other.bias


@effect(EQUAL)
class KeepsRequiresGrad(Layer):
    """What changes nothing is nothing."""

    def act(self, h):
        self.linear.requires_grad_(True)
        return h.requires_grad_()


@effect(EQUAL)
class StartsGradient(Layer):
    """A gradient that begins in the middle: what is before it has none by this way."""

    def act(self, h):
        return h + h.detach().requires_grad_() * 2


@effect(EQUAL)
class DetachesInPlace(Layer):
    def setup(self):
        self.other = linear()

    def act(self, h):
        cut = self.other(h)
        cut.detach_()
        return h + cut


@effect(EQUAL)
class RetainsGradient(Layer):
    def act(self, h):
        h = h * 2
        h.retain_grad()
        return h + 1


@effect(REFUSED)
class ReadsGradient(Layer):
    def act(self, h):
        return h if self.linear.weight.grad is None else h * 2


@effect(REFUSED)
class DropsGradient(Layer):
    def act(self, h):
        self.linear.bias.grad = None
        return h


@effect(REFUSED)
class GivesParameterOtherData(Layer):
    def setup(self):
        self.other = linear()

    def act(self, h):
        self.other.weight.data = self.other.weight.data * 0.5
        return self.other(h)


@effect(EQUAL)
class GivesValueOtherData(Layer):
    def act(self, h):
        scale = torch.ones(WIDTH, dtype=h.dtype)
        scale.data = torch.full((WIDTH,), 3.0, dtype=h.dtype)
        return h * scale


@effect(REFUSED)
class WritesWeightData(Layer):
    """Silently: autograd's versions know nothing of it, and the backward of an earlier microbatch would use the new weight."""

    def setup(self):
        self.other = linear()

    def act(self, h):
        self.other.weight.data.mul_(0.5)
        return self.other(h)


@effect(REFUSED)
class WritesWeight(Layer):
    def setup(self):
        self.other = linear()

    def act(self, h):
        with torch.no_grad():
            self.other.weight.mul_(0.5)
        return self.other(h)


@effect(EQUAL)
class WritesBias(Layer):
    """No backward needs a bias."""

    def setup(self):
        self.other = linear()

    def act(self, h):
        with torch.no_grad():
            self.other.bias.mul_(0.5)
        return self.other(h)


@effect(EQUAL)
class RenormalisesEmbedding(Layer):
    def setup(self):
        self.table = nn.Embedding(5, WIDTH, max_norm=0.5, dtype=torch.float64)

    def act(self, h):
        return h + self.table((h[:, 0] > 0).long())


# -- autograd's graph --------------------------------------------------------------------------------------------------


def twice(gradient):
    return gradient * 2


@effect(EQUAL)
class HookOnValue(Layer):
    def act(self, h):
        h = h * 1
        h.register_hook(twice)
        return h + 1


@effect(EQUAL)
class ClosureOnValue(Layer):
    def act(self, h):
        h = h * 1
        h.register_hook(lambda gradient: gradient * self.linear.bias.detach())
        return h + 1


@effect(EQUAL)
class HookOnArgument(nn.Module):
    """The value has other uses, before and after, and the hook sees all of its gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.inner = linear(), HookOnValueOf()

    def forward(self, x):
        h = self.linear(x).tanh()
        return h * 2 + self.inner(h)


class HookOnValueOf(nn.Module):
    def forward(self, h):
        h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return h.sin()


@effect(REFUSED)
class HookOnParameterInForward(Layer):
    def act(self, h):
        self.linear.bias.register_hook(twice)
        return h


@effect(EQUAL)
class HookOnNode(Layer):
    def act(self, h):
        h = h * 2
        h.grad_fn.register_hook(lambda inputs, outputs: tuple(g if g is None else g * 3 for g in inputs))
        return h + 1


@effect(EQUAL)
class PrehookOnNode(Layer):
    def act(self, h):
        h = h * 2
        h.grad_fn.register_prehook(lambda gradients: tuple(g * 3 for g in gradients))
        return h + 1


@effect(EQUAL)
class HookOnEdge(Layer):
    def act(self, h):
        h = h * 2
        get_gradient_edge(h).node.register_prehook(lambda gradients: tuple(g * 3 for g in gradients))
        return h + 1


@effect(EQUAL)
class HookOnSeveral(Layer):
    def act(self, h):
        low, high = h * 2, h * 3
        register_multi_grad_hook((low, high), lambda gradients: None)
        return low + high


class _Coarse(saved_tensors_hooks):
    def __init__(self):
        super().__init__(lambda tensor: tensor.float(), lambda tensor: tensor.double())


@effect(EQUAL)
class SavesCoarsely(Layer):
    """Its gradients are other ones than without the hooks."""

    def act(self, h):
        with _Coarse():
            return h * h.exp()


@effect(EQUAL)
class SavesOnCpu(Layer):
    def act(self, h):
        with save_on_cpu():
            return h * h.exp()


@effect(EQUAL)
class Checkpoints(Layer):
    def setup(self):
        self.other, self.reentrant = linear(), linear()

    def act(self, h):
        h = checkpoint(lambda x: self.other(x).tanh(), h, use_reentrant=False)
        h = checkpoint(self.reentrant, h, use_reentrant=True)
        return checkpoint_sequential([self.other, torch.sin], 2, h, use_reentrant=False)


@effect(EQUAL)
class AsksWhetherLeaf(Layer):
    """Which a value from another rank is, and the same value in plain PyTorch is not."""

    def setup(self):
        self.inner = DoublesLeaves()

    def act(self, h):
        return self.inner(h)


class DoublesLeaves(nn.Module):
    def forward(self, h):
        return h * 2 if h.is_leaf else h + 1


# -- differentiation in forward ----------------------------------------------------------------------------------------


@effect(EQUAL)
class Forces(Layer):
    """The gradient of an energy, which the loss differentiates again."""

    def setup(self):
        self.energy = nn.Sequential(linear(), nn.Tanh(), linear())

    def act(self, h):
        with torch.enable_grad():
            energy = (self.energy(h) ** 2).sum()
            return h - torch.autograd.grad(energy, h, create_graph=True)[0]


@effect(EQUAL)
class ForcesOfDetached(Layer):
    def setup(self):
        self.energy = linear()

    def act(self, h):
        with torch.enable_grad():
            place = h.detach().requires_grad_()
            energy = self.energy(place).exp().sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return h + force


class EnergyOf(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = linear()

    def forward(self, place):
        return self.map(place).exp().sum(dim=1)


class ForceOf(nn.Module):
    """Differentiates what others have computed."""

    def forward(self, energy, place):
        return torch.autograd.grad(energy.sum(), place, create_graph=True, allow_unused=True)[0]


@effect(EQUAL)
class ForcesBetweenModules(nn.Module):
    """A part of it, called whole, would find no graph between its arguments."""

    def __init__(self):
        super().__init__()
        self.linear, self.energy, self.force = linear(), EnergyOf(), ForceOf()

    def forward(self, x):
        place = self.linear(x).tanh()
        force = self.force(self.energy(place), place)
        return place if force is None else place - force


class ForceAlong(nn.Module):
    """Its arguments depend on each other."""

    def __init__(self):
        super().__init__()
        self.map = linear()

    def forward(self, place, other):
        energy = (self.map(place) * other).sum()
        return torch.autograd.grad(energy, place, create_graph=True)[0]


@effect(EQUAL)
class ForcesByTwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.other, self.force = linear(), linear(), ForceAlong()

    def forward(self, x):
        place = self.linear(x).tanh()
        return place - self.force(place, self.other(place).sin())


@effect(EQUAL)
class BackwardToValue(Layer):
    def act(self, h):
        place = h.detach().requires_grad_()
        with torch.enable_grad():
            (place**3).sum().backward(inputs=[place])
        return h + place.grad


@effect(REFUSED)
class BackwardToParameters(Layer):
    def act(self, h):
        with torch.enable_grad():
            self.linear(h.detach()).sum().backward()
        return h


@effect(REFUSED)
class AutogradBackward(Layer):
    def act(self, h):
        with torch.enable_grad():
            torch.autograd.backward(self.linear(h.detach()).sum())
        return h


@effect(EQUAL)
class InnerStep(Layer):
    """One step of gradient descent on its own weight, through which the loss is differentiated."""

    def setup(self):
        self.inner = linear()

    def act(self, h):
        with torch.enable_grad():
            loss = (self.inner(h) ** 2).mean()
            (slope,) = torch.autograd.grad(loss, self.inner.weight, create_graph=True)
        return F.linear(h, self.inner.weight - 0.1 * slope)


@effect(EQUAL)
class FunctionalGrad(Layer):
    def act(self, h):
        return h + torch.func.grad(lambda x: x.sin().sum())(h)


@effect(EQUAL)
class FunctionalJvp(Layer):
    def setup(self):
        self.other = linear()

    def act(self, h):
        value, along = torch.func.jvp(self.other, (h,), (torch.ones_like(h),))
        return value * along


@effect(EQUAL)
class FunctionalVjp(Layer):
    def setup(self):
        self.other = linear()

    def act(self, h):
        value, pull = torch.func.vjp(lambda x: self.other(x).tanh(), h)
        return value + pull(torch.ones_like(value))[0]


@effect(EQUAL)
class JacobianOf(Layer):
    def act(self, h):
        jacobian = torch.autograd.functional.jacobian(lambda x: x.sin().sum(dim=0), h, create_graph=True)
        return h + jacobian.sum(dim=(0, 1))


@effect(EQUAL)
class ForwardMode(Layer):
    def act(self, h):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(h, torch.ones_like(h))
            value, along = forward_ad.unpack_dual(dual.sin())
        return value + along
