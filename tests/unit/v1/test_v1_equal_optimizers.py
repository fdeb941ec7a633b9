"""Reports of optimizers that ranks compare, whichever rank comes to the comparison first."""

import pytest
import torch
from torch import nn

from smpc.errors import ConfigError
from smpc.v1.optimization.equal_optimizers import OptimizerAgreement


class Rank:
    def __init__(self, store, rank):
        self.module = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.agreement = OptimizerAgreement(store, rank, 2, 0)

    def tells(self, rate, updates=True):
        self.optimizer.param_groups[0]["lr"] = rate
        self.agreement.tell(self.optimizer, self.module, lambda parameter: parameter, is_cut=False, updates=updates)


@pytest.fixture
def ranks():
    store = torch.distributed.HashStore()
    found = Rank(store, 0), Rank(store, 1)
    for each in found:  # the step
        each.tells(0.1, updates=False)
    return found


def test_a_rate_that_changes_before_the_update(ranks):
    for each in ranks:  # whose other has not come to the change when the first one compares
        each.tells(0.2)
        each.agreement.check()


@pytest.mark.parametrize("first", [0, 1])
def test_a_rate_that_changes_to_another_one(ranks, first):
    ranks[first].tells(0.2)
    ranks[first].agreement.check()
    ranks[1 - first].tells(0.3)
    with pytest.raises(ConfigError, match=rf"lr: 0\.{2 + first} on rank 0, 0\.{3 - first} on rank 1"):
        ranks[1 - first].agreement.check()


@pytest.mark.parametrize("first", [0, 1])
def test_a_rate_that_changes_on_one_rank(ranks, first):
    """Whichever of them comes first."""
    ranks[first].tells(0.1 + 0.1 * first)
    ranks[first].agreement.check()
    ranks[1 - first].tells(0.2 - 0.1 * first)
    with pytest.raises(ConfigError, match=r"lr: 0\.1 on rank 0, 0\.2 on rank 1"):
        ranks[1 - first].agreement.check()


def test_rates_that_differ_in_the_step_are_told_on_all_ranks(ranks):
    ranks[1].tells(0.3, updates=False)
    for each in ranks:
        with pytest.raises(ConfigError, match=r"lr: 0\.1 on rank 0, 0\.3 on rank 1"):
            each.agreement.check()
