"""Nested containers come apart and go together again, and their structures are data."""

import collections
import dataclasses
import enum
import json
import types

import pytest
import torch
import transformers
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from smpc.errors import TraceError
from smpc.tracer import Structure, flatten, record, replay
from smpc.tracer.constants import decode, encode

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    name: str
    items: list
    hidden: int = dataclasses.field(default=0, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: torch.Tensor


class Cache:
    """A plain object that holds tensors."""

    def __init__(self, keys):
        self.keys, self.length = keys, len(keys)


class Settings:
    """A plain object that holds none."""

    def __init__(self):
        self.depth = 3


LEAVES = st.one_of(st.integers(-5, 5), st.text(max_size=3), st.none(), st.booleans())
TREES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), children, max_size=3),
        st.tuples(children, children).map(lambda pair: Point(*pair)),
        st.tuples(st.text(max_size=2), st.lists(children, max_size=2)).map(lambda pair: Record(*pair)),
    ),
    max_leaves=12,
)


@settings(max_examples=examples(200), deadline=None)
@given(TREES)
def test_flatten_and_unflatten_are_inverse(tree):
    leaves, structure = flatten(tree)
    assert structure.unflatten(leaves) == tree
    assert structure.num_leaves == len(leaves) == len(structure.paths())
    again, same = flatten(structure.unflatten(leaves))
    assert (again, same) == (leaves, structure)
    assert decode(json.loads(json.dumps(encode(structure)))) == structure


@settings(max_examples=examples(200), deadline=None)
@given(TREES)
def test_paths_lead_to_their_leaves(tree):
    leaves, structure = flatten(tree)
    for leaf, path in zip(leaves, structure.paths("tree"), strict=True):
        assert eval(path, {"tree": tree}) == leaf


def test_special_containers():
    tensor = torch.arange(3.0)
    value = {
        "output": BaseModelOutput(last_hidden_state=tensor, attentions=(tensor + 1,)),
        "top": torch.return_types.topk([tensor, tensor + 2]),
        "frozen": Frozen(tensor + 3),
        "cache": Cache([tensor + 4]),
        "slice": slice(1, tensor + 5, None),
        "set": {3, 1, 2},
        "frozenset": frozenset("b"),
        "mapping": collections.OrderedDict(a=1),
    }
    leaves, structure = flatten(value)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 7
    found = structure.unflatten(leaves)
    assert isinstance(found["output"], BaseModelOutput)
    assert found["output"].hidden_states is None
    assert found["output"][1][0] is found["output"].attentions[0]
    assert torch.equal(found["top"].indices, tensor + 2)
    assert type(found["top"]) is torch.return_types.topk
    assert type(found["frozen"]) is Frozen
    assert (type(found["cache"]), found["cache"].length) == (Cache, 1)
    assert torch.equal(found["slice"].stop, tensor + 5)
    assert (found["set"], found["frozenset"]) == ({1, 2, 3}, frozenset("b"))
    assert found["mapping"] == value["mapping"]
    assert type(found["mapping"]) is collections.OrderedDict


class Scaled(collections.namedtuple("Scaled", "value calls")):
    """A named tuple whose constructor changes what it is given."""

    def __new__(cls, value, calls=0):
        return super().__new__(cls, value * 2, calls + 1)


@dataclasses.dataclass
class Sums:
    value: torch.Tensor
    later: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.total = self.value.sum()


def test_no_constructor_runs_again():
    leaves, structure = flatten(Scaled(3))
    assert structure.unflatten(leaves) == (6, 1)
    assert type(structure.unflatten(leaves)) is Scaled
    sums = Sums(torch.arange(3.0))
    leaves, structure = flatten(sums)
    found = structure.unflatten(leaves)
    assert vars(found) == vars(sums)
    assert found.total is sums.total


def test_a_class_that_no_other_rank_finds_is_refused_when_the_output_is_recorded():
    class Local(torch.nn.Linear):
        def forward(self, x):
            return collections.namedtuple("Pair", "a b")(super().forward(x), x)

    class Shadowed(torch.nn.Linear):
        def forward(self, x):
            return self.result(super().forward(x), x)

    Shadowed.result = collections.namedtuple("Point", "x y")  # another class than the module's of that name
    for model, name in ((Local(2, 2), "Pair"), (Shadowed(2, 2), "Point")):
        with pytest.raises(TraceError, match=f"expected a class that every rank finds by its name, found .*:{name} in"):
            record(model, (torch.randn(3, 2),))


@pytest.mark.parametrize(
    "leaf",
    [torch.ones(2), torch.Size([1, 2]), torch.nn.Linear(2, 2), Settings(), enum.Enum, "text", torch.float32, 2.5],
)
def test_leaves_stay_whole(leaf):
    leaves, structure = flatten(leaf)
    assert structure == Structure()
    assert leaves[0] is leaf


def test_an_object_inside_itself_ends():
    cache = Cache([torch.ones(1)])
    cache.itself = cache
    leaves, _ = flatten(cache)
    assert leaves[-1] is cache


def test_sets_have_one_order():
    assert flatten({"b", "a", "c"})[0] == ["a", "b", "c"]


def test_caches_of_caches_are_opened_and_objects_that_hold_themselves_end():
    """Of an encoder-decoder model: caches in a cache, layers in them, keys and values in those."""
    keys = torch.arange(3.0)
    cache = types.SimpleNamespace(
        own=types.SimpleNamespace(layers=[types.SimpleNamespace(keys=keys, size=3)]), updated={0: True}
    )
    leaves, structure = flatten({"cache": cache})
    assert structure.paths() == ("['cache'].own.layers[0].keys", "['cache'].own.layers[0].size", "['cache'].updated[0]")
    assert leaves[0] is keys
    rebuilt = structure.unflatten(leaves)["cache"]
    assert rebuilt.own.layers[0].keys is keys
    assert rebuilt.updated == {0: True}
    ring = types.SimpleNamespace(other=types.SimpleNamespace(), names=["a"])
    ring.other.back = [ring]
    assert flatten(ring)[0] == [ring]


def test_a_model_returns_the_cache_of_an_encoder_and_a_decoder():
    sizes = {
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 8,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 16,
        "decoder_start_token_id": 0,
    }
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, dropout_rate=0.0)).train()
    ids = torch.randint(0, 16, (2, 5))
    arguments = {"input_ids": ids, "labels": ids, "use_cache": True}
    found, expected = replay(record(model, (), arguments), model, (), arguments), model(**arguments)
    assert torch.equal(found.loss, expected.loss)
    [(leaves, structure), (theirs, form)] = flatten(found.past_key_values), flatten(expected.past_key_values)
    assert structure == form
    tensors = [(own, other) for own, other in zip(leaves, theirs, strict=True) if isinstance(own, torch.Tensor)]
    assert len(tensors) == 4
    assert all(torch.equal(own, other) for own, other in tensors)
