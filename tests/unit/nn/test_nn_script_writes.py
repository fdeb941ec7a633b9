"""Parameters that are noticed between steps (of bf16 models, whose masters take over what scripts write) are ordinary in all else."""

import copy
import pickle

import torch
from torch import nn
from torch.nn.utils import parametrizations

from smpc.nn.script_writes.data_aliases import data_version, watch_data


def watched():
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    for parameter in layer.parameters():
        watch_data(parameter)
    return layer


def test_what_is_made_of_a_noticed_parameter_is_ordinary():
    """`nn.Parameter(weight)` was an error of torch's about the class of `weight`, so that weight_norm was, too."""
    weight = watched().weight
    made = [nn.Parameter(weight), type(weight)(torch.ones(2), requires_grad=False), copy.deepcopy(weight)]
    made += [copy.copy(weight), pickle.loads(pickle.dumps(weight)), nn.ParameterList([nn.Parameter(weight)])[0]]
    assert [type(each) for each in made] == [nn.Parameter] * 6
    assert made[0].data_ptr() == weight.data_ptr()
    assert not made[1].requires_grad
    for parametrize in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal):
        found, plain = watched(), nn.Linear(4, 3)
        plain.load_state_dict(found.state_dict())
        for layer in (found, plain):
            torch.manual_seed(1)
            parametrize(layer)
            layer(torch.ones(2, 4)).sum().backward()
            torch.optim.SGD(layer.parameters(), lr=0.1).step()
        assert all(torch.equal(one, other) for one, other in zip(found.parameters(), plain.parameters(), strict=True))


def test_writes_through_data_count():
    weight = watched().weight
    before = data_version(weight)
    weight.data.clamp_(-0.1, 0.1)
    assert data_version(weight) != before
