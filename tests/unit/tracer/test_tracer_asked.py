"""What forward asks of Python, numpy, torch and the process: another answer is told, before a step goes on with the old one."""

import abc
import collections
import copy
import dataclasses
import decimal
import inspect
import logging
import math
import mmap
import multiprocessing
import operator
import os
import signal
import sqlite3
import string
import sys
import threading
import types
import warnings
from multiprocessing import shared_memory

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smpc.errors import TraceError
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.environment.environment_guards import GuardSource
from smpc.tracer.ir import NodeKind
from smpc.tracer.record import record_guarded


class Asks(nn.Module):
    """Applies a function."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.linear(x))


def recorded(function):
    return record_guarded(Asks(function), RecordingRequest((torch.ones(2, 4),), {}))


@dataclasses.dataclass
class Settings:
    beta: float = 1.0
    gamma: float = 2.0


class Base:
    pass


class Abstract(abc.ABC):
    @abc.abstractmethod
    def scale(self):
        """Nobody calls it."""


class Plain:
    pass


class Named:
    pass


def factor():
    return 2.0


settings, plain, named, logger = Settings(), Plain(), Named(), logging.getLogger("smpc.test.asked")
look, name, all_of = getattr, "be" + "ta", operator.attrgetter("beta")
event, shared_value, shared_array = (
    threading.Event(),
    multiprocessing.Value("d", 1.0),
    multiprocessing.Array("d", [1.0]),
)
lock, shared_lock = threading.Lock(), multiprocessing.Lock()
shared_event, mapped = multiprocessing.Event(), mmap.mmap(-1, 8)
objects, held, relu = numpy.array([{"a": 1.0}], dtype=object), torch.ones(1), nn.ReLU()


def tries(of):
    is_free = of.acquire(False)
    if is_free:
        of.release()
    return is_free


def warns():
    try:
        warnings.warn("the slow path", UserWarning, stacklevel=1)
    except UserWarning:
        return False
    return True


def set_beta(monkeypatch):
    monkeypatch.setattr(settings, "beta", 5.0)


def set_special(method, function):
    return lambda monkeypatch: monkeypatch.setattr(Plain, method, function, raising=False)


def derive(monkeypatch):
    globals()["Derived"] = type("Derived", (Base,), {})


def set_decimal(monkeypatch):
    monkeypatch.setattr(decimal.getcontext(), "prec", 3)


def set_numpy(_):
    numpy.seterr(divide="raise")


ASKED = {  # what forward does, what a script does then
    "sys.argv": (lambda x: x * (2 if "--fast" in sys.argv else 1), lambda m: m.setattr(sys, "argv", ["--fast"])),
    "an item of sys.argv": (lambda x: x * len(sys.argv), lambda m: sys.argv.append("--fast")),
    "decimal's context": (lambda x: x * float(decimal.Decimal(1) / decimal.Decimal(3)), set_decimal),
    "numpy's error state": (lambda x: x * (2 if numpy.geterr()["divide"] == "raise" else 1), set_numpy),
    "the name of a function": (lambda x: x * len(factor.__name__), lambda m: m.setattr(factor, "__name__", "f")),
    "the name of a class": (lambda x: x * len(type(named).__name__), lambda m: setattr(Named, "__name__", "N")),
    "classes derived": (lambda x: x * (1 + len(Base.__subclasses__())), derive),
    "an abstract class": (lambda x: x * (2 if isinstance(plain, Abstract) else 1), lambda m: Abstract.register(Plain)),
    "a name in a module of Python": (
        lambda x: x * getattr(math, "scale", 1.0),
        lambda m: m.setattr(math, "scale", 3.0, raising=False),
    ),
    "a function of Python": (lambda x: x * math.sqrt(4.0), lambda m: m.setattr(math, "sqrt", lambda value: 7.0)),
    "a function of torch": (lambda x: torch.tanh(x), lambda m: m.setattr(torch, "tanh", torch.sigmoid)),
    "a function of torch.nn": (lambda x: F.relu(x), lambda m: m.setattr(F, "relu", F.gelu)),
    "a method of tensors": (lambda x: x.relu(), lambda m: m.setattr(torch.Tensor, "relu", F.gelu, raising=False)),
    "a layer of torch": (lambda x: relu(x), lambda m: m.setattr(nn.ReLU, "forward", lambda self, x: x * 3)),
    "the recursion limit": (lambda x: x * sys.getrecursionlimit(), lambda m: sys.setrecursionlimit(3000)),
    "the folder": (lambda x: x * len(os.getcwd()), lambda m: m.chdir("/")),
    "a logger's level": (
        lambda x: x * (2 if logging.getLogger("smpc.test.asked").isEnabledFor(logging.DEBUG) else 1),
        lambda m: m.setattr(logging.getLogger("smpc.test"), "level", logging.DEBUG),
    ),
    "a signal": (
        lambda x: x * (2 if signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN else 1),
        lambda m: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    ),
    "which modules are imported": (
        lambda x: x * (2 if "fancy_kernels" in sys.modules else 1),
        lambda m: m.setitem(sys.modules, "fancy_kernels", types.ModuleType("fancy_kernels")),
    ),
    "dataclasses.asdict": (lambda x: x * sum(dataclasses.asdict(settings).values()), set_beta),
    "dataclasses.astuple": (lambda x: x * sum(dataclasses.astuple(settings)), set_beta),
    "inspect.getmembers": (lambda x: x * dict(inspect.getmembers(settings))[name], set_beta),
    "copy.deepcopy": (lambda x: x * copy.deepcopy(settings).beta, set_beta),
    "getattr by another name": (lambda x: x * look(settings, name), set_beta),
    "operator.attrgetter": (lambda x: x * all_of(settings), set_beta),
    "str.format": (lambda x: x * float("{.beta}".format(settings)), set_beta),  # noqa: UP032
    "string.Template": (lambda x: x * float(string.Template("$beta").substitute(vars(settings))), set_beta),
    "a special method": (
        lambda x: x * (len(plain) if hasattr(Plain, "__len__") else 1),
        set_special("__len__", lambda _: 7),
    ),
    "whether it can be called": (
        lambda x: x * (plain() if callable(plain) else 1),
        set_special("__call__", lambda _: 7),
    ),
    "how it is printed": (lambda x: x * len(f"{plain}"), set_special("__format__", lambda *_: "7")),
    "a lock": (lambda x: x * (2 if lock.locked() else 1), lambda m: lock.acquire()),
    "a lock that is tried": (lambda x: x * (2 if tries(lock) else 1), lambda m: lock.acquire()),
    "a lock of processes": (lambda x: x * (2 if tries(shared_lock) else 1), lambda m: shared_lock.acquire()),
    "a filter of warnings": (
        lambda x: x * (2 if warns() else 1),
        lambda m: m.setattr(warnings, "filters", [("error", None, UserWarning, None, 0), *warnings.filters]),
    ),
    "an event": (lambda x: x * (2 if event.is_set() else 1), lambda m: event.set()),
    "an event of processes": (lambda x: x * (2 if shared_event.is_set() else 1), lambda m: shared_event.set()),
    "a value of processes": (lambda x: x * shared_value.value, lambda m: setattr(shared_value, "value", 3.0)),
    "an array of processes": (lambda x: x * shared_array[0], lambda m: operator.setitem(shared_array, 0, 3.0)),
    "mapped memory": (lambda x: x * mapped[0], lambda m: operator.setitem(mapped, 0, 3)),
    "an array of objects": (lambda x: x * objects[0]["a"], lambda m: m.setitem(objects[0], "a", 3.0)),
    "an attribute that a tensor gets": (
        lambda x: x * getattr(held, "scale", 1.0),
        lambda m: setattr(held, "scale", 3.0),
    ),
}


@pytest.fixture
def _as_before(monkeypatch):
    """What `monkeypatch` cannot put back."""
    errors, limit, handler = numpy.geterr(), sys.getrecursionlimit(), signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for held in (lock, shared_lock):
        held.acquire(False)
        held.release()
    numpy.seterr(**errors)
    sys.setrecursionlimit(limit)
    signal.signal(signal.SIGUSR1, handler)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("what", ASKED)
def test_another_answer_is_told(what, monkeypatch):
    function, change = ASKED[what]
    environment = recorded(lambda x: function(x)).environment
    assert environment.difference() is None
    change(monkeypatch)
    assert environment.difference() is not None


def test_shared_memory_is_told():
    memory = shared_memory.SharedMemory(create=True, size=8)
    try:
        memory.buf[0] = 1
        environment = recorded(lambda x: x * memory.buf[0]).environment
        assert environment.difference() is None
        memory.buf[0] = 3
        assert "which was" in str(environment.difference())
    finally:
        memory.close()
        memory.unlink()


def test_a_database_is_asked_by_a_module_that_is_called_whole():
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (scale real)")
    connection.execute("insert into t values (2.0)")
    model = nn.Sequential(nn.Linear(4, 4), Asks(lambda x: x * connection.execute("select scale from t").fetchone()[0]))
    trace = record_guarded(model, RecordingRequest((torch.ones(2, 4),), {})).trace
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]


def test_answers_that_nobody_asked_for_do_not_count(monkeypatch):
    """Nor what torch and loggers ask for themselves, nor attributes of objects that the code does not name."""
    config = types.SimpleNamespace(scale=2.0, other=1.0)

    def quiet(x):
        logger.debug("scale %s", config.scale)
        return nn.functional.dropout(x, 0.0) * config.scale * len(collections.Counter("ab"))

    environment = recorded(quiet).environment
    config.other = 3.0
    monkeypatch.setattr(sys, "argv", ["--fast"])
    monkeypatch.setattr(logging.getLogger("smpc.test"), "level", logging.ERROR)
    monkeypatch.setattr(math, "sqrt", lambda value: 7.0)
    monkeypatch.chdir("/")
    assert environment.difference() is None


def test_what_only_one_thread_at_a_time_may_do_is_recorded():
    """`with lock` asks nothing: it waits. Nor do filters count that forward sets for itself."""

    def careful(x):
        with lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("the slow path", UserWarning, stacklevel=1)
            return x * 2

    environment = recorded(careful).environment
    assert environment.difference() is None
    with lock:
        assert environment.difference() is None


def test_a_lock_that_forward_takes_is_given_back_by_the_recording():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

        def forward(self, x):
            return x * (2 if self.lock.acquire(blocking=False) else 3)

    model = nn.Sequential(nn.Linear(4, 4), Takes())
    trace = record_guarded(model, RecordingRequest((torch.ones(2, 4),), {})).trace
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]
    assert not model[1].lock.locked()
    with pytest.raises(TraceError, match="forward reads whether a lock is held and changes it"):
        record_guarded(Takes(), RecordingRequest((torch.ones(2, 4),), {}))


def test_nothing_is_put_back_into_classes_that_cannot_be_written():
    """Those of C give another string, equal to the last, whenever they are asked for their name, so it looked changed: a TypeError."""
    place = GuardSource(decimal.Decimal, "__name__", "the name of Decimal")
    place.write("Another")
    assert place.read() == "Decimal"
