"""A parameter that modules of several units of FSDP1 share: torch would give each unit one of its own."""

import torch
from executor_harness import run_workers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import smpc.v2 as tsm
from smpc.errors import UsageError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids)).square().mean()


def wrap(rank, folder):
    tsm.init({"hybrid_shard_degree": 2})
    found = []
    for original in (False, True):
        for kinds in ({nn.Embedding}, {Tied}):
            kwargs = {"use_orig_params": original, "device_id": torch.device("cpu")}
            try:
                model = FullyShardedDataParallel(Tied(), auto_wrap_policy=ModuleWrapPolicy(kinds), **kwargs)
                model(torch.arange(32)).backward()
                found.append("")
            except UsageError as error:
                found.append(str(error))
    tsm.state.reset()
    return found


def test_a_parameter_in_several_units_is_refused(tmp_path):
    for apart, together, *others in run_workers(wrap, 2, tmp_path):
        assert "found embed.weight and head.weight, which are one parameter, in several" in apart
        assert together == ""
        assert others == [apart, together]
