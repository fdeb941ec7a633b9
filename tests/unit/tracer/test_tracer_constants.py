"""Constants: which there are, their JSON form, their source."""

import enum
import importlib
import json
import math

import numpy
import pytest
import torch

from smpc.tracer import Opaque, Ref, TraceDevice
from smpc.tracer.constants import decode, encode, is_constant, map_references, normalise, references, resolve, to_source


class Colour(enum.Enum):
    RED = 1


class Mode(enum.IntEnum):
    FAST = 2


class Name(enum.StrEnum):
    GELU = "gelu"


class Outer:
    class Inner:
        pass


CONSTANTS = [
    None, True, 0, -3, 1.5, -0.0, 1e-300, 2**70, "text 'with' \"quotes\"\n", "", ..., 1 + 2j, torch.float32, torch.bool,
    torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3]), torch.strided, torch.preserve_format, Colour.RED, Mode.FAST,
    Name.GELU, (), (1,), (1, (2, [3, {}])), [None, ...], {"a": 1, 2: "b", "c": (torch.int64,)}, slice(None, -1, 2), int, Outer.Inner,
    torch.nn.functional.gelu, math.inf, -math.inf,
]  # fmt: skip
SCOPE = {"torch": torch, "importlib": importlib}


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_json_and_source_give_the_constant_back(value):
    again = decode(json.loads(json.dumps(encode(value))))
    assert (type(again), again) == (type(value), value)
    read = eval(to_source(value, str), dict(SCOPE))
    assert (type(read), read) == (type(value), value)


def test_nan_and_negative_zero_survive():
    for value in (decode(encode(math.nan)), eval(to_source(math.nan, str), {})):
        assert math.isnan(value)
    assert math.copysign(1, decode(json.loads(json.dumps(encode(-0.0))))) == -1


def test_what_is_constant():
    flat = [
        value
        for value in CONSTANTS
        if not isinstance(value, (tuple, list, dict, slice)) or isinstance(value, torch.Size)
    ]
    assert all(map(is_constant, flat))
    assert not any(map(is_constant, [object(), lambda: 0, iter(()), numpy.ones(2)]))
    assert type(normalise(numpy.float64(1.5))) is float
    assert type(normalise(numpy.int32(3))) is int


def test_what_has_no_json_form_says_so():
    with pytest.raises(TypeError, match=r"object .* has no JSON form"):
        encode(object())


TREE = (Ref("x"), [Ref("y"), {"k": (Ref("x"), 1)}], slice(Ref("z"), None), "x")


def test_references_come_once_each_in_order():
    assert references(TREE) == ("x", "y", "z")
    assert references(("x", 1)) == ()


def test_references_are_replaced_everywhere():
    assert map_references(TREE, str.upper) == ("X", ["Y", {"k": ("X", 1)}], slice("Z", None), "x")


def test_references_and_the_device_in_source():
    assert to_source(TREE, "v_{}".format) == "(v_x, [v_y, {'k': (v_x, 1)}], slice(v_z, None, None), 'x')"
    assert to_source(TraceDevice(), str) == "self._device"


@pytest.mark.parametrize("value", [Ref("x"), Opaque("tensor"), TraceDevice()])
def test_marks_have_a_json_form(value):
    assert decode(json.loads(json.dumps(encode({"k": value})))) == {"k": value}


def test_names_are_resolved():
    assert resolve("torch.nn:functional.gelu") is torch.nn.functional.gelu
    assert resolve(f"{__name__}:Outer.Inner") is Outer.Inner
