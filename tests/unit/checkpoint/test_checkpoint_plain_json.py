"""Nested values as JSON and tensors: what comes back, and what is refused with its place."""

import argparse
import enum
import json
import threading
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from smpc.checkpoint.format.plain_json import SavedObject, flatten, rebuild
from smpc.errors import CheckpointError

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = PLAIN | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.just({"$": "tensor"}),
    max_leaves=20,
)


def there_and_back(tree):
    values, tensors = flatten(tree, "user")
    return rebuild(json.loads(json.dumps(values, allow_nan=False)), tensors.__getitem__)


@given(TREES)
def test_what_goes_in_comes_out(tree):
    found = there_and_back(tree)
    assert found == tree
    assert repr(found) == repr(tree)  # types too, and the order of keys


def test_numbers_of_numpy_counters_and_tensors():
    tree = {"a": [np.float32(0.5), np.int64(3), np.bool_(True)], "c": Counter([2, 2, 5]), "o": OrderedDict(x=1)}
    found = there_and_back({**tree, "t": {"x/y": torch.ones(2)}, "n": np.arange(3), "nan": float("nan")})
    assert found["a"] == [0.5, 3, True]
    assert [type(value) for value in found["a"]] == [np.float32, np.int64, np.bool_]
    assert (type(found["c"]), found["c"]) == (Counter, tree["c"])
    assert found["o"] == {"x": 1}
    assert torch.equal(found["t"]["x/y"], torch.ones(2))
    assert torch.equal(found["n"], torch.arange(3))
    assert found["nan"] != found["nan"]


def test_other_plain_types_come_back_as_they_are():
    tree = {
        "counts": defaultdict(int, a=1),
        "lists": defaultdict(list, {(1, 2): [3]}),
        "none": defaultdict(None),
        "sets": [{3, 1, 2}, frozenset({2, 1})],
        "torch": [torch.bfloat16, torch.device("cpu", 0)],
        "nan": np.float64("nan"),
    }
    found = there_and_back(tree)
    assert repr(found) == repr(tree)
    assert [found[name].default_factory for name in ("counts", "lists", "none")] == [int, list, None]
    assert type(found["nan"]) is np.float64


class Config:
    """As a model's configuration: attributes of all sorts, itself among them."""

    kind = "class attributes are the class's"

    def __init__(self):
        self.width, self.rates, self.weight = 8, {"lr": np.float32(0.5)}, torch.ones(2)
        self.own, self.call, self.inner = self, len, argparse.Namespace(lr=0.1, layers=[1])


class Slotted:
    __slots__ = ("__dict__", "first")

    def __init__(self):
        self.first, self.second = 1, 2


class Rude:
    def __repr__(self):
        raise OSError("no")


def test_objects_come_back_as_mappings_that_name_their_class_and_nothing_runs():
    given = {"config": Config(), "slots": Slotted(), "rude": Rude(), "lock": threading.Lock(), "name": Colour.RED}
    values, tensors = flatten(given, "user", objects=True)
    assert flatten(given, "user", objects=True)[0] == values, "the same bytes again"
    found = rebuild(json.loads(json.dumps(values)), tensors.__getitem__)
    config = found["config"]
    assert isinstance(config, SavedObject)
    assert config.class_name == f"{Config.__module__}.Config"
    assert (config["width"], config.width, config.rates["lr"]) == (8, 8, 0.5)
    assert torch.equal(config.weight, torch.ones(2))
    assert config.inner == {"lr": 0.1, "layers": [1]}
    assert config.inner.class_name == "argparse.Namespace"
    assert config.own == {}
    assert config.call.text == "<built-in function len>"
    with pytest.raises(AttributeError, match="Config has no attribute 'kind'"):
        _ = config.kind
    assert found["slots"] == {"first": 1, "second": 2}
    assert "repr raises OSError" in found["rude"].text
    assert found["lock"].text == "<unlocked _thread.lock object>"
    assert found["name"]["_value_"] == 1
    assert there_and_back({"again": found["slots"]})["again"] == {"first": 1, "second": 2}, "it can be saved again"


@pytest.mark.parametrize(
    "hostile",
    [
        {"$": "dtype", "name": "load"},
        {"$": "defaultdict", "factory": "system", "items": []},
        {"$": "number", "dtype": "object", "value": 1},
        {"$": "object", "class": "os.system"},
    ],
)
def test_damaged_values_of_these_types_are_refused(hostile):
    with pytest.raises(CheckpointError, match="is damaged, or a later release wrote it"):
        rebuild(hostile, {}.__getitem__)


def schedulers(optimizer):
    """Schedulers of torch with state of every sort."""
    yield lr_scheduler.MultiStepLR(optimizer, [1, 3])
    yield lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
    yield lr_scheduler.OneCycleLR(optimizer, 0.1, 20)
    yield lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    yield lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    warmup, decay = lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)
    yield lr_scheduler.SequentialLR(optimizer, [warmup, decay], [2])


@pytest.mark.parametrize("number", range(6))
def test_schedulers_go_on_where_they_were(number):
    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, momentum=0.9)
        return optimizer, list(schedulers(optimizer))[number]

    def run(optimizer, scheduler, count):
        rates = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = made()
    run(optimizer, scheduler, 3)
    saved = there_and_back({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    expected = run(optimizer, scheduler, 4)
    other, its = made()
    other.load_state_dict(saved["optimizer"])
    its.load_state_dict(saved["scheduler"])
    assert run(other, its, 4) == expected


class Colour(enum.Enum):
    RED = 1


def test_all_that_cannot_be_saved_is_listed_with_its_place():
    tree = {"a": [1, {len}], "b": {"c": Colour.RED}, (1, Colour.RED): 0}
    with pytest.raises(CheckpointError) as caught:
        flatten(tree, "user")
    assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
        "user/a/1/0 is a builtins.builtin_function_or_method",
        f"user/b/c is a {__name__}.Colour",
        f"user/key 2/1 is a {__name__}.Colour",
    ]
    tree["b"]["c"] = tree
    with pytest.raises(CheckpointError, match="nested too deeply, or contains itself"):
        flatten(tree, "user")


@pytest.mark.parametrize(
    "values", [{"$": "what"}, {"$": "tuple"}, {"$": "dict", "items": [1]}, {"$": "bytes", "hex": "x"}, {"$": []}]
)
def test_damaged_values_are_refused(values):
    with pytest.raises(CheckpointError, match="is damaged, or a later release wrote it"):
        rebuild([values], torch.ones)
