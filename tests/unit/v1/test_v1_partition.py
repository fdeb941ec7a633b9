"""smp.partition and smp.set_partition in one process; what several ranks make of them is in tests/multiproc/test_v1_training.py."""

import copy
import pickle

import pytest
import torch
from torch import nn

import smpc.v1 as smp
from smpc.errors import ConfigError, ConfigTypeError
from smpc.v1.declare.partition import manual_partition, read_marks


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    """The example of the reference."""

    def __init__(self):
        super().__init__()
        with smp.partition(1):
            self.child0 = Child()
            with smp.partition(2):
                self.child1 = Child()
            self.child2 = Child()
        self.child3 = Child()

    def forward(self, x):
        return self.child3(self.child2(self.child1(self.child0(x))))


EXAMPLE = {
    "child0": 1,
    "child0.linear": 1,
    "child1": 2,
    "child1.linear": 2,
    "child2": 1,
    "child2.linear": 1,
}


@pytest.fixture
def by_hand():
    smp.init({"pipeline_parallel_degree": 1, "auto_partition": False, "default_partition": 0})
    yield
    smp.shutdown()


def test_the_innermost_context_counts():
    assert read_marks(Model()) == EXAMPLE


def test_contexts_leave_no_trace_behind():
    construct = nn.Module.__init__
    with pytest.raises(ZeroDivisionError), smp.partition(1), smp.partition(0):
        1 / 0  # noqa: B018
    assert nn.Module.__init__ is construct
    assert read_marks(Child()) == {}


def test_a_context_around_the_whole_model_and_inside_it():
    with smp.partition(0):
        model = Model()
    assert read_marks(model) == {"": 0, **EXAMPLE, "child3": 0, "child3.linear": 0}


def test_marks_are_copied_and_pickled_with_the_module():
    model = Model()
    assert read_marks(copy.deepcopy(model)) == read_marks(pickle.loads(pickle.dumps(model))) == EXAMPLE
    assert list(model.state_dict()) == [f"child{i}.linear.{name}" for i in range(4) for name in ("weight", "bias")]


def test_set_partition_places_a_module_with_all_that_is_in_it():
    model = Model()
    smp.set_partition(model.child1, 0)
    assert read_marks(model) == {
        name: 0 if name == "child1" else i for name, i in EXAMPLE.items() if name != "child1.linear"
    }
    smp.set_partition(model.child1, 1)
    assert read_marks(model)["child1"] == 1, "the later of two calls counts"


@pytest.mark.parametrize("inner_first", [True, False])
def test_the_innermost_set_partition_counts_in_any_order(inner_first):
    model = Model()
    calls = [(model.child0.linear, 2), (model.child0, 0)]
    for module, index in calls if inner_first else reversed(calls):
        smp.set_partition(module, index)
    found = read_marks(model)
    assert (found["child0"], found["child0.linear"]) == (0, 2)


def test_lists_hand_their_partition_to_what_they_hold():
    layers = nn.ModuleList(Child() for _ in range(5))
    smp.set_partition(layers[2:4], 1)  # a list of its own, which the model does not know
    assert read_marks(layers) == {"2": 1, "3": 1}
    smp.set_partition(layers[3], 2)
    smp.set_partition(layers[1:], 0)
    assert read_marks(layers) == {"1": 0, "2": 0, "3": 2, "4": 0}
    with smp.partition(1):
        made_inside = nn.ModuleDict({"a": nn.ModuleList([layers[0]]), "b": layers[3]})
    assert read_marks(made_inside) == {"": 1, "a": 1, "a.0": 1, "b": 2}


def test_a_module_with_two_names_is_listed_once():
    model = Model()
    model.again = model.child1
    assert read_marks(model) == EXAMPLE


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        ("1", ConfigTypeError, "expected an int, found str '1'"),
        (True, ConfigTypeError, "expected an int, found bool True"),
        (-1, ConfigError, "expected a partition from 0 up, found -1"),
    ],
)
def test_an_index_that_can_never_be(index, error, text):
    with pytest.raises(error, match=f"smp.partition: {text}"), smp.partition(index):
        pass
    with pytest.raises(error, match=f"smp.set_partition: {text}"):
        smp.set_partition(nn.Linear(1, 1), index)
    with pytest.raises(ConfigTypeError, match=r"expected a torch\.nn\.Module, found int"):
        smp.set_partition(3, 0)


def test_an_index_beyond_the_ranks_is_found_at_once_after_init(by_hand):
    with (
        pytest.raises(ConfigError, match=r"smp.partition: .* pipeline_parallel_degree - 1 = 0, found 1"),
        smp.partition(1),
    ):
        pass


def test_an_index_beyond_the_ranks_is_found_when_the_model_is_wrapped():
    model = Model()
    smp.init({"pipeline_parallel_degree": 1, "auto_partition": False, "default_partition": 0})
    try:
        with pytest.raises(ConfigError, match=r"(?s)module child0: .* found 1\n.*module child1: .* found 2\n"):
            smp.DistributedModel(model)
    finally:
        smp.shutdown()


def test_one_warning_where_the_partitioner_chooses():
    smp.init({"pipeline_parallel_degree": 1})
    try:
        with smp.partition(7):
            model = Child()
        with pytest.warns(UserWarning, match="have no effect: auto_partition is true") as caught:
            smp.DistributedModel(model)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert manual_partition(model, smp.state.cfg) is None
    finally:
        smp.shutdown()


@smp.step
def step(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss


def test_without_a_pipeline_everything_is_on_partition_0(by_hand):
    with smp.partition(0):
        module = Child()
    model = smp.DistributedModel(module)
    manual = manual_partition(module, smp.state.cfg)
    assert (manual.marks, manual.default) == ((("", 0), ("linear", 0)), 0)
    x = torch.randn(4, 2)
    assert torch.equal(step(model, x)[0], module(x).sum())
    smp.set_partition(module, 0)  # nothing moves
