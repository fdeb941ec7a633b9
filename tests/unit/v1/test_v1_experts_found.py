"""Which experts of a script's model ranks divide, where there are several forms of them."""

from types import SimpleNamespace

import expert_models
import pytest
from mixtures import ByHand, Listing
from torch import nn

from smpc.v1.layout.experts import _confirmed_in_layout

SESSION = SimpleNamespace(
    config=SimpleNamespace(tensor_parallel_plan="modules", shard_optimizer_state=False),
    mesh=SimpleNamespace(pp_size=1, cp_size=1, tp_size=1),
    is_sharded=False,
    rank=0,
)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.loop = ByHand(), expert_models.LoopBlock()


def test_lists_of_modules_stay_whole_beside_experts_in_one_module():
    """A list as long as something beside it is wide only looks like experts; nobody could say that it is none."""
    with pytest.warns(UserWarning, match=r"loop\.experts: there are experts in one module"):
        found = _confirmed_in_layout(Both(), 2, SESSION)
    assert [one.experts.name for one in found] == ["model.blocks.0.experts", "model.blocks.1.experts"]


def test_lists_of_modules_alone_are_divided():
    found = _confirmed_in_layout(ByHand(block=Listing), 2, SESSION)
    assert [one.name for one in found] == ["blocks.0.mixture.experts", "blocks.1.mixture.experts"]
