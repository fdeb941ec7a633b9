"""What forward reads from outside the process, and from what the standard library holds: it was frozen at the first step."""

import array
import contextvars
import ctypes
import datetime
import gc
import logging
import os
import secrets
import time
import uuid
import weakref
from pathlib import Path
from time import monotonic, perf_counter

import pytest
import torch
from applied import applying
from torch import nn

from smpc.errors import TraceError
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.environment import outside_reads, process_questions, reads
from smpc.tracer.environment.outside_reads import CallHook
from smpc.tracer.ir import NodeKind
from smpc.tracer.record import record_guarded

SCALE = "SMPC_TEST_SCALE"
STARTED = monotonic()


class Asks(nn.Module):
    """Multiplies by what a function says."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.linear(x) * self.function()


def recorded(module):
    return record_guarded(module, RecordingRequest((torch.ones(2, 4),), {}))


def whole_modules(trace):
    return [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE]


def entropy():
    return int.from_bytes(os.urandom(2), "little") / 1e4


OTHER_EVERY_TIME = {
    "the clock": time.perf_counter,
    "the clock in nanoseconds": lambda: float(time.time_ns() % 10**9),
    "the date": lambda: datetime.datetime.now().microsecond / 1e6,
    "entropy": entropy,
    "entropy, through uuid": lambda: (uuid.uuid4().int % 10**6) / 10,
    "entropy, through secrets": lambda: secrets.randbelow(10**6) / 10,
}


@pytest.mark.parametrize("name", OTHER_EVERY_TIME)
def test_what_is_other_every_time_has_its_module_called_whole(name):
    read = OTHER_EVERY_TIME[name]
    assert whole_modules(recorded(nn.Sequential(nn.Linear(4, 4), Asks(lambda: read()))).trace) == ["1"]
    with pytest.raises(
        TraceError,
        match=r"the model itself, test_tracer_outside_reads.py:\d+: forward (reads the clock|asks for the date|draws from .*entropy)",
    ):
        recorded(Asks(lambda: read()))


def measured():
    begin = time.perf_counter()
    return 2.0 if time.perf_counter() - begin < 1e6 else 3.0


def measured_by_name():
    begin = perf_counter()
    return 2.0 if perf_counter() - begin < 1e6 else 3.0


def test_a_clock_that_only_measures_does_not_matter():
    before = time.time
    for read in (measured, measured_by_name):
        assert whole_modules(recorded(Asks(read)).trace) == []
    assert time.time is before


BEGIN, HOUR = time.time(), 3600.0
DEADLINES = {
    "a deadline": lambda: 2.0 if time.time() < BEGIN + HOUR else 3.0,
    "time that has passed": lambda: 2.0 if monotonic() - STARTED < HOUR else 3.0,
    "in nanoseconds": lambda: 2.0 if time.time_ns() < (BEGIN + HOUR) * 1e9 else 3.0,
    "the year": lambda: float(time.localtime().tm_year),
    "the year as text": lambda: float(time.strftime("%Y")),
    "the day, by its class": lambda: float(datetime.date.today().toordinal()),
    "a deadline, by its class": lambda: 2.0 if datetime.datetime.now().timestamp() < BEGIN + HOUR else 3.0,
}


@pytest.mark.parametrize("name", DEADLINES)
def test_what_changes_some_time_has_its_module_called_whole(name):
    """Two recordings one after the other found the same."""
    read = DEADLINES[name]
    assert whole_modules(recorded(nn.Sequential(nn.Linear(4, 4), Asks(lambda: read()))).trace) == ["1"]
    with pytest.raises(TraceError, match=r"forward (reads the clock|asks for the date)"):
        recorded(Asks(lambda: read()))


def test_a_date_that_is_told_is_no_clock():
    assert whole_modules(recorded(Asks(lambda: float(time.strftime("%Y", time.gmtime(0))))).trace) == []


def test_files_are_read_by_a_module_that_is_called_whole(tmp_path):
    path = tmp_path / "scale"
    path.write_text("2.0")

    def opened():
        with open(path) as file:
            return float(file.read())

    for read in (lambda: float(Path(path).read_text()), opened, lambda: 2.0 if os.path.exists(path) else 3.0):
        assert whole_modules(recorded(nn.Sequential(nn.Linear(4, 4), Asks(read))).trace) == ["1"]
        with pytest.raises(TraceError, match="forward opens a file"):
            recorded(Asks(read))


class LoadsOnce(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.path, self.scale = path, None

    def forward(self, x):
        if self.scale is None:
            self.scale = float(Path(self.path).read_text())
        return x * self.scale


def test_a_file_that_is_read_once_is_state(tmp_path):
    (tmp_path / "scale").write_text("2.0")
    recording = recorded(LoadsOnce(tmp_path / "scale"))
    assert whole_modules(recording.trace) == []
    assert recording.environment.difference() is None


context = contextvars.ContextVar("context", default=2.0)
numbers = array.array("d", [2.0])
octets = bytearray(b"\2")
view = memoryview(octets)
number = ctypes.c_double(2.0)
structure = type("Structure", (ctypes.Structure,), {"_fields_": [("scale", ctypes.c_double)]})(2.0)


class Key:
    scale = 2.0

    def twice(self):
        return 2 * self.scale


key, empty = Key(), weakref.WeakSet()


class Descriptor:
    scale = 2.0

    def __get__(self, instance, owner):
        return self.scale


class Owner:
    described = Descriptor()


owner = Owner()


def function():
    return function.scale


function.scale = 2.0


stored = {"scale": 2.0}


class Store:
    def __getattr__(self, name):
        return stored[name]  # a KeyError for what Python itself looks for


store = Store()
CHANGES = {
    "an environment variable": (lambda: float(os.environ.get(SCALE, "2")), lambda: os.environ.update({SCALE: "3"})),
    "one in bytes": (lambda: float(os.environb.get(SCALE.encode(), b"2")), lambda: os.environ.update({SCALE: "3"})),
    "all of them": (lambda: float(len([n for n in os.environ if n == SCALE])), lambda: os.environ.update({SCALE: "3"})),
    "a context variable": (context.get, lambda: context.set(3.0)),
    "an array": (lambda: numbers[0], lambda: numbers.append(1.0)),
    "bytes": (lambda: float(octets[0]), lambda: octets.__setitem__(0, 3)),
    "a view of bytes": (lambda: float(view[0]), lambda: octets.__setitem__(0, 4)),
    "a number of C": (lambda: number.value, lambda: setattr(number, "value", 3.0)),
    "a structure of C": (lambda: structure.scale, lambda: setattr(structure, "scale", 3.0)),
    "a weak set that gets a member": (lambda: float(len(empty)), lambda: empty.add(key)),
    "a descriptor": (lambda: owner.described, lambda: setattr(Descriptor, "scale", 3.0)),
    "an attribute of a function": (function, lambda: setattr(function, "scale", 3.0)),
    "behind a __getattr__": (lambda: store.scale, lambda: stored.update(scale=3.0)),
    "the default dtype": (
        lambda: 2.0 if torch.get_default_dtype() is torch.float32 else 3.0,
        lambda: torch.set_default_dtype(torch.float64),
    ),
    "a setting of kernels": (
        lambda: 2.0 if torch.backends.cuda.matmul.allow_tf32 else 3.0,
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    ),
}


@pytest.fixture
def as_before(monkeypatch):
    monkeypatch.delenv(SCALE, raising=False)
    dtype, allowed = torch.get_default_dtype(), torch.backends.cuda.matmul.allow_tf32
    yield
    os.environ.pop(SCALE, None)
    torch.set_default_dtype(dtype)
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told(name, as_before):
    read, change = CHANGES[name]
    recording = recorded(nn.Sequential(nn.Linear(4, 4), Asks(lambda: read())))
    assert whole_modules(recording.trace) == []
    assert recording.environment.difference() is None
    change()
    assert recording.environment.difference() is not None


WEAK = {
    "reference": (weakref.ref, lambda found: found().scale),
    "proxy": (weakref.proxy, lambda found: found.scale),
    "method": (lambda owner: weakref.WeakMethod(owner.twice), lambda found: found()()),
    "finalizer": (lambda owner: weakref.finalize(owner, print), lambda found: 2.0 if found.alive else 1.0),
    "set": (lambda owner: weakref.WeakSet([owner]), lambda found: float(len(found))),
    "dict of values": (lambda owner: weakref.WeakValueDictionary(key=owner), lambda found: found["key"].scale),
    "dict of keys": (lambda owner: weakref.WeakKeyDictionary({owner: 2.0}), lambda found: sum(found.values())),
    "list of references": (lambda owner: [weakref.ref(owner)], lambda found: found[0]().scale),
}


class Weak(nn.Module):
    """Multiplies by what it finds behind a weak reference of its own."""

    def __init__(self, kind):
        super().__init__()
        self.owner = Key()
        make, self.ask = WEAK[kind]
        self.found = make(self.owner)

    def forward(self, x):
        return x * self.ask(self.found)


@pytest.mark.parametrize("kind", WEAK)
def test_what_is_held_weakly_is_not_held_by_a_recording(kind):
    """A guard would keep it alive: the script lets it go, and plain PyTorch finds it gone."""
    model = nn.Sequential(nn.Linear(4, 4), Weak(kind))
    assert whole_modules(recorded(model).trace) == ["1"]
    gone = weakref.ref(model[1].owner)
    del model[1].owner
    assert gone() is None
    with pytest.raises(TraceError, match="with a weak reference to what others hold"):
        recorded(Weak(kind))


@pytest.mark.parametrize("kind", ["reference", "set"])
def test_what_is_gone_already_stays_so(kind):
    model = Weak(kind)
    model.ask = lambda found: 2.0
    del model.owner
    recording = recorded(nn.Sequential(nn.Linear(4, 4), model))
    assert whole_modules(recording.trace) == []
    assert recording.environment.difference() is None
    model.found = None
    assert recording.environment.difference() is not None


def test_a_proxy_of_what_is_gone_is_refused():
    """It was a bare ReferenceError: even `isinstance` raises it."""
    model = Weak("proxy")
    del model.owner
    with pytest.raises(TraceError, match="attribute 'found' of module '1' is a weak proxy of an object that is gone"):
        recorded(nn.Sequential(nn.Linear(4, 4), model))


class Child(nn.Module):
    """Reads its parent, as modules do that must not register it."""

    def __init__(self, parent):
        super().__init__()
        self.parent, self.proxies, self.all = weakref.ref(parent), (weakref.proxy(parent),), weakref.WeakSet([parent])

    def forward(self, x):
        return x * self.parent().scale * self.proxies[0].scale * len(self.all)


def test_the_model_holds_its_own_modules():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.child, self.scale = nn.Linear(4, 4), Child(self), 2.0

        def forward(self, x):
            return self.child(self.linear(x))

    model = Parent()
    recording = recorded(model)
    assert whole_modules(recording.trace) == []
    assert recording.environment.difference() is None
    model.scale = 3.0
    assert recording.environment.difference() is not None


def test_text_of_a_tensor_matters_where_the_trace_depends_on_it(capsys):
    def told(x):
        print(f"{x} {x.sum():.3f}")
        return 2.0

    def asking(ask):
        return applying(lambda _, x: x * ask(x))

    assert whole_modules(recorded(asking(told)).trace) == []
    assert "whose values are not known" in capsys.readouterr().out
    asked = ["-", "nan", "inf", "0", "7", "e+", "True"]
    within = [lambda x, part=part: 2.0 if part in str(x) else 3.0 for part in asked]
    for ask in (lambda x: float(len(str(x))), lambda x: float(f"{x.sum():.3f}"), lambda x: len(repr(x)), *within):
        assert whole_modules(recorded(asking(ask)).trace) == ["1"]


def test_the_garbage_collector_is_asked_by_a_module_that_is_called_whole():
    model = nn.Sequential(nn.Linear(4, 4), Asks(lambda: 2.0 if gc.isenabled() else 3.0))
    assert whole_modules(recorded(model).trace) == ["1"]


def counted():
    counted.calls += 1
    return float(counted.calls)


counted.calls = 0


def test_state_of_a_function_is_refused():
    with pytest.raises(TraceError, match="forward reads attribute 'calls' of counted and changes it"):
        recorded(Asks(counted))
    assert counted.calls == 0


def test_what_torch_python_and_loggers_read_for_themselves_does_not_matter(tmp_path, caplog):
    """They look at the clock, the environment and files all the time."""

    def logged():
        logging.getLogger("smpc.test").warning("at %s", "any time")
        import json.tool  # noqa: F401  an import reads files

        with torch.profiler.record_function("block"):
            return 2.0

    recording = recorded(Asks(logged))
    assert whole_modules(recording.trace) == []
    assert not [guard for guard in recording.environment.guards if "environment variable" in guard.place.text]


def test_messages_hold_no_value_of_the_environment(monkeypatch):
    """A variable may be a password."""
    monkeypatch.setenv(SCALE, "31415")
    recording = recorded(Asks(lambda: float(os.environ[SCALE])))
    for change in (lambda: monkeypatch.setenv(SCALE, "27182"), lambda: monkeypatch.delenv(SCALE)):
        change()
        text = str(recording.environment.difference())
        assert text.startswith(f"environment variable '{SCALE}': ")
        assert "31415" not in text
        assert "27182" not in text


def test_nothing_that_is_asked_of_the_process_is_a_method_of_a_plain_container():
    """Calls of those are not looked at: most calls in a recording are such."""
    asked_of = [
        *outside_reads._FUNCTIONS,
        *process_questions._OF_TORCH,
        *process_questions._OF_PYTHON,
        *process_questions._WARNS,
        *reads._LOOKING,
    ]
    assert len(asked_of) > 30
    assert not [function for function in asked_of if type(getattr(function, "__self__", None)) in CallHook.PLAIN]
