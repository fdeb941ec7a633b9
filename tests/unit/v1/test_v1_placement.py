"""Giving a rank its own memory of a model's parameters."""

import pytest
import torch
from torch import nn

from smpc.rank_models import copied_model
from smpc.v1.layout.placement import Placement, Slices


def normed():
    """The hook of `weight_norm` leaves a weight on the module that hangs on the graph of its parameters, from the beginning."""
    torch.manual_seed(0)
    with pytest.warns(FutureWarning, match="deprecated"):
        return nn.utils.weight_norm(nn.Linear(8, 4), dim=1)


def test_a_graph_of_former_memory_is_let_go_of():
    """Autograd expected gradients of the whole parameter's size, as its node was still there."""
    module, x = normed(), torch.randn(3, 8)
    module(x).sum().backward()
    wanted = module.weight_v.grad[:, :5]
    placement = Placement(module, 0, torch.device("cpu"), Slices(module))
    placement.release_graphs()
    assert module.weight.grad_fn is None
    for parameter in (module.weight_v, module.weight_g):
        parameter.grad = None
        parameter.data = parameter.data[:, :5].clone()
    module(x[:, :5]).sum().backward()
    torch.testing.assert_close(module.weight_v.grad, wanted)


def test_a_model_with_a_computed_weight_is_copied():
    """`copy.deepcopy` of it is an error."""
    module, x = normed(), torch.randn(3, 8)
    copied = copied_model(module, {})
    assert copied.weight_v is not module.weight_v
    assert copied.weight is not module.weight
    torch.testing.assert_close(copied(x), module(x), rtol=0, atol=0)
