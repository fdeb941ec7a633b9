"""Every tuple of degrees (pipeline, tensor, context, expert, shards, replicas) trains as one process does, or is refused beforehand.

Experts over replicas without a pipeline are left to tests/multiproc/test_v1_experts.py: plans have none.
"""

import pytest
import torch
from degree_cases import MODELS, refusal, run_cases, tuples
from executor_harness import Launch


def results(world, folder, cases):
    for rank, (status, log) in enumerate(Launch(run_cases, world, folder, cases).wait(timeout=3600)):
        assert status == 0, f"rank {rank} ended with {status}:\n{log}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


AT_ONCE = 4  # groups of ended cases have threads that wake up 100 times in a second, as long as their process lives


def check(world, folder, cases):
    wrong = {}
    for start in range(0, len(cases), AT_ONCE):
        some = cases[start : start + AT_ONCE]
        found = results(world, folder, some)
        assert all(list(of_rank) == some for of_rank in found)
        wrong |= {case: of_rank[case] for case in some for of_rank in found if of_rank[case]}
    assert not wrong


def degrees_of(world, name):
    """Experts over replicas, without a pipeline, are tested in scripts for `smpc.v1` (test_v1_experts.py)."""
    fitting = [found for found in tuples(world, has_experts=name == "mixture") if not refusal(found)]
    return [found for found in fitting if found.pipeline > 1 or found.shard * found.context % found.expert == 0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world", [2, 4])
def test_small_worlds(world, name, tmp_path):
    dtypes = (torch.float32, torch.float64)
    check(world, tmp_path, [(degrees, name, dtype) for degrees in degrees_of(world, name) for dtype in dtypes])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_eight_ranks(name, tmp_path):
    check(8, tmp_path, [(degrees, name, torch.float64) for degrees in degrees_of(8, name)])


def test_degrees_that_do_not_fit_are_refused_before_any_group_is_made():
    """The only ones: experts are divided over ranks that have other samples, or other parts of sequences."""
    refused = [found for world in (2, 4, 8) for found in tuples(world, has_experts=True) if refusal(found)]
    assert refused == [
        found
        for world in (2, 4, 8)
        for found in tuples(world, has_experts=True)
        if found.context * (found.shard if found.shard > 1 else found.num_replicas) % found.expert
    ]
    for found in refused:
        said = refusal(found)
        assert said.startswith("expert_parallel_degree: expected a divisor of")
        assert "\n" not in said
