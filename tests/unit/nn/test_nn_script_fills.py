"""What a script does to the parameters of a model that is created without memory holds once they are drawn, whole or in slices."""

import copy
import math

import pytest
import torch
import transformers
from largest_tensor import LargestTensor
from tensor_ranks import tensor_groups, whole_parameters
from torch import nn
from torch.nn.init import orthogonal_ as made_orthogonal

from smpc.errors import ConfigError
from smpc.nn.distribution.distribute import distribute, tensor_parallelism
from smpc.nn.distribution.registry import Registry
from smpc.nn.init.delayed import delay_param_initialization, draw_delayed
from smpc.nn.init.nn_init_on_slices import fill_whole
from smpc.nn.parallel import ParameterSlice, TensorParallel, own_part_of

CPU = torch.device("cpu")


class Decoder(nn.Module):
    """As scripts initialize: by class with `apply`, by name, tables of their own, one row of an embedding."""

    def __init__(self, width=64):
        super().__init__()
        self.tokens = nn.Embedding(96, width)
        self.places = nn.Parameter(torch.empty(32, width))
        self.scale = nn.Parameter(torch.empty(width))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 96, bias=False)
        self.apply(self._init_weights)
        nn.init.trunc_normal_(self.places, std=0.3, a=-0.3, b=0.3)
        nn.init.constant_(self.scale, 2.0)
        for name, parameter in self.named_parameters():
            if name == "blocks.1.weight":
                parameter.data.mul_(0.5)
        with torch.no_grad():
            self.head.weight[3].fill_(7.0)
            self.blocks[0].bias.copy_(torch.arange(float(width)))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=1.0, std=0.1)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()


def delayed(make=Decoder, size=0, rank=0):
    """Created with delay; this rank's part of it, if `size` ranks are to have parts."""
    with delay_param_initialization(), tensor_parallelism(enabled=size > 0):
        model = make()
    return distribute(model, Registry(), TensorParallel(tensor_groups(size)[rank])) if size else model


def check_decoder(found):
    """By name, the values are distributed as in the model that is created with memory."""
    torch.manual_seed(0)
    expected = dict(Decoder().named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        own, theirs = parameter.detach(), expected[name].detach()
        spread = 6 * theirs.std() / math.sqrt(theirs.numel()) + 1e-9
        assert abs(own.mean() - theirs.mean()) <= spread, name
        assert abs(own.std() - theirs.std()) <= spread, name
    assert torch.equal(found["scale"], torch.full((64,), 2.0))
    assert torch.equal(found["blocks.0.bias"], torch.arange(64.0))
    assert torch.equal(found["head.weight"][3], torch.full((64,), 7.0))
    assert not (found["head.weight"][2] == 7.0).any()
    assert found["places"].abs().max() <= 0.3


def test_weights_are_what_the_script_makes_them():
    model = delayed()
    assert all(parameter.is_meta for parameter in model.parameters())
    draw_delayed(model, CPU, 3)
    check_decoder(dict(model.named_parameters()))
    again = delayed()
    draw_delayed(again, CPU, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


class Narrow(Decoder):
    """Without what needs a row of a weight that distributed layers cut by columns."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 96)
        self.head.weight.data.normal_(1.0, 0.1)


def test_every_degree_of_distributed_layers_draws_the_same():
    found = []
    for size in (1, 2):
        ranks = [delayed(Narrow, size, rank) for rank in range(size)]
        for rank in ranks:
            draw_delayed(rank, CPU, 3)
        found.append({key: v[0] if isinstance(v, list) else v for key, v in whole_parameters(ranks).items()})
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    assert abs(found[0]["tokens.weight"].mean() - 1) < 0.01
    assert torch.equal(found[0]["blocks.0.bias"], torch.arange(64.0))


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_are_those_of_the_whole_and_nothing_whole_is_made(dim):
    whole = delayed()
    draw_delayed(whole, CPU, 3)
    names = [
        name
        for name, parameter in whole.named_parameters()
        if parameter.dim() == 2 and (dim == 0 or "head" not in name)
    ]
    for rank in range(2):
        model, slices = delayed(), {}
        for name in names:
            shape = list(whole.get_parameter(name).shape)
            shape[dim] //= 2
            slices[name] = ParameterSlice(dim, shape[dim] * 2, rank * shape[dim]), torch.Size(shape)
        draw_delayed(model, CPU, 3, slices=slices)
        for name in names:
            assert torch.equal(model.get_parameter(name), own_part_of(whole.get_parameter(name), *slices[name])), name


def test_no_rank_holds_a_whole_weight_that_a_script_fills():
    def make():
        model = nn.Sequential(nn.Linear(1024, 4096, bias=False))
        nn.init.normal_(model[0].weight, std=0.02)
        return model

    model = delayed(make)
    with LargestTensor() as tracker:
        draw_delayed(model, CPU, 3, slices={"0.weight": (ParameterSlice(0, 4096, 1024), torch.Size([1024, 1024]))})
    assert tracker.largest <= 1 << 20
    assert model[0].weight.std().item() == pytest.approx(0.02, rel=1e-2)


class Orthogonal(nn.Module):
    def __init__(self, then=lambda weight: None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4))
        nn.init.orthogonal_(self.weight)
        then(self.weight)


@pytest.mark.parametrize("cut", [False, True])
def test_an_initializer_that_needs_the_whole_has_it(cut):
    model = delayed(Orthogonal)
    draw_delayed(model, CPU, 3, slices={"weight": (ParameterSlice(0, 8, 4), torch.Size([4, 4]))} if cut else {})
    whole = delayed(Orthogonal)
    draw_delayed(whole, CPU, 3)
    torch.testing.assert_close(whole.weight.T @ whole.weight, torch.eye(4), rtol=1e-5, atol=1e-6)
    assert torch.equal(model.weight, whole.weight[4:] if cut else whole.weight)


class OrthogonalByAnotherName(Orthogonal):
    def __init__(self):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(8, 4))
        made_orthogonal(self.weight)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_initializer_that_the_script_has_imported_by_itself_is_noted(is_wrapped):
    if is_wrapped:
        fill_whole(lambda tensor: None)  # from now on torch.nn.init has other functions than those imported before
    imported = made_orthogonal
    model, other = delayed(OrthogonalByAnotherName), delayed(Orthogonal)
    for each in (model, other):
        draw_delayed(each, CPU, 3)
    assert torch.equal(model.weight, other.weight)
    assert made_orthogonal is imported


def test_what_is_done_to_values_that_the_module_has_drawn_needs_no_whole():
    def make():
        model = nn.Sequential(nn.Linear(8, 4))
        model[0].weight.data.abs_().clamp_(max=0.1)
        return model

    model = delayed(make)
    draw_delayed(model, CPU, 3)
    assert 0 <= model[0].weight.min() < model[0].weight.max() <= 0.1 + 1e-6


def test_what_needs_a_whole_that_is_nowhere_is_an_error():
    def make():
        model = nn.Sequential(nn.Linear(8, 4))
        model[0].weight.data.t()[2:5, 1:3].zero_()
        return model

    model = delayed(make)
    with pytest.raises(
        ConfigError, match=r"0.weight is cut over ranks, and what the script does to it needs its whole values"
    ):
        draw_delayed(model, CPU, 3, slices={"0.weight": (ParameterSlice(1, 8, 4), torch.Size([4, 4]))})
    whole = delayed(make)
    draw_delayed(whole, CPU, 3)
    assert (whole[0].weight.t()[2:5, 1:3] == 0).all()
    assert (whole[0].weight != 0).sum() == 32 - 6


def test_initializers_of_modules_around_the_one_that_has_the_parameter_are_the_scripts():
    """nn.Transformer fills the weights of its parts, which have initializers of their own."""

    def make():
        return nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    model = delayed(make)
    draw_delayed(model, CPU, 3)
    torch.manual_seed(0)
    for (name, found), expected in zip(model.named_parameters(), make().parameters(), strict=True):
        assert found.detach().abs().max() == pytest.approx(expected.detach().abs().max().item(), rel=0.15, abs=1e-6), (
            name
        )


def test_a_parameter_that_is_cast_or_copied_keeps_what_was_done_to_it():
    with delay_param_initialization():
        block = nn.Linear(8, 8)
        nn.init.constant_(block.weight, 3.0)
        model = nn.ModuleList(copy.deepcopy(block) for _ in range(2)).to(torch.bfloat16)
        nn.init.constant_(model[1].bias, 5.0)
    model = model.half()
    draw_delayed(model, CPU, 3)
    for each in model:
        assert torch.equal(each.weight, torch.full((8, 8), 3.0, dtype=torch.float16))
    assert torch.equal(model[1].bias, torch.full((8,), 5.0, dtype=torch.float16))


def test_nested_contexts_note_everything_once():
    with delay_param_initialization():
        with delay_param_initialization():
            model = nn.Linear(8, 8)
            nn.init.constant_(model.weight, 3.0)
            model.weight.data.mul_(2.0)
        nn.init.constant_(model.bias, 5.0)
        nn.init.trunc_normal_(model.bias).data.add_(10.0)
    draw_delayed(model, CPU, 3)
    assert torch.equal(model.weight, torch.full((8, 8), 6.0))
    assert 8 <= model.bias.min() <= model.bias.max() <= 12


def test_an_initializer_of_the_module_that_runs_later_is_the_last_word():
    def make():
        model = nn.Linear(8, 8)
        nn.init.constant_(model.weight, 3.0)
        model.reset_parameters()
        return model

    model = delayed(make)
    draw_delayed(model, CPU, 3)
    assert model.weight.abs().max() <= 1 / math.sqrt(8)


def test_a_model_of_hugging_faces_is_drawn_as_before_unless_the_script_changes_it():
    def make(std=None):
        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 16}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        if std is not None:
            nn.init.constant_(model.transformer.h[0].mlp.c_fc.weight, std)
        return model

    plain, changed = delayed(make), delayed(lambda: make(3.0))
    for model in (plain, changed):
        draw_delayed(model, CPU, 3)
    for (name, one), other in zip(plain.named_parameters(), changed.parameters(), strict=True):
        assert torch.equal(one, other) == ("c_fc.weight" not in name), name
    assert (changed.transformer.h[0].mlp.c_fc.weight == 3.0).all()


def test_values_that_are_computed_of_values_that_are_not_there_are_an_error():
    with delay_param_initialization():
        one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        with pytest.raises(ConfigError, match="what is computed of tensors that have no values yet"):
            one.weight.data.copy_(other.weight.data * 2)
