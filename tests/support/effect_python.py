"""Modules that read through less usual parts of Python: imports in forward, dicts of globals, metaclasses, special methods, caches,
weak references, locks, filters of warnings.

To extend: see `effect_reads`.
"""

import functools
import importlib
import logging
import sys
import threading
import types
import warnings
import weakref

import torch
from effect_base import reads
from effect_reads import NUMBERS, Reader, row
from torch import nn

FACTORS = [0.5]


def module_of_python(name):
    """A new module of Python, which can be imported."""
    module = types.ModuleType(name)
    module.factor = 0.5
    sys.modules[name] = module
    package, _, child = name.rpartition(".")
    if package:
        setattr(sys.modules[package], child, module)
    else:
        module.__path__ = []


class Importing(Reader):
    """Base: reads a number of the module `effect_settings.inner`, in some way."""

    def setup(self):
        module_of_python("effect_settings")
        module_of_python("effect_settings.inner")

    def change(self, rng):
        sys.modules["effect_settings.inner"].factor = rng.choice(NUMBERS)


@reads
class ImportsModule(Importing):
    def act(self, h):
        import effect_settings.inner

        return h * effect_settings.inner.factor


@reads
class ImportsModuleAs(Importing):
    def act(self, h):
        import effect_settings.inner as settings

        return h * settings.factor


@reads
class ImportsName(Importing):
    def act(self, h):
        from effect_settings.inner import factor

        return h * factor


@reads
class ImportsModuleFrom(Importing):
    def act(self, h):
        from effect_settings import inner

        return h * inner.factor


@reads
class AsksImportlib(Importing):
    def act(self, h):
        return h * importlib.import_module("effect_settings.inner").factor


@reads
class AsksSysModules(Importing):
    def act(self, h):
        return h * sys.modules["effect_settings.inner"].factor


@reads
class DictOfGlobals(Reader):
    def setup(self):
        FACTORS[:] = [0.5]

    def act(self, h):
        return h * globals()["FACTORS"][0]

    def change(self, rng):
        FACTORS[0] = rng.choice(NUMBERS)


class _Meta(type):
    factor = 0.5


class _OfMeta(metaclass=_Meta):
    pass


@reads
class OfAMetaclass(Reader):
    def setup(self):
        _Meta.factor = 0.5

    def act(self, h):
        return h * _OfMeta.factor

    def change(self, rng):
        _Meta.factor = rng.choice(NUMBERS)


@reads
class OtherBaseClasses(Reader):
    def setup(self):
        self.bases = [types.new_class(f"Base{number}", (), {}, lambda space: None) for number in range(2)]
        self.bases[0].factor, self.bases[1].factor = 0.5, 2.0
        self.settings = types.new_class("Settings", (self.bases[0],))()

    def act(self, h):
        return h * self.settings.factor

    def change(self, rng):
        type(self.settings).__bases__ = (rng.choice(self.bases),)


@functools.singledispatch
def _scaled(kind, h):
    return h


@reads
class Dispatched(Reader):
    def setup(self):
        _scaled.register(int, lambda kind, h: h * 0.5)

    def act(self, h):
        return _scaled(1, h)

    def change(self, rng):
        factor = rng.choice(NUMBERS)
        _scaled.register(int, lambda kind, h: h * factor)


@reads
class CachedProperty(Reader):
    """The value of the first call stays until somebody drops it."""

    def setup(self):
        self.raw = 0.5

    @functools.cached_property
    def factor(self):
        return self.raw * 2

    def act(self, h):
        return h * self.factor

    def change(self, rng):
        self.raw = rng.choice(NUMBERS)
        if rng.random() < 0.5:
            vars(self).pop("factor", None)


@reads
class ReadOnlyView(Reader):
    def setup(self):
        self.hidden = {"factor": 0.5}
        self.settings = types.MappingProxyType(self.hidden)

    def act(self, h):
        return h * self.settings["factor"]

    def change(self, rng):
        vars(self)["hidden"]["factor"] = rng.choice(NUMBERS)


class _Special:
    def __init__(self, value):
        self.value = value

    def __bool__(self):
        return self.value > 0

    def __len__(self):
        return int(abs(self.value) * 4)

    def __iter__(self):
        return iter([self.value, 1.0])

    def __call__(self, h):
        return h * self.value

    def __contains__(self, item):
        return self.value > item

    def __getitem__(self, item):
        return self.value * item

    def __enter__(self):
        return self.value

    def __exit__(self, *exception):
        return False

    def __format__(self, form):
        return str(self.value)

    def __index__(self):
        return int(self.value > 0)


def _within(h, special):
    with special as value:
        return h * value


SPECIAL = (
    lambda h, special: h.relu() if special else h,
    lambda h, special: h * len(special),
    lambda h, special: h * sum(special),
    lambda h, special: special(h),
    lambda h, special: h * 2 if 0.6 in special else h,
    lambda h, special: h * special[2],
    _within,
    lambda h, special: h * float(f"{special}"),
    lambda h, special: h * [3.0, 0.5][special],
)


@reads
class SpecialMethods(Reader):
    def setup(self):
        self.special = _Special(0.5)

    def act(self, h):
        for use in SPECIAL:
            h = use(h, self.special)
        return h

    def change(self, rng):
        self.special.value = rng.choice(NUMBERS)


# -- tensors that are the same ------------------------------------------------------------------------------------------


class OneTensor(Reader):
    """Base: a tensor under two names, which part and meet."""

    def act(self, h):
        return h * self.first + self.second * 2

    def change(self, rng):
        kind = rng.randrange(4)
        if kind == 0:
            self.second = row(1, 2, 3, rng.random())
        elif kind == 1:
            self.first = row(rng.random(), 2, 3, 4)
        elif kind == 2:
            self.first = self.second = row(1, rng.random(), 3, 4)
        else:
            self.first = self.second


@reads
class OneBuffer(OneTensor):
    def setup(self):
        self.register_buffer("first", row(1, 2, 3, 4))
        self.register_buffer("second", self.first)


@reads
class BufferAndAttribute(OneTensor):
    def setup(self):
        self.register_buffer("first", row(1, 2, 3, 4))
        self.second = self.first


@reads
class OneAttribute(OneTensor):
    def setup(self):
        self.first = self.second = row(1, 2, 3, 4)


@reads
class OneInAList(OneTensor):
    def setup(self):
        self.tensors = [row(1, 2, 3, 4)] * 2

    def act(self, h):
        return h * self.tensors[0] + self.tensors[1] * 2

    def change(self, rng):
        self.tensors[rng.randrange(2)] = row(1, rng.random(), 3, 4)


@reads
class AsksWhetherTheSame(OneTensor):
    def setup(self):
        self.first = self.second = row(1, 2, 3, 4)

    def act(self, h):
        return h * 2 if self.first is self.second else h * self.second


@reads
class CountsTensors(OneTensor):
    """Frozen parameters that are one are told like any other parameter that is replaced; written ones are not."""

    def setup(self):
        self.first = self.second = nn.Parameter(row(1, 2, 3, 4), requires_grad=False)

    def act(self, h):
        return h * self.first + len({id(tensor) for tensor in (self.first, self.second)})

    def change(self, rng):
        with torch.no_grad():
            self.first.fill_(rng.random())


# -- values of tensors ---------------------------------------------------------------------------------------------------


class ValuesOfATensor(Reader):
    """Base: a plain tensor whose values reach Python in some way."""

    def setup(self):
        self.table = row(1, 2, 3, 4)

    def change(self, rng):
        if rng.random() < 0.5:
            self.table = row(rng.random(), 2, 3, 4)
        else:
            self.table[0] = rng.random()


@reads
class ListOfATensor(ValuesOfATensor):
    def act(self, h):
        return h * sum(self.table.tolist())


@reads
class ArrayOfATensor(ValuesOfATensor):
    def act(self, h):
        return h * float(self.table.numpy().sum())


@reads
class AttributeOfATensor(Reader):
    def setup(self):
        self.table = row(1, 2, 3, 4)
        self.table.factor = 0.5

    def act(self, h):
        return h * self.table * self.table.factor

    def change(self, rng):
        self.table.factor = rng.choice(NUMBERS)


@reads
class LevelOfALogger(Reader):
    def setup(self):
        self.logger = logging.getLogger("effect_python")
        self.logger.setLevel(logging.INFO)

    def act(self, h):
        return h * 2 if self.logger.level == logging.INFO else h

    def change(self, rng):
        self.logger.setLevel(rng.choice((logging.INFO, logging.DEBUG)))


# -- state that others hold --------------------------------------------------------------------------------------------


class Held:
    """What a weak reference can refer to."""

    def __init__(self, scale):
        self.scale = scale


@reads
class WeakReferences(Reader):
    """The last is alive as long as the list has it: a guard that held it would keep it there."""

    def setup(self):
        self.held = [Held(0.5), Held(2.0)]
        self.first, self.members = weakref.ref(self.held[0]), weakref.WeakSet(self.held)
        self.by_name = weakref.WeakValueDictionary(last=self.held[1])

    def act(self, h):
        first = self.first()
        return h * (1 if first is None else first.scale) * (1 + len(self.members)) + len(self.by_name)

    def change(self, rng):
        if self.held and rng.random() < 0.5:
            self.held.pop(rng.randrange(len(self.held)))
        elif self.held:
            self.held[-1].scale = rng.choice(NUMBERS)
        else:
            self.setup()


@reads
class AsksLocks(Reader):
    def setup(self):
        self.lock, self.tried, self.used = threading.Lock(), threading.Lock(), threading.Lock()

    def act(self, h):
        is_free = self.tried.acquire(blocking=False)
        if is_free:
            self.tried.release()
        with self.used:
            return h * (0.5 if self.lock.locked() else 2.0) + is_free

    def change(self, rng):
        lock = rng.choice((self.lock, self.tried))
        lock.release() if lock.locked() else lock.acquire()


@reads
class TakesALock(Reader):
    """Only the first call gets it."""

    def setup(self):
        self.lock = threading.Lock()

    def act(self, h):
        return h * (0.5 if self.lock.acquire(blocking=False) else 2.0)

    def change(self, rng):
        if self.lock.locked():
            self.lock.release()


class SlowPath(Warning):
    """Given by a layer."""


@reads
class Warns(Reader):
    def setup(self):
        warnings.filterwarnings("ignore", category=SlowPath)

    def act(self, h):
        try:
            warnings.warn("the slow path", SlowPath, stacklevel=1)
        except SlowPath:
            return h * 0.5
        return h

    def change(self, rng):
        warnings.filterwarnings(rng.choice(("ignore", "error")), category=SlowPath)


@reads
class MakesText(Reader):
    def setup(self):
        self.length = 60

    def act(self, h):
        return h * (0.5 if len(str(h)) > self.length else 2.0)

    def change(self, rng):
        self.length = rng.choice((0, 60, 10**6))
