"""Random numbers, modes and settings of the process in forward: see `effect_models`."""

import random

import numpy
import torch
import torch.nn.functional as F
from effect_base import EQUAL, REFUSED, WIDTH, Layer, effect, linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# -- random numbers ----------------------------------------------------------------------------------------------------


@effect(EQUAL, alone="random")
class Dropout(Layer):
    def act(self, h):
        return F.dropout(h, 0.5)


@effect(REFUSED)
class SeedsTorch(Layer):
    def act(self, h):
        torch.manual_seed(3)
        return h + torch.rand_like(h)


@effect(REFUSED)
class SeedsByMethod(Layer):
    def act(self, h):
        torch.default_generator.manual_seed(3)
        return h + torch.rand_like(h)


@effect(REFUSED)
class SeedsAgain(Layer):
    def act(self, h):
        torch.seed()
        return h


@effect(EQUAL)
class ForksAndSeeds(Layer):
    def act(self, h):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return h + torch.rand_like(h)


@effect(EQUAL, alone="random")
class PutsStateBack(Layer):
    """Draws the same numbers twice, and none, in the end."""

    def act(self, h):
        state = torch.get_rng_state()
        h = h + torch.rand_like(h)
        torch.set_rng_state(state)
        h = h * torch.rand_like(h)
        torch.set_rng_state(state)
        return h


@effect(EQUAL, alone="random")
class PutsStateBackByMethod(Layer):
    def act(self, h):
        state = torch.default_generator.get_state()
        h = h + torch.rand_like(h)
        torch.default_generator.set_state(state)
        return h


@effect(EQUAL, alone="python's random")
class PythonsRandom(Layer):
    def act(self, h):
        return h * random.random()


@effect(EQUAL, alone="numpy's random")
class NumpysRandom(Layer):
    def act(self, h):
        return h + torch.from_numpy(numpy.random.rand(WIDTH))


imported = random.gauss


@effect(EQUAL, alone="python's random")
class ImportedRandom(Layer):
    """Of a function that nobody finds by its name."""

    def act(self, h):
        return h * imported(0.0, 1.0)


@effect(REFUSED)
class SeedsPython(Layer):
    def act(self, h):
        random.seed(1)
        return h * random.random()


@effect(REFUSED)
class SeedsNumpy(Layer):
    def act(self, h):
        numpy.random.seed(1)
        return h


@effect(EQUAL)
class OwnNumpyGenerator(Layer):
    def setup(self):
        self.generator = numpy.random.default_rng(4)

    def act(self, h):
        return h * self.generator.random()


@effect(EQUAL)
class OwnPythonGenerator(Layer):
    def setup(self):
        self.generator = random.Random(4)

    def act(self, h):
        return h * self.generator.random()


@effect(EQUAL)
class OwnTorchGenerator(Layer):
    def setup(self):
        self.generator = torch.Generator().manual_seed(5)

    def act(self, h):
        return h * torch.rand(h.shape, generator=self.generator, dtype=h.dtype)


@effect(EQUAL)
class SeedsOwnGenerator(OwnTorchGenerator):
    def act(self, h):
        self.generator.manual_seed(6)
        return super().act(h)


# -- modes and settings ------------------------------------------------------------------------------------------------


@effect(EQUAL)
class InInferenceMode(Layer):
    def act(self, h):
        with torch.inference_mode():
            scale = h.sigmoid()
        return h.detach() * scale.clone() + h


@effect(REFUSED)
class LeavesGradOff(Layer):
    def act(self, h):
        torch.set_grad_enabled(False)
        return h


@effect(EQUAL)
class TurnsGradOff(Layer):
    def setup(self):
        self.other = linear()

    def act(self, h):
        torch.set_grad_enabled(False)
        scale = self.other(h).sigmoid()
        torch.set_grad_enabled(True)
        return h * scale


@effect(EQUAL)
class OtherDefaultDtype(Layer):
    def act(self, h):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return h + torch.linspace(0, 1, WIDTH) / 3
        finally:
            torch.set_default_dtype(before)


@effect(REFUSED)
class LeavesDefaultDtype(Layer):
    def act(self, h):
        torch.set_default_dtype(torch.float64)
        return h


class _Rounds(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.float().double() if isinstance(out, torch.Tensor) and out.dtype == torch.float64 else out


@effect(EQUAL)
class DispatchMode(Layer):
    def act(self, h):
        with torch.no_grad(), _Rounds():
            scale = h.sigmoid()
        return h * scale


class _Triples(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3 if func is torch.sigmoid else out


@effect(EQUAL)
class FunctionMode(Layer):
    def act(self, h):
        with _Triples():
            return torch.sigmoid(h)
