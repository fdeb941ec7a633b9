"""What a recording would bake in where a module is cut, and its stages do not call it: all of it is guarded, or refused."""

import builtins
import hashlib
import inspect
import queue
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

from smpc.errors import TraceError
from smpc.tracer import record
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.ir import NodeKind
from smpc.tracer.record import record_guarded


class Model(nn.Module):
    """Applies a function between two layers: the model itself is never called by a stage."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function
        self.register_buffer("buffer", torch.ones(4))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


class Holder:
    """Holds attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slots:
    __slots__ = ("beta",)

    def __init__(self):
        self.beta = 2.0


def in_closures():
    """Each has a class or an object of its own: what counts is that no module holds it."""
    held, slots, listed = Holder(beta=2.0), Slots(), [Holder(beta=2.0)]

    class Local:
        beta = 2.0

        @property
        def gamma(self):
            return Local.beta

    local = Local()
    return {
        "attribute": (lambda model, x: x * held.beta, lambda model: setattr(held, "beta", 3.0)),
        "slot": (lambda model, x: x * slots.beta, lambda model: setattr(slots, "beta", 3.0)),
        "class": (lambda model, x: x * Local.beta, lambda model: setattr(Local, "beta", 3.0)),
        "property": (lambda model, x: x * local.gamma, lambda model: setattr(Local, "beta", 3.0)),
        "in a list": (lambda model, x: x * listed[0].beta, lambda model: setattr(listed[0], "beta", 3.0)),
        "default": (lambda model, x, held=held: x * held.beta, lambda model: setattr(held, "beta", 3.0)),
    }


def of_tensors():
    tensor = Holder(value=torch.ones(4))
    return {
        "attribute of a parameter": (
            lambda model, x: x * getattr(model.first.weight, "scale", 2.0),
            lambda model: setattr(model.first.weight, "scale", 3.0),
        ),
        "attribute of a buffer": (
            lambda model, x: x * (2.0 if hasattr(model.buffer, "scale") else 3.0),
            lambda model: setattr(model.buffer, "scale", 3.0),
        ),
        "shape of a buffer": (
            lambda model, x: x * model.buffer.numel(),
            lambda model: setattr(model, "buffer", torch.ones(8)),
        ),
        "dtype of a buffer": (
            lambda model, x: x * model.buffer.element_size(),
            lambda model: setattr(model, "buffer", torch.ones(4, dtype=torch.float64)),
        ),
        "tensor of an object": (
            lambda model, x: x * tensor.value,
            lambda model: setattr(tensor, "value", torch.full((4,), 3.0)),
        ),
    }


def of_the_process():
    return {
        "default dtype": (
            lambda model, x: x * torch.tensor([1.0]).element_size(),
            lambda model: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
        ),
        "builtin": (
            lambda model, x: x * max(1.0, 2.0),
            lambda model: setattr(builtins, "max", lambda *values: 3.0),
            lambda maximum=max: setattr(builtins, "max", maximum),
        ),
        "global before a builtin": (
            lambda model, x: x * min(1.0, 2.0),
            lambda model: globals().__setitem__("min", lambda *values: 3.0),
            lambda: globals().pop("min", None),
        ),
    }


def scaled(x, scale=2.0):
    return x * scale


def asked_of_functions():
    def put_back():
        scaled.__defaults__, scaled.__annotations__ = (2.0,), {}

    return {
        "default that is asked for": (
            lambda model, x: x * scaled.__defaults__[0],
            lambda model: setattr(scaled, "__defaults__", (3.0,)),
            put_back,
        ),
        "signature": (
            lambda model, x: x * inspect.signature(scaled).parameters["scale"].default,
            lambda model: setattr(scaled, "__defaults__", (3.0,)),
            put_back,
        ),
        "annotations": (
            lambda model, x: x * len(inspect.get_annotations(scaled)),
            lambda model: setattr(scaled, "__annotations__", {"x": torch.Tensor}),
            put_back,
        ),
    }


def set_on(cls, name, value, first=None):
    """What reads an attribute of a class, gives it another value, and takes it away; `first`: what it has before."""
    if first is not None:
        setattr(cls, name, first)
    return (
        lambda model, x: x * getattr(model.first, name, 2.0),
        lambda model: setattr(cls, name, value),
        lambda: delattr(cls, name),
    )


def of_libraries():
    digest = hashlib.sha256()
    return {
        "attribute of a layer's class": set_on(nn.Linear, "first_scale", 3.0, 2.0),
        "attribute that a layer's class gets": set_on(nn.Linear, "late_scale", 3.0),
        "attribute that all modules get": set_on(nn.Module, "module_scale", 3.0),
        "attribute that all tensors get": (
            lambda model, x: x * getattr(x, "scale", 2.0),
            lambda model: setattr(torch.Tensor, "scale", 3.0),
            lambda: delattr(torch.Tensor, "scale"),
        ),
        "hash": (lambda model, x: x * digest.digest()[0], lambda model: digest.update(b"more")),
        "thread": (
            lambda model, x: x * getattr(threading.current_thread(), "scale", 2.0),
            lambda model: setattr(threading.current_thread(), "scale", 3.0),
            lambda: vars(threading.current_thread()).pop("scale"),
        ),
    }


def one_list(model):
    model.other = [1]


def changes():
    """By name: what forward applies, what changes between steps, and what puts it back."""
    by_list = (lambda model, x: x * (2.0 if model.listed is model.other else 3.0), one_list)
    groups = in_closures(), of_tensors(), of_the_process(), asked_of_functions(), of_libraries()
    return {**{name: change for group in groups for name, change in group.items()}, "which list it is": by_list}


@pytest.mark.parametrize("name", changes())
def test_a_change_is_told(name):
    function, change, *restore = changes()[name]
    listed = [1]
    model = Model(function, listed=listed, other=listed)
    environment = record_guarded(model, RecordingRequest((torch.ones(2, 4),), {})).environment
    assert environment.difference() is None
    try:
        change(model)
        assert environment.difference() is not None
    finally:
        for each in restore:
            each()


def test_attributes_of_parameters_are_read():
    model = Model(lambda model, x: x * getattr(model.first.weight, "scale", 2.0))
    model.first.weight.scale = 5.0
    assert [node.args[1] for node in record(model, (torch.ones(2, 4),)).nodes if node.target == "torch.Tensor.mul"] == [
        5.0
    ]


def counting():
    class Local:
        calls = 0

    def count(model, x):
        Local.calls += 1
        return x * Local.calls

    return count


def tagging(model, x):
    model.first.weight.tag = True
    return x


outside = []
REFUSED = {
    "count in a class": (counting(), "changes it"),
    "identity": (
        lambda model, x: x * (2.0 if any(each is model.first.weight for each in outside) else 3.0),
        "which tensor is which",
    ),
    "key": (lambda model, x: x * dict.fromkeys(outside, 2.0).get(model.first.weight, 3.0), "up in a dict or a set"),
    "address": (
        lambda model, x: x * (2.0 if id(model.first.weight) == id(outside[0]) else 3.0),
        "where objects are in memory",
    ),
    "number of references": (lambda model, x: x * sys.getrefcount(x), "where objects are in memory"),
    "version": (lambda model, x: x * model.buffer._version, "counts the writes into buffer"),
    "attribute of a parameter": (tagging, "sets attribute 'tag' of first.weight"),
    "queue": (lambda model, x: x * model.steps.get(), "goes on with a SimpleQueue"),
    "attribute of all parameters": (lambda model, x: x * model.first.weight.scale_of_all, "given nn.Parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused(name, monkeypatch):
    function, message = REFUSED[name]
    steps = queue.SimpleQueue()
    steps.put(2.0)
    model = Model(function, steps=steps)
    outside[:] = [model.first.weight]
    monkeypatch.setattr(nn.Parameter, "scale_of_all", 2.0, raising=False)
    with pytest.raises(TraceError, match=message):
        record(model, (torch.ones(2, 4),))


def numbers():
    number = 0.0
    while True:
        yield (number := number + 1.0)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_generator_is_refused_even_in_a_module_that_is_called_whole(has_begun):
    steps = numbers()
    if has_begun:
        next(steps)
    model = nn.Sequential(nn.Linear(4, 4), Model(lambda model, x: x * next(model.steps), steps=steps))
    with pytest.raises(TraceError, match="goes on with generator numbers"):
        record(model, (torch.ones(2, 4),))


def test_a_generator_that_forward_makes_is_none_of_these():
    def sums(model, x):
        steps = numbers()
        return x * (next(steps) + next(steps))

    assert record(Model(sums), (torch.ones(2, 4),))


class Named(OrderedDict):
    """A class of a script's own, as Hugging Face's outputs are."""

    def __setitem__(self, key, value):
        raise AssertionError("nobody but the script writes by this")


@pytest.mark.parametrize("cls", [OrderedDict, Named])
@pytest.mark.parametrize("does", ["nothing", "reads", "changes"])
def test_an_ordered_dict_is_put_back_with_its_order(cls, does):
    """Dict's own methods know nothing of that order, and leave it broken."""
    scales = cls()
    for name in ("first", "second", "third"):
        OrderedDict.__setitem__(scales, name, 2.0)
    scales.move_to_end("first")

    def scaled(model, x):
        if does == "changes":
            scales.move_to_end("second")
        return x if does == "nothing" else x * next(iter(scales.values()))

    model = Model(scaled, held=Holder(scales=scales))
    if does == "changes":
        with pytest.raises(TraceError, match="changes it"):
            record(model, (torch.ones(2, 4),))
    else:
        record(model, (torch.ones(2, 4),))
    assert list(scales.items()) == [("second", 2.0), ("third", 2.0), ("first", 2.0)]
    scales.move_to_end("third")
    assert list(scales) == ["second", "first", "third"]


def test_a_file_is_put_back_where_it_was(tmp_path):
    (tmp_path / "factors").write_text("2\n3\n")
    with (tmp_path / "factors").open() as file:
        inner = Model(lambda model, x: x * float(model.file.readline()), file=file)
        nodes = record(nn.Sequential(nn.Linear(4, 4), inner), (torch.ones(2, 4),)).nodes
        assert [node.target for node in nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]
        assert file.readline() == "2\n"
