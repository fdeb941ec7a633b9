"""`smpc.sharding.units`: which modules are gathered together, and that every parameter belongs to the unit that has all uses of it."""

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smpc.errors import ConfigUnsupportedError
from smpc.partitioner.memory.sharded_blocks import traced_units
from smpc.sharding import find_units, shard, units_of_classes
from smpc.tracer import record


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.tail = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.Linear(2, 2), nn.LayerNorm(2))
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def test_outermost_members_of_lists_that_repeat_are_units_and_the_model_is_the_last():
    assert find_units(Model()) == ("layers.0", "layers.1", "layers.2", "tail.0", "tail.3", "")
    assert find_units(Model(), least_elements=7) == ("layers.0", "layers.1", "layers.2", "")
    assert find_units(nn.Linear(2, 2)) == ("",)


def test_containers_of_modules_that_are_not_called_are_no_units():
    rows = [nn.ModuleList([nn.Linear(2, 2), nn.PReLU()]) for _ in range(2)]
    named = [nn.ModuleDict({"up": nn.Linear(2, 2), "list": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})]
    model = nn.ModuleDict({"rows": nn.ModuleList(rows), "named": nn.ModuleList(named), "other": Block()})
    assert find_units(model) == ("named.0.list.0", "named.0.list.1", "other.experts.0", "other.experts.1", "")


def test_gradients_that_parts_do_not_get_are_refused_by_name():
    """A hook on a parameter had not been called, without a word; a sparse gradient was an error of torch's inside of the backward."""
    model = Model()
    model.tail[0].weight.register_hook(lambda grad: grad * 3)
    model.table = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(
        ConfigUnsupportedError, match=r"tail.0.weight has a hook.*\n.*table of class Embedding has sparse gradients"
    ):
        shard(model, [], mesh=None)


def test_units_by_class_inner_ones_first():
    found = units_of_classes(Model(), [Block, nn.Linear])
    assert found[:7] == (*(f"layers.{i}.experts.{j}" for i in range(3) for j in range(2)), "layers.0")
    assert found[-3:] == ("tail.0", "tail.3", "")
    assert "head" not in found  # its weight is the embedding's


def test_blocks_that_share_a_parameter_belong_to_what_is_around_them():
    model = Model()
    model.layers[2].experts[0].weight = model.layers[0].experts[0].weight
    assert find_units(model) == ("layers.1", "tail.0", "tail.3", "")
    between = Model()
    between.layers[2].experts[0] = between.layers[0].experts[0]  # a module that two blocks have
    assert find_units(between) == ("layers.1", "tail.0", "tail.3", "")
    repeated = Model()
    repeated.layers[2] = repeated.layers[0]  # one module that runs twice
    assert find_units(repeated) == ("layers.0", "layers.1", "tail.0", "tail.3", "")


@given(st.integers(0, 2**31 - 1))
def test_no_parameter_of_a_unit_is_used_outside_of_it(seed):
    """Random trees, with modules and parameters in several places."""
    generator = torch.Generator().manual_seed(seed)
    made = []

    def draw(depth):
        if made and torch.rand((), generator=generator) < 0.15:
            return made[int(torch.randint(len(made), (), generator=generator))]
        children = [draw(depth - 1) for _ in range(int(torch.randint(3, (), generator=generator)))] if depth else []
        module = nn.ModuleList(children) if children else nn.Linear(2, 2, bias=False)
        if not children and made and torch.rand((), generator=generator) < 0.2:
            other = made[int(torch.randint(len(made), (), generator=generator))]
            module.weight = other.weight if isinstance(other, nn.Linear) else module.weight
        made.append(module)
        return module

    model = nn.Sequential(draw(3), draw(2))
    for names in (find_units(model), units_of_classes(model, [nn.ModuleList, nn.Linear])):
        assert names[-1] == ""
        for name in names[:-1]:
            unit = model.get_submodule(name)
            inside = {id(module) for module in unit.modules()}
            outside = [m for m in model.modules() if id(m) not in inside]
            own = {id(parameter) for parameter in unit.parameters()}
            assert own
            assert all(id(p) not in own for m in outside for p in m._parameters.values())


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "BertForMaskedLM", "stack"]
)
def test_units_of_a_trace_are_those_of_the_model(name):
    """Predicted times had a rule of their own, by numbers in names, and not that of memory."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 64,
    }
    t5 = {
        "d_model": 32,
        "d_ff": 48,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 64,
        "decoder_start_token_id": 0,
    }
    ids = torch.zeros(1, 8, dtype=torch.long)
    kwargs = {"input_ids": ids, "labels": ids}
    if name == "stack":
        block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))  # noqa: E731
        model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Sequential(block(), block())])[0], nn.LayerNorm(4))
        args, kwargs = (torch.zeros(2, 4),), {}
    else:
        kind = getattr(transformers, name)
        more = {"use_cache": False} | (t5 if "T5" in name else sizes)
        model, args = kind(kind.config_class(**more)), ()
    trace = record(model, args, kwargs)
    state = range(len(trace.state))
    found = traced_units(trace, range(len(trace.nodes)), state, (0, 10**9))
    known = find_units(model)
    assert [unit.name for unit in found][-1] == ""
    assert {unit.name for unit in found} == set(known)
    for unit in found:
        module = model.get_submodule(unit.name)
        inside = [
            name for name in known if name and name != unit.name and (not unit.name or name.startswith(f"{unit.name}."))
        ]
        others = {id(p) for other in inside for p in model.get_submodule(other).parameters()}
        own = {
            n for n, p in model.named_parameters() if id(p) not in others and any(p is q for q in module.parameters())
        }
        assert {trace.state[i].name for i in unit.state} == own
