"""Modules that read what a recording bakes in where they are cut: what closures hold, tensors bear, Python has: see `effect_reads`."""

import types

import torch
from effect_base import reads
from effect_reads import NUMBERS, Reader, row


def make_object_gate(config):
    return lambda h: h * config.scale


@reads
class ClosureOverObject(Reader):
    def setup(self):
        self.config = None
        config = types.SimpleNamespace(scale=0.5, unread=0)
        self.gate, self.write = make_object_gate(config), lambda name, value: setattr(config, name, value)

    def act(self, h):
        return self.gate(h)

    def change(self, rng):
        self.write(rng.choice(("scale", "scale", "unread")), rng.choice(NUMBERS))


def make_class_gate():
    class Config:
        scale = 0.5

        @property
        def doubled(self):
            return 2 * Config.scale

    config = Config()
    return lambda h: h * config.doubled, lambda value: setattr(Config, "scale", value)


@reads
class ClosureOverClass(Reader):
    def setup(self):
        self.gate, self.write = make_class_gate()

    def act(self, h):
        return self.gate(h)

    def change(self, rng):
        self.write(rng.choice(NUMBERS))


def make_default_gate():
    config = types.SimpleNamespace(scale=0.5)
    return (lambda h, config=config: h * config.scale), config


@reads
class DefaultThatIsAnObject(Reader):
    def setup(self):
        self.gate, config = make_default_gate()
        self.write = lambda value: setattr(config, "scale", value)

    def act(self, h):
        return self.gate(h)

    def change(self, rng):
        self.write(rng.choice(NUMBERS))


@reads
class ParameterWithAnAttribute(Reader):
    def act(self, h):
        return h * getattr(self.linear.weight, "multiplier", 0.5)

    def change(self, rng):
        self.linear.weight.multiplier = rng.choice(NUMBERS)


@reads
class BufferWithAnAttribute(Reader):
    def setup(self):
        self.register_buffer("shift", row(1.0))
        self.shift.multiplier = 2.0

    def act(self, h):
        return h + self.shift * (self.shift.multiplier if hasattr(self.shift, "multiplier") else 0.5)

    def change(self, rng):
        if hasattr(self.shift, "multiplier") and rng.random() < 0.5:
            del self.shift.multiplier
        else:
            self.shift.multiplier = rng.choice(NUMBERS)


@reads
class ShapeOfABuffer(Reader):
    def setup(self):
        self.register_buffer("shifts", row(0.5, 1.0))

    def act(self, h):
        return h * self.shifts.numel() + self.shifts.sum()

    def change(self, rng):
        self.shifts = row(*rng.choices(NUMBERS, k=rng.randrange(1, 4)))


def clip_to(value):
    """A global of this name would come before Python's own `round`."""
    return float(round(value, 1))


@reads
class GlobalBeforeABuiltin(Reader):
    def setup(self):
        globals().pop("round", None)

    def act(self, h):
        return h * clip_to(0.54)

    def change(self, rng):
        if "round" in globals():
            del globals()["round"]
        else:
            globals()["round"] = rng.choice((lambda value, digits: value, lambda value, digits: -value))


@reads
class WhichListItIs(Reader):
    def setup(self):
        self.one = self.other = [0.5]

    def act(self, h):
        return h * (self.one[0] if self.one is self.other else 2.0)

    def change(self, rng):
        self.other = rng.choice((self.one, [0.5]))


@reads
class DtypeThatIsTheDefault(Reader):
    def act(self, h):
        return h * torch.tensor(0.1).to(h.dtype) * torch.tensor([1.0]).element_size()

    def change(self, rng):
        torch.set_default_dtype(rng.choice((torch.float32, torch.float64)))
