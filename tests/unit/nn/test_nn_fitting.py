"""Hooks of `tp_register_with_module` that were written for another release of a module."""

import pytest
import torch
from torch import nn

from smpc.errors import UsageError
from smpc.nn.distribution.registry import fitted


class Block(nn.Module):
    """As a newer release has it."""

    def forward(self, hidden, past=None, mask=None, use_cache=False, **kwargs):
        return hidden


def hook_of(function):
    return fitted("forward_hook", function, Block, Block.forward)


def older(hidden, layer_past=None, mask=None):
    return (hidden, layer_past), {"mask": mask}


def test_a_hook_with_the_same_arguments_is_used_as_it_is():
    def same(hidden, past=None, mask=None, use_cache=False, **kwargs):
        return (), {}

    assert hook_of(same) is same
    assert hook_of(None) is None


def test_arguments_go_by_name_then_by_place():
    hook = hook_of(older)
    assert hook(1, 2, 3) == ((1, 2), {"mask": 3})
    assert hook(hidden=1, mask=3, past=2) == ((1, 2), {"mask": 3})
    assert hook(1, use_cache=False) == ((1, None), {"mask": None})
    renamed = hook_of(lambda x, *, mask=5: ((x,), {"mask": mask}))
    assert renamed(torch.ones(1), None, 3)[1] == {"mask": 3}
    assert renamed(1)[1] == {"mask": 5}


def test_an_argument_that_says_something_and_has_no_place_is_refused():
    with pytest.raises(
        UsageError, match="forward_hook of Block does not take use_cache, which this release of the module is given"
    ):
        hook_of(older)(1, use_cache=True)


def test_what_the_module_takes_as_anything_is_left_out_and_told_once():
    hook = hook_of(older)
    with pytest.warns(UserWarning, match="forward_hook of Block does not take position_ids, which has no effect then"):
        assert hook(1, position_ids=torch.ones(1)) == ((1, None), {"mask": None})
    hook(1, position_ids=torch.ones(1))
    assert hook_of(lambda hidden, **more: ((hidden,), more))(1, 2, other=3) == ((1,), {"past": 2, "other": 3})


@pytest.mark.parametrize(
    "function", [lambda hidden, past, mask, cache, more: 0, lambda self, hidden: 0, lambda x, /: 0]
)
def test_a_hook_with_parameters_that_nothing_fits_is_refused(function):
    with pytest.raises(
        UsageError, match=r"expected the forward_hook of Block to take the arguments of Block.forward without self, "
    ):
        hook_of(function)
