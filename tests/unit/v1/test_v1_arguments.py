"""Arguments of step functions: split, against torch.chunk, by hand and for every container; rank 0's merged into the last rank's."""

import pickle
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from smpc.composer.microbatches import moved
from smpc.errors import StepError
from smpc.v1.steps.arguments import (
    PlainArgument,
    Slot,
    check_argument,
    form_of,
    map_leaves,
    merge_arguments,
    split_argument,
)

Point = namedtuple("Point", "x y")


class Sliced:
    def __init__(self, values):
        self.values = values

    def smp_slice(self, num_mb, mb, axis):
        return ("slice", num_mb, mb, axis, self.values)


def test_tensors_in_every_container():
    x, y = torch.arange(24).view(6, 4), torch.arange(6.0)
    batch = {
        "list": [x, "text"],
        "tuple": (y, 1),
        "named": Point(x, y),
        "ordered": OrderedDict(a=x),
        "default": defaultdict(list, a=[y]),
        "set": {y},
        "frozen": frozenset([x]),
        "output": CausalLMOutput(logits=x),
        "encoding": BatchEncoding({"input_ids": x}),
        "scalar": torch.tensor(3.0),
        "none": None,
    }
    parts = split_argument(batch, "batch", 3)
    assert len(parts) == 3
    for part, a, b in zip(parts, x.chunk(3), y.chunk(3), strict=True):
        assert part["list"][1] == "text"
        assert part["tuple"][1] == 1
        for tensor in (
            part["list"][0],
            part["named"].x,
            part["ordered"]["a"],
            *part["frozen"],
            part["output"].logits,
            part["encoding"]["input_ids"],
        ):
            assert torch.equal(tensor, a)
        for tensor in (part["tuple"][0], part["named"].y, part["default"]["a"][0], *part["set"]):
            assert torch.equal(tensor, b)
        assert {type(part[key]) for key in ("named", "ordered", "default")} == {Point, OrderedDict, defaultdict}
        assert (type(part["output"]), type(part["encoding"])) == (CausalLMOutput, BatchEncoding)
        assert part["default"]["new"] == [], "the default factory is kept"
        assert part["scalar"] is batch["scalar"]
        assert part["none"] is None
    assert batch["list"][0] is x, "the caller's containers are left alone"


class Scaled(namedtuple("Scaled", "x calls")):
    """A named tuple whose constructor changes what it is given."""

    def __new__(cls, x, calls=0):
        return super().__new__(cls, x * 2, calls + 1)


class Pair(list):
    """A list whose constructor takes two values."""

    def __init__(self, first, second):
        super().__init__([first, second])


@pytest.mark.parametrize(
    "parts", [lambda batch: split_argument(batch, "batch", 3), lambda batch: [moved(batch, torch.device("cpu"))]]
)
def test_no_constructor_of_a_container_runs_again(parts):
    x = torch.arange(6.0)
    found = parts({"scaled": Scaled(x), "pair": Pair(x, x + 1)})
    scaled, pair = zip(*[(part["scaled"], part["pair"]) for part in found], strict=True)
    assert torch.equal(torch.cat([each.x for each in scaled]), x * 2)
    assert {each.calls for each in scaled} == {1}
    assert {type(each) for each in pair} == {Pair}
    assert torch.equal(torch.cat([each[1] for each in pair]), x + 1)


def test_what_holds_no_tensor_in_a_container_is_passed_through():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = SimpleNamespace(lr=0.1, table=torch.ones(3))
    plain = {"a": [1, 2], "b": ("c",)}
    for value in (model, optimizer, options, plain, 3, None, "text", torch.Size([5])):
        assert all(part is value for part in split_argument(value, "value", 2))
        assert check_argument(value, "value", 2) == []


@pytest.mark.parametrize("axis", [1, -1])
def test_another_axis(axis):
    x = torch.arange(24).view(3, 8)
    for part, expected in zip(split_argument(x, "x", 4, axis), x.chunk(4, dim=1), strict=True):
        assert torch.equal(part, expected)


def test_objects_that_slice_themselves():
    value = Sliced([1])
    assert split_argument({"a": value}, "x", 2, 1) == [{"a": ("slice", 2, m, 1, [1])} for m in range(2)]
    assert split_argument(Sliced, "x", 2) == [Sliced, Sliced], "the class itself is not such an object"


def test_every_tensor_that_does_not_divide_is_named():
    batch = {"x": [torch.ones(6, 2), torch.ones(8)], "y": torch.ones(7), "empty": torch.empty(0), "fine": torch.ones(4)}
    assert check_argument(batch, "batch", 4) == [
        "argument batch['x'][0]: size 6 of axis 0 is not a multiple of microbatches = 4 (shape [6, 2])",
        "argument batch['y']: size 7 of axis 0 is not a multiple of microbatches = 4 (shape [7])",
        "argument batch['empty']: size 0 of axis 0 is not a multiple of microbatches = 4 (shape [0])",
    ]
    assert check_argument(torch.ones(4), "x", 4, axis=1) == [
        "argument x: expected a tensor with an axis 1, found shape [4]"
    ]


def test_paths():
    seen = []
    map_leaves({"a": [1, (2,)], "b": 3}, lambda leaf, path: seen.append((path, leaf)), "v")
    assert seen == [("v['a'][0]", 1), ("v['a'][1][0]", 2), ("v['b']", 3)]


class Unknown:
    pass


def sent(arguments):
    form, tensors = form_of(arguments)
    return pickle.loads(pickle.dumps(form)), tensors


def test_rank_0s_tensors_take_the_place_of_anything():
    x, y = torch.ones(2), torch.zeros(3)
    form, tensors = sent({"model": Unknown(), "batch": {"x": x, "n": [3, "t"]}, "y": y, "flag": True})
    assert form.skeleton == {
        "batch": {"x": Slot(0), "n": [PlainArgument(3, True), PlainArgument("t", True)]},
        "y": Slot(1),
    }
    model = Unknown()
    own = {"model": model, "batch": None, "y": torch.empty(0), "flag": False}
    merged = merge_arguments(form, own, tensors)
    assert merged == {"model": model, "batch": {"x": x, "n": [3, "t"]}, "y": y, "flag": False}


def test_plain_leaves_of_a_like_container_are_the_last_ranks_own():
    form, tensors = sent({"batch": {"x": torch.ones(2), "n": 3, "o": Unknown()}})
    own = Unknown()
    merged = merge_arguments(form, {"batch": {"x": torch.empty(0), "n": 7, "o": own}}, tensors)
    assert (merged["batch"]["n"], merged["batch"]["o"]) == (7, own)


def test_a_tensor_that_occurs_twice_is_sent_once():
    x = torch.ones(2)
    form, tensors = form_of({"ids": x, "labels": x, "both": [x, x]})
    assert len(tensors) == 1
    assert form.skeleton == {"ids": Slot(0), "labels": Slot(0), "both": [Slot(0), Slot(0)]}


def test_rank_0s_objects_that_split_themselves_take_the_place_of_the_last_ranks():
    """The last rank's own was used, without a word."""
    x = torch.ones(2)
    form, tensors = sent({"batch": Sliced([x, x, 3]), "more": [x, Sliced(4)]})
    assert tensors == [x]
    merged = merge_arguments(form, {"batch": Sliced([x * 0, x * 0, 5]), "more": None}, tensors)
    assert merged["batch"].values == [x, x, 3]
    assert merged["more"][1].values == 4
    assert form == sent({"batch": Sliced([x, x, 3]), "more": [x, Sliced(4)]})[0]


def test_an_object_that_splits_itself_and_has_no_pickle_is_an_error():
    with pytest.raises(StepError, match="argument batch: expected an object with smp_slice that can be pickled"):
        form_of({"batch": Sliced(lambda: 1)})


def test_what_cannot_be_sent_and_is_not_there_is_an_error():
    form, tensors = form_of({"batch": [torch.ones(1), Unknown()]})
    with pytest.raises(StepError, match=r"argument batch\[1\]"):
        merge_arguments(form, {"batch": None}, tensors)


def test_forms_are_equal_while_only_values_of_tensors_change():
    first, _ = form_of({"x": [torch.ones(2), 1]})
    assert form_of({"x": [torch.zeros(2), 1]})[0] == first
    assert form_of({"x": [torch.zeros(3), 1]})[0] != first
    assert form_of({"x": [torch.zeros(2), 2]})[0] != first
