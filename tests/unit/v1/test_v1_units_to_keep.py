"""How long blocks of a model in parts stay whole, without a pipeline."""

import pytest
from torch import nn

from smpc.config import Config
from smpc.sharding import Keep
from smpc.v1.model.replication import units_to_keep


class Model(nn.Module):
    """Two small blocks, and two of a larger parameter each."""

    def __init__(self):
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.large = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


@pytest.mark.parametrize("sharded", [{"fully_shard": True}, {"sharded_data_parallel_degree": 2}])
@pytest.mark.parametrize(
    ("keys", "small", "large"),
    [
        ({}, Keep.STEP, Keep.STEP),
        ({"sdp_param_persistence_threshold": 17}, Keep.STEP, Keep.MICROBATCH),
        ({"sdp_param_persistence_threshold": 17, "sdp_max_live_parameters": 100}, Keep.STEP, Keep.NEVER),
        ({"sdp_param_persistence_threshold": 0, "sdp_max_live_parameters": 1}, Keep.NEVER, Keep.NEVER),
    ],
)
def test_blocks_are_gathered_as_often_as_the_keys_say_whichever_way_parts_were_asked_for(sharded, keys, small, large):
    config = Config.parse({"ddp": True, **sharded, **keys})
    found = {unit.name: unit.keep for unit in units_to_keep(Model(), config, None)}
    assert [found["small.0"], found["small.1"]] == [small, small]
    assert [found["large.0"], found["large.1"]] == [large, large]
