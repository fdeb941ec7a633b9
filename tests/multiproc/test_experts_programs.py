"""Experts that are modules of their own, divided by `smpc.expert_parallel.shard` and run by programs of a pipeline."""

import degree_cases
import pytest
import torch
from executor_harness import run_workers
from mixtures import made

from smpc.mesh.mesh import Degrees, Mesh

DEGREES = Degrees(4, pipeline=2, expert=2)


def losses(rank, folder, name):
    """The losses of steps of AdamW, by the ranks that have them; later ones tell of every gradient before."""
    degree_cases.made = lambda _, dtype: made(name, dtype).train()
    degree_cases._whole = lambda *_: {}
    mesh = Mesh.of(DEGREES)
    return [loss for loss, _ in degree_cases._on_plan(rank, mesh, name, torch.float64)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["listed", "sorted"])
def test_a_pipeline_of_blocks_that_call_their_experts_one_by_one(tmp_path, name):
    found = run_workers(losses, 4, tmp_path, name)
    degree_cases.made, before = (lambda _, dtype: made(name, dtype).train()), degree_cases.made
    try:
        expected, _ = degree_cases.one_process(name, torch.float64, 2, degree_cases.MICROBATCHES)
    finally:
        degree_cases.made = before
    last = [own for own in found if None not in own]
    assert len(last) == 2
    mean = torch.tensor(last, dtype=torch.float64).mean(0).tolist()
    assert mean == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) > 1
