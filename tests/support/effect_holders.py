"""Modules that read what objects, containers, functions, classes and modules of Python hold: see `effect_reads`."""

import collections
import dataclasses
import functools
import types
import weakref

import torch
from effect_base import AtModel, reads
from effect_reads import NUMBERS, Reader, row

# -- objects -----------------------------------------------------------------------------------------------------------


@reads
class Namespace(Reader):
    def setup(self):
        self.config = types.SimpleNamespace(scale=0.5, inner=types.SimpleNamespace(shift=1.0), unread=0)

    def act(self, h):
        return h * self.config.scale + self.config.inner.shift

    def change(self, rng):
        how = rng.randrange(4)
        if how == 0:
            self.config.scale = rng.choice(NUMBERS)
        elif how == 1:
            self.config.inner.shift = rng.choice(NUMBERS)
        elif how == 2:
            self.config.unread += 1
        else:
            self.config.inner = types.SimpleNamespace(shift=rng.choice(NUMBERS))


@dataclasses.dataclass
class Settings:
    """Of a layer."""

    scale: float = 0.5
    shifts: list = dataclasses.field(default_factory=lambda: [0.1, 0.2])

    @property
    def total(self):
        return sum(self.shifts)


@dataclasses.dataclass(slots=True)
class Slotted:
    """Without a dict."""

    scale: float = 0.5
    inner: Settings = dataclasses.field(default_factory=Settings)


@dataclasses.dataclass(frozen=True)
class Constant:
    """Never written."""

    scale: float = 0.5


@reads
class Dataclass(Reader):
    def setup(self):
        self.settings, self.constant = Settings(), Constant()

    def act(self, h):
        return (h * self.settings.scale + self.settings.total) * self.constant.scale

    def change(self, rng):
        how = rng.randrange(4)
        if how == 0:
            self.settings.scale = rng.choice(NUMBERS)
        elif how == 1:
            self.settings.shifts.append(rng.choice(NUMBERS))
        elif how == 2:
            self.constant = Constant(rng.choice(NUMBERS))
        else:
            self.settings.shifts = [0.1, 0.2]


@reads
class Slots(Reader):
    def setup(self):
        self.slotted = Slotted()

    def act(self, h):
        return h * self.slotted.scale + self.slotted.inner.scale

    def change(self, rng):
        holder = rng.choice((self.slotted, self.slotted.inner))
        holder.scale = rng.choice(NUMBERS)


class Lazy:
    """Gives what its table has as attributes."""

    def __init__(self, **table):
        self._table = table

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._table[name]


@reads
class ByGetattr(Reader):
    def setup(self):
        self.config = Lazy(scale=0.5, shift=1.0)

    def act(self, h):
        return h * self.config.scale + self.config.shift

    def change(self, rng):
        self.config._table[rng.choice(("scale", "shift"))] = rng.choice(NUMBERS)


class Strategy:
    """Called like a function."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, h):
        return self.apply(h) + 1

    def apply(self, h):
        return h * self.scale


class Negative(Strategy):
    """What a strategy may become."""

    def apply(self, h):
        return -h


@reads
class CallsObject(Reader):
    def setup(self):
        self.strategy = Strategy(0.5)
        self.method = self.strategy.apply

    def act(self, h):
        return self.method(self.strategy(h))

    def change(self, rng):
        how = rng.randrange(3)
        if how == 0:
            self.strategy.scale = rng.choice(NUMBERS)
        elif how == 1:
            self.strategy = rng.choice((Strategy, Negative))(rng.choice(NUMBERS))
        else:
            self.method = self.strategy.apply


@reads
class ClassOfAnObject(Reader):
    def setup(self):
        self.strategy = Strategy(0.5)

    def act(self, h):
        return self.strategy(h)

    def change(self, rng):
        self.strategy.__class__ = rng.choice((Strategy, Negative))


@reads
class SharedByModules(AtModel):
    """One object that all of these modules hold."""

    def at_model(self, model):
        shared = next((layer.config for layer in model.layers if "config" in vars(layer)), None)
        self.config = shared if hasattr(shared, "scale") else types.SimpleNamespace(scale=0.5, shift=1.0)

    def act(self, h):
        return h * self.config.scale

    def change(self, rng):
        self.config.scale = rng.choice(NUMBERS)


@reads
class WeaklyHeld(Reader):
    def setup(self):
        self.kept = [Settings()]
        self.config = weakref.ref(self.kept[0])

    def act(self, h):
        return h * self.config().scale

    def change(self, rng):
        if rng.random() < 0.5:
            self.config().scale = rng.choice(NUMBERS)
        else:
            self.kept = [Settings(rng.choice(NUMBERS))]
            self.config = weakref.ref(self.kept[0])


# -- containers --------------------------------------------------------------------------------------------------------


@reads
class Dict(Reader):
    def setup(self):
        self.options = {"scale": 0.5, "shifts": [0.1, 0.2], "names": {"a"}}

    def act(self, h):
        h = h * self.options["scale"] + sum(self.options["shifts"])
        return h * 2 if "b" in self.options["names"] else h

    def change(self, rng):
        how = rng.randrange(4)
        if how == 0:
            self.options["scale"] = rng.choice(NUMBERS)
        elif how == 1:
            self.options["shifts"][0] = rng.choice(NUMBERS)
        elif how == 2:
            self.options["names"] ^= {"b"}
        else:
            self.options = {**self.options, "unread": rng.choice(NUMBERS)}


class Shifts(list):
    """A list of one's own kind."""


class AttributeDict(dict):
    """A dict whose items are attributes, as configurations often are."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


@reads
class OwnList(Reader):
    def setup(self):
        self.shifts = Shifts((0.1, 0.2))

    def act(self, h):
        return h + sum(self.shifts)

    def change(self, rng):
        self.shifts[rng.randrange(2)] = rng.choice(NUMBERS)


@reads
class OwnDict(Reader):
    def setup(self):
        self.config = AttributeDict(scale=0.5, inner=AttributeDict(shift=1.0))

    def act(self, h):
        return h * self.config.scale + self.config.inner["shift"]

    def change(self, rng):
        if rng.random() < 0.5:
            self.config.scale = rng.choice(NUMBERS)
        else:
            self.config.inner.shift = rng.choice(NUMBERS)


class Pair(collections.namedtuple("Pair", "scale config")):
    """A tuple with names."""


@reads
class OfCollections(Reader):
    def setup(self):
        self.counter, self.ordered = collections.Counter(a=1), collections.OrderedDict(a=2.0, b=3.0)
        self.queue, self.user = collections.deque((0.5, 1.5), maxlen=2), collections.UserDict(scale=0.5)
        self.chain, self.pair = collections.ChainMap({}, {"shift": 1.0}), Pair(0.5, {"shift": 2.0})

    def act(self, h):
        h = h * self.counter["a"] + next(iter(self.ordered.values()))
        h = h * self.queue[0] + self.user["scale"]
        return h * self.chain["shift"] + self.pair.scale * self.pair.config["shift"]

    def change(self, rng):
        how, value = rng.randrange(6), rng.choice(NUMBERS)
        if how == 0:
            self.counter["a"] += 1
        elif how == 1:
            self.ordered.move_to_end("a", last=rng.random() < 0.5)
        elif how == 2:
            self.queue.append(value)
        elif how == 3:
            self.user["scale"] = value
        elif how == 4:
            self.chain["shift"] = value
        else:
            self.pair.config["shift"] = value


# -- functions ---------------------------------------------------------------------------------------------------------


def make_gate(limit):
    def gate(h):
        return h.clamp(max=limit)

    return gate


@reads
class Closure(Reader):
    def setup(self):
        self.gate = make_gate(0.5)

    def act(self, h):
        return self.gate(h)

    def change(self, rng):
        if rng.random() < 0.5:
            self.gate.__closure__[0].cell_contents = rng.choice((0.1, 0.2, 0.5))
        else:
            self.gate = make_gate(rng.choice((0.1, 0.2, 0.5)))


def make_table_gate(table):
    return lambda h: h * table["scale"][0]


@reads
class ClosureOverContainer(Reader):
    def setup(self):
        self.gate = make_table_gate({"scale": [0.5]})

    def act(self, h):
        return self.gate(h)

    def change(self, rng):
        self.gate.__closure__[0].cell_contents["scale"][0] = rng.choice(NUMBERS)


def with_defaults(h, scale=0.5, *, shift=1.0):
    return h * scale + shift


@reads
class Defaults(Reader):
    def setup(self):
        with_defaults.__defaults__, with_defaults.__kwdefaults__ = (0.5,), {"shift": 1.0}

    def act(self, h):
        return with_defaults(h)

    def change(self, rng):
        how, value = rng.randrange(3), rng.choice(NUMBERS)
        if how == 0:
            with_defaults.__defaults__ = (value,)
        elif how == 1:
            with_defaults.__kwdefaults__["shift"] = value
        else:
            with_defaults.__kwdefaults__ = {"shift": value}


def first_code(h):
    return h * 0.5


def second_code(h):
    return h + 0.5


FIRST_CODE = first_code.__code__


@reads
class CodeOfAFunction(Reader):
    def setup(self):
        first_code.__code__ = FIRST_CODE

    def act(self, h):
        return first_code(h)

    def change(self, rng):
        first_code.__code__ = rng.choice((FIRST_CODE, second_code.__code__))


@reads
class Partial(Reader):
    def setup(self):
        self.scale = functools.partial(torch.mul, other=0.5)
        self.shift = functools.partial(torch.add, row(1))

    def act(self, h):
        return self.shift(self.scale(h))

    def change(self, rng):
        how, value = rng.randrange(3), rng.choice(NUMBERS)
        if how == 0:
            self.scale.keywords["other"] = value
        elif how == 1:
            self.scale = functools.partial(torch.mul, other=value)
        else:
            self.shift = functools.partial(torch.add, row(value))


def scale_by(how):
    def wrap(function):
        @functools.wraps(function)
        def wrapped(*args):
            return function(*args) * how["scale"]

        return wrapped

    return wrap


HOW = {"scale": 0.5}


@reads
class Decorated(Reader):
    def setup(self):
        HOW["scale"] = 0.5

    @scale_by(HOW)
    def act(self, h):
        return h + 1

    def change(self, rng):
        HOW["scale"] = rng.choice(NUMBERS)


# -- globals, classes, modules of Python -------------------------------------------------------------------------------

SHIFT, TABLE, TENSOR = 0.5, {"rows": [1.0, 2.0]}, row(1)


def activate(h):
    return h.relu()


def other_activate(h):
    return h.sigmoid()


PLAIN_ACTIVATE = activate
script_settings = types.ModuleType("settings_of_a_script")
script_settings.POWER = 2


def set_global(name, value):
    globals()[name] = value


@reads
class Global(Reader):
    def setup(self):
        set_global("SHIFT", 0.5)
        set_global("TABLE", {"rows": [1.0, 2.0]})

    def act(self, h):
        return h * SHIFT + TABLE["rows"][1]

    def change(self, rng):
        how, value = rng.randrange(3), rng.choice(NUMBERS)
        if how == 0:
            set_global("SHIFT", value)
        elif how == 1:
            TABLE["rows"][1] = value
        else:
            set_global("TABLE", {"rows": [1.0, value]})


@reads
class GlobalTensor(Reader):
    def setup(self):
        set_global("TENSOR", row(1))

    def act(self, h):
        return h * TENSOR

    def change(self, rng):
        if rng.random() < 0.5:
            TENSOR.mul_(2)
        else:
            set_global("TENSOR", row(rng.choice(NUMBERS)))


@reads
class GlobalFunction(Reader):
    def setup(self):
        set_global("activate", PLAIN_ACTIVATE)

    def act(self, h):
        return activate(h)

    def change(self, rng):
        set_global("activate", rng.choice((PLAIN_ACTIVATE, other_activate, torch.tanh)))


@reads
class ModuleOfPython(Reader):
    def setup(self):
        script_settings.POWER = 2

    def act(self, h):
        return h**script_settings.POWER

    def change(self, rng):
        script_settings.POWER = rng.choice((2, 3))


@functools.lru_cache
def cached_scale():
    return script_settings.POWER * 0.5


@reads
class Cached(Reader):
    """A function that remembers what it has read; what is in its cache is not seen, and so a script clears it when it matters."""

    def setup(self):
        script_settings.POWER = 2
        cached_scale.cache_clear()

    def act(self, h):
        return h * cached_scale()

    def change(self, rng):
        script_settings.POWER = rng.choice((2, 3))
        cached_scale.cache_clear()


class Family(Reader):
    """A base class with something to read."""

    FACTOR, OPTIONS = 0.5, {"shift": 1.0}

    @classmethod
    def factor(cls):
        return cls.FACTOR

    @staticmethod
    def shifted(h):
        return h + Family.OPTIONS["shift"]

    @property
    def half(self):
        return self.factor() * 0.5


PLAIN_HALF = Family.half


@reads
class ClassAttribute(Family):
    def setup(self):
        Family.FACTOR, Family.OPTIONS, Family.half = 0.5, {"shift": 1.0}, PLAIN_HALF
        if "FACTOR" in vars(ClassAttribute):
            del ClassAttribute.FACTOR

    def act(self, h):
        return self.shifted(h * self.FACTOR) * self.half

    def change(self, rng):
        how, value = rng.randrange(5), rng.choice(NUMBERS)
        if how == 0:
            Family.FACTOR = value
        elif how == 1:
            ClassAttribute.FACTOR = value  # before the base's
        elif how == 2:
            self.FACTOR = value  # before the class's
        elif how == 3:
            Family.OPTIONS["shift"] = value
        else:
            Family.half = rng.choice((PLAIN_HALF, property(lambda self: 0.7)))


@reads
class MethodOfAClass(Reader):
    def setup(self):
        MethodOfAClass.act = PLAIN_ACT

    def act(self, h):
        return h * 0.5

    def change(self, rng):
        MethodOfAClass.act = rng.choice((PLAIN_ACT, lambda self, h: h + 1, _whole_act))


PLAIN_ACT = MethodOfAClass.act


def _whole_act(module, h):
    return module.linear(h)


class Helper:
    """Known by its class."""

    scale = 0.5

    @classmethod
    def apply(cls, h):
        return h * cls.scale


@reads
class ClassInAttribute(Reader):
    def setup(self):
        self.helper, Helper.scale = Helper, 0.5

    def act(self, h):
        return self.helper.apply(h)

    def change(self, rng):
        if rng.random() < 0.5:
            Helper.scale = rng.choice(NUMBERS)
        else:
            self.helper = rng.choice((Helper, type("OtherHelper", (Helper,), {"scale": 3.0})))


@reads
class DefaultDtype(Reader):
    """A setting of the process: a third is not the same in both."""

    def act(self, h):
        return h * torch.full((), 1 / 3)

    def change(self, rng):
        torch.set_default_dtype(rng.choice((torch.float32, torch.float64)))
