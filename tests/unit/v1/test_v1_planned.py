"""What plans of training scripts are told of the session: how much of a parameter a rank holds decides what memory is predicted."""

from types import SimpleNamespace

import pytest
import torch

from smpc.config.config import Config
from smpc.mesh import Mesh
from smpc.v1.steps.context import Measures
from smpc.v1.steps.programs.compiler import _options


@pytest.mark.parametrize(
    ("settings", "world", "holders", "shards"),
    [
        ({"sharded_data_parallel_degree": 2}, 4, 2, 2),
        ({"sharded_data_parallel_degree": 2, "context_parallel_degree": 2}, 8, 4, 4),  # predicted 7 to 20% too high
        ({"fully_shard": True, "context_parallel_degree": 2}, 8, 4, 4),
        ({"context_parallel_degree": 2}, 8, 4, 1),
    ],
)
def test_parts_lie_over_context_parallel_ranks_as_well(settings, world, holders, shards):
    config = Config.parse({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 4, **settings})
    session = SimpleNamespace(config=config, mesh=Mesh.build(config, world), device=torch.device("cpu"), planned_for=())
    options = _options(session, Measures(False, False))
    assert (options.num_holders, options.num_shards) == (holders, shards)
