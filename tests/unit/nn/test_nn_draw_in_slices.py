"""Initializers on slices: what a rank keeps is what one that draws the whole has there, and no whole is ever made."""

import math

import hugging_face
import pytest
import torch
import transformers
from largest_tensor import LargestTensor
from torch import nn

from smpc.errors import ConfigError
from smpc.nn.init.delayed import delay_param_initialization, draw_delayed
from smpc.nn.parallel import ParameterSlice, own_part_of

CPU = torch.device("cpu")


def delayed(make):
    torch.manual_seed(7)
    with delay_param_initialization():
        return make()


def shard_of(size, dim, rank, degree, blocks=1):
    """A slice of every one of equal blocks."""
    block = size // blocks
    share = block // degree
    runs = tuple((i * block + rank * share, share) for i in range(blocks))
    return ParameterSlice(dim, size, runs[0][0], runs if blocks > 1 else ())


def slices_of(model, rank, degree):
    """Every matrix, in turn by rows, by columns, and by rows in blocks; of the others nothing."""
    found = {}
    for i, (name, parameter) in enumerate(model.named_parameters()):
        shape = list(parameter.shape)
        dim, blocks = ((0, 1), (1, 1), (0, 2))[i % 3]
        if parameter.dim() > 1 and shape[dim] % (degree * blocks) == 0:
            shape[dim] //= degree
            found[name] = shard_of(parameter.shape[dim], dim, rank, degree, blocks), torch.Size(shape)
    return found


def check(make, degree=2, largest=None):
    """All ranks' slices are those of the whole, and what is whole is the same."""
    whole = delayed(make)
    draw_delayed(whole, CPU, 3)
    for rank in range(degree):
        model = delayed(make)
        slices = slices_of(model, rank, degree)
        assert slices
        with LargestTensor() as tracker:
            draw_delayed(model, CPU, 3, slices=slices)
        assert largest is None or tracker.largest <= largest
        for name, parameter in model.named_parameters():
            expected, (shard, shape) = whole.get_parameter(name), slices.get(name, (None, None))
            assert torch.equal(parameter, own_part_of(expected, shard, shape or expected.shape)), name
    return whole


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", ["gpt2", "gptj", "gptneo", "gptneox", "bert", "roberta", "t5-gated", "vit"])
def test_slices_of_hugging_face_models_are_those_of_the_whole(name):
    _, cls, make = hugging_face.MODELS[name]
    check(lambda: getattr(transformers, cls)(make()))


class Odd(nn.Module):
    """One weight, filled by `fill`."""

    def __init__(self, fill, rows=8, columns=12):
        super().__init__()
        self.weight, self.fill = nn.Parameter(torch.empty(rows, columns)), fill

    def reset_parameters(self):
        self.fill(self.weight)


def test_no_whole_weight_is_made_of_slices():
    """Weights of 4 Mi elements, by every way of torch's to draw or set elements: quarters and blocks of 1 Mi."""

    def make():
        fills = (nn.init.xavier_normal_, lambda weight: nn.init.trunc_normal_(weight, std=0.02), nn.init.ones_)
        words = nn.Embedding(2048, 2048, padding_idx=5)
        return nn.ModuleList([nn.Linear(2048, 2048), words, *(Odd(fill, 2048, 2048) for fill in fills)])

    linear, words, normal, truncated, ones = check(make, degree=4, largest=1 << 20)
    with torch.no_grad():
        assert linear.weight.abs().max() <= 1 / math.sqrt(2048)
        assert linear.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 2048), rel=0.01)
        assert not words.weight[5].any()
        assert words.weight[6].std().item() == pytest.approx(1, rel=0.1)
        assert normal.weight.std().item() == pytest.approx(math.sqrt(2 / 4096), rel=0.01)
        assert truncated.weight.std().item() == pytest.approx(0.02, rel=0.01)
        assert bool((ones.weight == 1).all())


def parts_of(weight):
    with torch.no_grad():
        weight[:4].fill_(3.0)
        weight[4:].zero_()
        weight[2].add_(1.0).mul_(2.0)
        weight.data.clamp_(max=7.0)


def passing_over_meta(weight):
    if not weight.is_meta:
        nn.init.normal_(weight)


def copied(weight):
    with torch.no_grad():
        weight.copy_(torch.arange(weight.numel()).view_as(weight))


def replaced(weight):
    weight.data = torch.ones(weight.shape) * 5


INITIALIZERS = {
    "orthogonal": nn.init.orthogonal_,
    "identity": nn.init.eye_,
    "kaiming": lambda weight: nn.init.kaiming_uniform_(weight, mode="fan_out"),
    "parts": parts_of,
    "passing over meta": passing_over_meta,
    "copied": copied,
    "replaced": replaced,
    "drawn twice": lambda weight: nn.init.normal_(nn.init.uniform_(weight)),
    "scaled by its norm": lambda weight: nn.init.normal_(weight).data.div_(weight.data.norm()),
    "columns": lambda weight: nn.init.ones_(nn.init.zeros_(weight).data[:, 3]),
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", INITIALIZERS)
def test_odd_initializers_give_the_slices_of_the_whole_too(name):
    whole = check(lambda: nn.ModuleList(Odd(INITIALIZERS[name]) for _ in range(3)))
    plain = torch.empty(8, 12)
    INITIALIZERS[name](plain)
    if name in ("identity", "parts", "copied", "replaced", "columns"):
        assert torch.equal(whole[2].weight, plain)
    elif name != "scaled by its norm":
        torch.testing.assert_close(whole[2].weight.std(), plain.std(), rtol=0.3, atol=0)


def test_what_nothing_fills_is_an_error_of_slices_too():
    model = delayed(lambda: nn.ModuleList([Odd(lambda weight: None)]))
    with pytest.raises(ConfigError, match=r"nothing fills 0\.weight"):
        draw_delayed(model, CPU, 3, slices=slices_of(model, 0, 2))


def test_errors_of_initializers_are_theirs():
    def fill(weight):
        raise RuntimeError("no weights today")

    model = delayed(lambda: nn.ModuleList([Odd(fill)]))
    with pytest.raises(RuntimeError, match="no weights today"):
        draw_delayed(model, CPU, 3, slices=slices_of(model, 0, 2))
