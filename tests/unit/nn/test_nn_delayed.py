"""Delayed initialization: no memory before, the same weights wherever they are drawn, never a whole distributed weight on one rank."""

import math
import warnings

import hugging_face
import pytest
import torch
import transformers
from largest_tensor import LargestTensor
from tensor_ranks import tensor_groups, whole_parameters
from torch import nn

from smpc.errors import ConfigError
from smpc.nn import DistributedLinear, DistributedTransformerLayer
from smpc.nn.distribution.distribute import distribute, tensor_parallelism
from smpc.nn.distribution.registry import Registry
from smpc.nn.init.delayed import delay_param_initialization, draw_delayed, is_delayed
from smpc.nn.parallel import TensorParallel

CPU = torch.device("cpu")


def delayed(make, size, rank, optimize="memory"):
    """This rank's part of a distributed model that was created with delay."""
    torch.manual_seed(7)
    with delay_param_initialization(), tensor_parallelism():
        model = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*it shares .* with another module")
        warnings.filterwarnings("ignore", message=".*divisible by tensor_parallel_degree")
        return distribute(model, Registry(), TensorParallel(tensor_groups(size)[rank], optimize))


def hugging_face_model(name):
    _, cls, make = hugging_face.MODELS[name]
    return getattr(transformers, cls)(make())


def big_gpt2():
    sizes = {"n_layer": 1, "n_embd": 1024, "n_head": 4, "n_positions": 8, "vocab_size": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, tie_word_embeddings=False))


def test_no_rank_ever_holds_a_whole_distributed_weight():
    """Of [1024, 4096] weights, a rank of four draws its quarter and blocks of 2^20 elements, and no more in its life."""
    whole = 1024 * 4096
    with LargestTensor() as tracker:
        model = delayed(big_gpt2, 4, 1)
        assert tracker.largest <= 4096, "nothing but biases, norms and buffers has memory"
        assert is_delayed(model)
        draw_delayed(model, CPU, 5)
    assert not is_delayed(model)
    assert whole // 4 <= tracker.largest <= 1 << 20
    layer = model.transformer.h[0]
    assert layer.output.dense1.weight.numel() == whole // 4
    with LargestTensor() as tracker:
        big_gpt2()
    assert tracker.largest >= whole, "the tracker sees whole weights where there are any"


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", ["gpt2", "gptj", "gptneo", "gptneox", "bert", "t5-gated", "vit"])
def test_every_degree_draws_the_same_as_one_rank(name):
    found = []
    for size in (1, 2):
        ranks = [delayed(lambda: hugging_face_model(name), size, rank) for rank in range(size)]
        for rank in ranks:
            draw_delayed(rank, CPU, 3)
        found.append({key: v[0] if isinstance(v, list) else v for key, v in whole_parameters(ranks).items()})
    for parameter, value in found[0].items():
        assert torch.equal(value, found[1][parameter]), parameter
    assert not torch.equal(*(part for part in next(v for v in found[0].values() if v.dim() == 2)[:2]))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", ["gpt2", "gptneox", "bert", "t5", "t5-gated", "vit"])
def test_weights_are_as_spread_as_those_hugging_face_draws(name):
    """By the name of each of theirs: standard deviations agree within what so many draws allow."""
    torch.manual_seed(1)
    plain = hugging_face_model(name)
    model = delayed(lambda: hugging_face_model(name), 1, 0)
    draw_delayed(model, CPU, 3)
    ours = hugging_face.FORMATS[hugging_face.MODELS[name][0]].to_hf(dict(model.named_parameters()))
    for parameter, theirs in plain.named_parameters():
        found = ours[parameter].detach()
        assert abs(found.std() - theirs.std()) <= 6 * theirs.std() / math.sqrt(theirs.numel()) + 1e-9, parameter
        assert abs(found.mean() - theirs.mean()) <= 6 * theirs.std() / math.sqrt(theirs.numel()) + 1e-9, parameter


def test_what_is_drawn_does_not_depend_on_what_else_is():
    """A rank of a pipeline draws its part alone; parameters of others get no memory, and their objects stay."""
    whole = delayed(lambda: hugging_face_model("t5"), 1, 0)
    objects = {name: id(parameter) for name, parameter in whole.named_parameters()}
    draw_delayed(whole, CPU, 3)
    assert objects == {name: id(parameter) for name, parameter in whole.named_parameters()}
    part = delayed(lambda: hugging_face_model("t5"), 1, 0)
    late = {name for name, parameter in part.named_parameters() if parameter.is_meta}
    wanted = [name for name in objects if name.startswith("decoder") or name == "shared.weight"]
    generator = torch.get_rng_state()
    draw_delayed(part, CPU, 3, wanted.__contains__)
    assert torch.equal(generator, torch.get_rng_state())
    for name, parameter in part.named_parameters():
        expected = whole.get_parameter(name)
        assert torch.equal(parameter, expected) if name in wanted or name not in late else parameter.numel() == 0


def test_what_has_values_keeps_them():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Buffer(torch.arange(3.0))
            self.scale = nn.Parameter(torch.ones(3))
            self.linear = nn.Linear(3, 3)
            self.attention = nn.MultiheadAttention(4, 2)

    with delay_param_initialization():
        model = Model()
    assert model.linear.weight.is_meta
    with delay_param_initialization(enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta
    draw_delayed(model, CPU, 0)
    assert torch.equal(model.table, torch.arange(3.0))
    assert torch.equal(model.scale, torch.ones(3))
    assert 0 < model.linear.weight.abs().max() <= 1 / math.sqrt(3)
    assert model.attention.in_proj_weight.isfinite().all()


def test_modules_of_ours_are_delayed_too():
    with delay_param_initialization():
        model = nn.Sequential(DistributedLinear(4, 4), DistributedTransformerLayer(2, 2, 4, 8))
    assert all(p.is_meta for name, p in model.named_parameters() if name == "0.weight")
    draw_delayed(model, CPU, 0)
    assert model[1]((torch.ones(1, 2, 4), None))[0].isfinite().all()


class Unfillable(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def test_what_nothing_fills_is_an_error():
    with delay_param_initialization():
        model = nn.Sequential(Unfillable())
    with pytest.raises(ConfigError, match=r"nothing fills 0.weight; .* reset_parameters"):
        draw_delayed(model, CPU, 0)
    with pytest.raises(TypeError, match="enabled to be a bool, found str 'yes'"), delay_param_initialization("yes"):
        pass
