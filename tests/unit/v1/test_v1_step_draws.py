"""States of random generators that travel from the first rank to the last one."""

import random

import numpy as np
import pytest
import torch

from smpc.errors import UsageError
from smpc.v1.steps.step_draws import as_tensors, drawing_from
from smpc.verification.random_state import RandomState

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def kept():
    """The generators of the process are afterwards what they were."""
    before = RandomState.now(CPU)
    yield
    before.restore()


def draw():
    return random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(3).tolist()


@pytest.mark.parametrize("num_before", [0, 1])
def test_the_other_rank_draws_the_same_and_its_own_go_on(num_before):
    """One draw before leaves a pending normal number in Python and in NumPy."""
    for seed in range(num_before):
        torch.manual_seed(seed), random.gauss(0, 1), np.random.randn()
    sent = as_tensors(RandomState.now(CPU))
    expected = draw()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    own = RandomState.now(CPU)
    with drawing_from(sent, CPU):
        assert draw() == expected
    assert RandomState.now(CPU).is_same(own)


def test_draws_of_every_generator_are_seen():
    for once in (random.random, np.random.rand, lambda: torch.rand(1)):
        before = RandomState.now(CPU)
        assert RandomState.now(CPU).is_same(before)
        once()
        assert not RandomState.now(CPU).is_same(before)


def test_another_generator_behind_numpy_is_seen_and_refused():
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        before = RandomState.now(CPU)
        np.random.rand()
        assert not RandomState.now(CPU).is_same(before)
        with pytest.raises(UsageError, match="PCG64"):
            as_tensors(before)
    finally:
        np.random.set_bit_generator(own)
