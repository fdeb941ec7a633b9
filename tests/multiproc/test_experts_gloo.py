"""Experts on two real ranks against one process: Hugging Face's mixtures and hand-written ones."""

import itertools

import expert_models
import pytest
from executor_harness import run_workers

MODELS = (*expert_models.SETTINGS, *expert_models.HAND_WRITTEN)
LIMITS = {"float32": (1e-6, 1e-5), "float64": (1e-13, 1e-10)}  # of the loss, of any gradient
OWN, SAME = (0, 1), (0, 0)  # each rank its own tokens, and all the same
FIRST = (("float32", OWN), ("float64", SAME))
OTHERS = (("float32", SAME), ("float64", OWN))


@pytest.mark.long
@pytest.mark.parametrize("kinds", [FIRST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["first", "others"])
def test_losses_and_gradients(tmp_path, kinds):
    cases = [(model, *kind) for model, kind in itertools.product(MODELS, kinds)]
    for found in run_workers(expert_models.ranks_against_one_process, 2, tmp_path, cases):
        assert list(found) == cases
        wrong = {
            case: got
            for case, got in found.items()
            if any(e > limit for e, limit in zip(got, LIMITS[case[1]], strict=False))
        }
        assert not wrong
        assert all(held < 1 for _, _, held in found.values())
